"""The public name /benchmark of Gradio's client: A against B, progress as it goes, the whole report at the end. `api_names` registers it.

The report is kept in outputs/bench/ like those of the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

from backends.base import InvalidRequest
from gainz_ui import __version__
from gainz_ui.api_values import count, listed, text, whole
from gainz_ui.api_work import working
from gainz_ui.services.bench.configs import Config
from gainz_ui.services.bench.history import History
from gainz_ui.services.bench.protocol import Design
from gainz_ui.services.bench.run import Ask, Benches
from gainz_ui.services.bench.workloads import from_name
from gainz_ui.services.jobs import Jobs


def function(studio: Any, jobs: Jobs, spoken: Callable[[Callable[[], Any]], Any]) -> Callable[..., Iterator[dict]]:
    """``spoken``: turns a typed error into one that the client hears."""
    def benchmark(a: str, b: str, workload: str = "prose", pairs: int | None = None, mode: str = "cold", streams: list[int] | None = None,
                  seed: int = 0) -> dict:
        """Measure configuration b against a (each NAME or "NAME,key=value,draft=lookup:4"), pair by pair. `workload`: as for
        `python app.py bench` ("code-zh-long-512"); `pairs` null: looks after 8, 16 and 32; `streams`: answers at once. Yields stage,
        done and total; at last the whole report. Leaving stops it and keeps what is done."""
        ask = spoken(lambda: make_ask(a, b, workload, pairs, mode, streams, seed))
        benches = Benches(studio, jobs, __version__, History(studio.records))
        yield from working("bench", f"{a} → {b}", lambda report, cancel: benches.measure(ask, report, cancel), spoken, "decoder")

    return benchmark


def make_ask(a: Any, b: Any, workload: Any, pairs: Any, mode: Any, streams: Any, seed: Any) -> Ask:
    """InvalidRequest names the field."""
    if mode not in ("cold", "warm"):
        raise InvalidRequest("mode is cold or warm.", field="mode", mode=mode)
    name = text("workload", workload)
    if PurePath(name).suffix or "/" in name or "\\" in name:
        raise InvalidRequest("A workload is one of the bundled ones here; own prompts are for the page and the command line.", field="workload")
    design = Design(from_name(name), pairs=count("pairs", pairs), mode=mode, seed=count("seed", seed) or 0)
    return Ask((Config.parse(text("a", a)), Config.parse(text("b", b))), design, tuple(map(whole, listed("streams", streams))) or (1,))
