"""A benchmark from two configurations to a report: load, measure, unload. What the page and the command line call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import psutil

from backends.base import Cancel, Progress, ProgressFn
from backends.probe import bandwidth
from gainz_ui.services.bench.calm import Barometer
from gainz_ui.services.bench.configs import Config
from gainz_ui.services.bench.protocol import Design, Measurement, Outcome
from gainz_ui.services.bench.report import report
from gainz_ui.services.bench.stage import Stage


def bench(studio: Any, configs: Sequence[Config], design: Design, gainz: str, progress: ProgressFn, cancel: Cancel,
          changed: Callable[[Outcome], None] = lambda _: None) -> dict[str, Any]:
    """The report. Raises what loading raises, and NotMeasurable. Cancelled while it measures: the report of what was done."""
    design = replace(design, drafts=tuple(config.draft for config in configs))
    with Stage(studio, configs, progress, cancel) as stage:
        progress(Progress("probe", note="memory bandwidth"))
        reads = bandwidth(max((side.info.threads or 1 for side in stage.sides), default=1))
        gauge = Barometer(_ours)
        outcome = Measurement(replace(design, block=stage.block), stage.sides, gauge, progress, cancel, changed=changed).run()
        return report(replace(design, block=stage.block), configs, [side.info for side in stage.sides], outcome, reads, gainz)


def _ours() -> list[int]:
    """This process and its children, the engine among them."""
    try:
        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    except psutil.Error:                    # one that ended while it was looked at
        return [os.getpid()]
