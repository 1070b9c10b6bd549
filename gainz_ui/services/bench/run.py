"""A benchmark from two configurations to a report: load, calibrate, measure, unload. What the page, the API and the command line call."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import psutil

from backends.base import Cancel, InvalidRequest, Progress, ProgressFn
from backends.probe import bandwidth
from gainz_ui.services.bench import calibration, energy
from gainz_ui.services.bench.calm import Barometer
from gainz_ui.services.bench.configs import Config
from gainz_ui.services.bench.planted import planted
from gainz_ui.services.bench.protocol import Design, Measurement, Outcome
from gainz_ui.services.bench.report import levels, report
from gainz_ui.services.bench.stage import Stage

MOST_STREAMS = 16
SWEPT = 8                               # pairs at each number of streams, where there are several and no number is given


@dataclass(frozen=True)
class Ask:
    """All that a benchmark is asked. ``streams``: answers at once, one number or several to go through. ``plant``: a share by which B
    is held back, to test the benchmark itself."""

    configs: tuple[Config, Config]
    design: Design
    streams: tuple[int, ...] = (1,)
    ttft_limit: float = 1.0             # seconds; what counts as good
    tpot_limit: float = 0.1
    plant: float = 0.0

    def __post_init__(self) -> None:
        if not self.streams or any(isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_STREAMS for n in self.streams):
            raise InvalidRequest(f"Answers at once are whole numbers from 1 to {MOST_STREAMS}.", field="streams", streams=self.streams)
        for field, limit in (("ttft_limit", self.ttft_limit), ("tpot_limit", self.tpot_limit)):
            if not 0 < limit <= 3600:
                raise InvalidRequest("What counts as good is a time above 0, at most 3600 seconds.", field=field, **{field: limit})
        if not 0 <= self.plant <= 10:
            raise InvalidRequest("A planted slowdown is a share from 0 to 10.", field="plant", plant=self.plant)
        if self.design.pairs is not None and not 1 <= self.design.pairs <= 10_000:
            raise InvalidRequest("A benchmark takes 1 to 10000 pairs.", field="pairs", pairs=self.design.pairs)


def bench(studio: Any, ask: Ask, gainz: str, progress: ProgressFn, cancel: Cancel,
          changed: Callable[[Outcome], None] = lambda _: None) -> dict[str, Any]:
    """The report. Raises what loading raises, and NotMeasurable. Cancelled while it measures: the report of what was done."""
    design = replace(ask.design, drafts=tuple(config.draft for config in ask.configs))
    with Stage(studio, ask.configs, progress, cancel, max(ask.streams)) as stage:
        progress(Progress("probe", note="memory bandwidth"))
        reads = bandwidth(max((side.info.threads or 1 for side in stage.sides), default=1))
        kit = _Kit(studio, stage, Barometer(_ours), energy.find(stage.sides[0].info.device), progress, cancel)
        quick = min(stage.sides, key=lambda side: side.info.weights_bytes or math.inf)        # the sooner it is over
        known = calibration.calibrate(studio.records, lambda: kit.measure(calibration.design(design), (quick,) * 2, True))
        sides = planted(stage.sides, ask.plant) if ask.plant else stage.sides
        outcomes = _outcomes(kit, replace(design, block=stage.block), sides, ask, changed)
        streams = list(outcomes)[-1]
        made = report(replace(design, block=stage.block, streams=streams), ask, [side.info for side in stage.sides], outcomes[streams],
                      reads, gainz, known, kit.meter)
        return made | {"levels": levels(outcomes, ask, known)}


def _outcomes(kit: _Kit, design: Design, sides: Sequence[Any], ask: Ask, changed: Callable[[Outcome], None]) -> dict[int, Outcome]:
    """By number of streams, ascending; ends with the one that was cancelled."""
    found: dict[int, Outcome] = {}
    several = len(set(ask.streams)) > 1
    for streams in sorted(set(ask.streams)):
        pairs = SWEPT if several and design.pairs is None else design.pairs
        found[streams] = kit.measure(replace(design, streams=streams, pairs=pairs), sides, changed=changed)
        if found[streams].cancelled:
            break
    return found


@dataclass(frozen=True)
class _Kit:
    """What every measurement on one stage needs."""

    studio: Any
    stage: Stage
    gauge: Barometer
    meter: energy.Meter
    progress: ProgressFn
    cancel: Cancel

    def measure(self, design: Design, sides: Sequence[Any], calibrating: bool = False,
                changed: Callable[[Outcome], None] = lambda _: None) -> Outcome:
        progress = self._calibrating if calibrating else self.progress
        return Measurement(design, sides, self.gauge, progress, self.cancel, changed=changed, alone=self._alone,
                           joules=self.meter.joules).run()

    def _alone(self) -> AbstractContextManager[None]:
        return self.studio.floor.alone("a benchmark is being measured", self.cancel)

    def _calibrating(self, seen: Progress) -> None:
        self.progress(Progress("calibrate", seen.done, seen.total, "A against A, once for this machine"))


class Benches:
    """The benchmarks of an installation: alone among jobs, and kept in outputs/. ``jobs``: services.jobs.Jobs."""

    def __init__(self, studio: Any, jobs: Any, gainz: str, history: Any) -> None:
        self.studio, self.jobs, self.gainz, self.history = studio, jobs, gainz, history

    def measure(self, ask: Ask, progress: ProgressFn, cancel: Cancel,
                changed: Callable[[Outcome], None] = lambda _: None) -> dict[str, Any]:
        """The report, with the ``name`` under which it is kept. One without a single pair is not kept."""
        with self.jobs.turn(progress, cancel):
            made = bench(self.studio, ask, self.gainz, progress, cancel, changed)
        return self.history.keep(made) if made["pairs"] else made


def _ours() -> list[int]:
    """This process and its children, the engine among them."""
    try:
        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    except psutil.Error:                    # one that ended while it was looked at
        return [os.getpid()]
