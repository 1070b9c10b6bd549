"""The benchmark on the page: start, watch, cancel, come back; what is shown of a report. The work is a task, and outlives the page
that began it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from backends.base import Cancel, Cancelled, GainzError, Progress, ProgressFn
from gainz_ui import html, plots, plots_bench
from gainz_ui.i18n import language, tr
from gainz_ui.page import Page
from gainz_ui.services.bench.quality import beside
from gainz_ui.services.bench.run import Ask, Benches
from gainz_ui.tabs import bench_view as show
from gainz_ui.tabs.snippets import address_of, call_snippets, snippets
from gainz_ui.widgets import shown

KIND, PERIOD = "bench", 0.3           # seconds between two looks whether it is over
PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}
PLOTS = {"ratio": plots_bench.ratio, "time": plots_bench.over_time, "slopes": plots_bench.slopes, "gaps": plots_bench.gaps,
         "roofline": plots_bench.roofline, "context": plots_bench.by_context, "streams": plots_bench.by_streams}
TRADE = "trade"                         # quality, speed and memory: needs a quality report as well
Update = dict[Any, Any]


@dataclass
class Pace:
    """How fast pairs come: since when, from which one on, and how many of them were measured again."""

    stage: str = ""
    since: float = 0.0
    first: float = 0.0
    repeated: int = 0

    def left(self, progress: Progress) -> float | None:
        """Seconds until this stage is done, at most; None before anything can be said."""
        if progress.stage != self.stage or progress.done < self.first:
            self.stage, self.since, self.first = progress.stage, time.monotonic(), progress.done
        done = progress.done - self.first
        if progress.stage != "measure" or done < 1:
            return None
        return (time.monotonic() - self.since) / done * (progress.total - progress.done)


class Flow:
    """``read``: values of the whole form → asks, the first of which is A against B."""

    def __init__(self, page: Page, parts: dict[str, Any], benches: Benches, read: Any) -> None:
        self.page, self.parts, self.benches, self.read = page, parts, benches, read
        self.paces: dict[int, Pace] = {}

    def wire(self, inputs: list[Any]) -> None:
        p = self.parts
        p["run"].click(self.start, inputs, self.outputs(), concurrency_limit=None, trigger_mode="once", **PRIVATE)
        self.page.places[KIND] = self.now
        p["cancel"].click(self.cancel, None, None, queue=False, **PRIVATE)
        self.page.on_load(self.come_back, None, self.outputs(), concurrency_limit=None)

    def outputs(self) -> list[Any]:
        p = self.parts
        return [p["run"], p["cancel"], p["work"], p["api"], p["kept"], *self.result()]

    def result(self) -> list[Any]:
        """Everything that `filled` fills."""
        p = self.parts
        return [p["report"], p["result"], p["verdict"], p["candidates"], p["table"], p["levels"], p["about"], p["changes"],
                *(part for name in (*PLOTS, TRADE) for part in (p[f"box_{name}"], p[f"plot_{name}"]))]

    # ------------------------------------------------------------------------------------------ doing
    async def start(self, request: gr.Request, *values: Any) -> AsyncIterator[Update]:
        words = language(request)
        try:
            asks = await asyncio.to_thread(self.read, values)
        except GainzError as error:
            yield {self.parts["work"]: shown(html.refusal(words, error))}
            return
        pace = Pace()
        subject = f"{asks[0].configs[0]} → {asks[0].configs[1]}"
        task = self.page.tasks.start(KIND, subject, lambda report, cancel: self._all(asks, pace, report, cancel))
        self.paces = {task.number: pace}
        yield {self.parts["api"]: _code(request, asks[0])}
        async for update in self._watch(words, task):
            yield update

    def _all(self, asks: Sequence[Ask], pace: Pace, report: ProgressFn, cancel: Cancel) -> list[dict[str, Any]]:
        """Each candidate against A. Cancelled: those that have pairs."""
        def counted(outcome: Any) -> None:
            pace.repeated = outcome.repeated

        made: list[dict[str, Any]] = []
        for ask in asks:
            try:
                made.append(self.benches.measure(ask, report, cancel, counted))
            except Cancelled:
                if not made:
                    raise
            if cancel.is_set():
                break
        return made

    async def come_back(self, request: gr.Request) -> AsyncIterator[Update]:
        """A page that is opened takes up what runs, and finds the last report."""
        task = self.page.tasks.latest(KIND)
        if task is None:
            yield gr.skip()
            return
        async for update in self._watch(language(request), task):
            yield update

    async def _watch(self, words: str, task: Any) -> AsyncIterator[Update]:
        """The page asks past Gradio how far it is: an event of Gradio's costs a browser time that is measured here."""
        p = self.parts
        if task.running:
            yield {p["run"]: gr.Button(visible=False), p["cancel"]: gr.Button(visible=True),
                   p["work"]: shown(f'<div data-place="{KIND}">{self.now(words)}</div>')}
        async for _ in task.looks(PERIOD):
            pass
        yield await asyncio.to_thread(self._ended, words, task)

    def now(self, words: str) -> str:
        """How far the running benchmark is; empty: none runs."""
        task = next(iter(self.page.tasks.running(KIND)), None)
        if task is None:
            return ""
        pace = self.paces.get(task.number) or Pace()
        return show.work(words, task, pace.left(task.progress), pace.repeated)

    def _ended(self, words: str, task: Any) -> Update:
        p = self.parts
        out = {p["run"]: gr.Button(visible=True), p["cancel"]: gr.Button(visible=False), p["kept"]: time.time()}
        if task.error is not None:
            said = html.notice("warn", tr(words, "work_cancelled", name=task.subject)) if task.state == "cancelled" else html.refusal(words, task.error)
            return {**out, p["work"]: shown(said)}
        return {**out, p["work"]: shown(""), **self.filled(words, task.result[0], task.result)}

    def cancel(self) -> None:
        for task in self.page.tasks.running(KIND):
            task.cancel.set()

    # ------------------------------------------------------------------------------------------ showing
    def filled(self, words: str, report: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> Update:
        """The whole result of one report. ``others``: what else was measured against the same A, itself among them."""
        p, names = self.parts, show.axes(words)
        several = show.candidates(words, others) if len(others) > 1 else ""
        out = {p["report"]: report, p["result"]: gr.Column(visible=True), p["verdict"]: shown(show.verdict(words, report)),
               p["candidates"]: shown(several), p["table"]: shown(show.table(words, report)),
               p["levels"]: shown(show.levels(words, report)), p["about"]: shown(show.about(words, report)),
               p["changes"]: shown("")}
        figures = {name: make(report, names) for name, make in PLOTS.items()} | {TRADE: self._trade(words, report)}
        for name, figure in figures.items():
            out[p[f"box_{name}"]] = gr.Column(visible=figure is not None)
            out[p[f"plot_{name}"]] = gr.Plot(figure, visible=figure is not None)
        return out

    def _trade(self, words: str, report: dict[str, Any]) -> Any:
        points = beside(self.page.studio.records, report)
        if not points:
            return None
        names = {"size": tr(words, "axis_memory"), "speed": tr(words, "axis_speed"), "kl": tr(words, "axis_kl"),
                 "reference": tr(words, "the_reference")}
        return plots.trade_off(points, names)


def _code(request: gr.Request, ask: Ask) -> str:
    a, b = map(str, ask.configs)
    design = ask.design
    arguments = {"a": a, "b": b, "workload": design.workload.name, "pairs": design.pairs, "mode": design.mode,
                 "streams": list(ask.streams), "seed": design.seed}
    return snippets(*call_snippets("benchmark", arguments, address_of(request)))
