"""The quality report on the page: start, watch, cancel, come back, export. The work is a task, and outlives the page that
began it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gradio as gr

from backends.base import GainzError, OutOfMemory
from gainz_ui import html, plots
from gainz_ui.i18n import language, tr
from gainz_ui.page import Page
from gainz_ui.services import quality
from gainz_ui.tabs import quality_view as show
from gainz_ui.tabs.models_view import work
from gainz_ui.widgets import shown

PERIOD = 0.25
PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}
Update = dict[Any, Any]


class Measuring:
    def __init__(self, page: Page, parts: dict[str, Any]) -> None:
        self.page, self.parts = page, parts
        self.quality = quality.Quality(page.studio, page.jobs)

    def wire(self) -> None:
        p = self.parts
        inputs = [p["models"], p["text"], p["windows"], p["window_tokens"], p["task"]]
        outputs = [p["measure"], p["measure_cancel"], p["measure_free"], p["measure_work"], p["report"], p["report_view"],
                   p["plot"], p["exports"]]
        p["measure"].click(self.start, inputs, outputs, concurrency_limit=None, **PRIVATE)
        p["measure_cancel"].click(self.cancel, None, None, queue=False, **PRIVATE)
        p["measure_free"].click(self.free, None, [p["measure_free"], p["measure_work"], self.page.version], **PRIVATE).then(
            self.start, inputs, outputs, concurrency_limit=None, **PRIVATE)
        p["csv"].click(self.csv, p["report"], p["report_file"], queue=False, **PRIVATE)
        p["json"].click(self.json, p["report"], p["report_file"], queue=False, **PRIVATE)
        self.page.on_load(self.come_back, None, outputs, concurrency_limit=None)

    # ------------------------------------------------------------------------------------------ doing
    async def start(self, request: gr.Request, names: list[str] | None, text: str, windows: float, window_tokens: float,
                    task: bool) -> AsyncIterator[Update]:
        """The first of the chosen variants is the reference."""
        words = language(request)
        try:
            reference, *models = names or [""]
            ask = quality.Ask(reference, tuple(models), Path(text.strip()) if (text or "").strip() else None,
                              int(windows or 0),
                              int(window_tokens or 0), task)
        except GainzError as error:
            yield {self.parts["measure_work"]: shown(html.refusal(words, error))}
            return
        made = self.page.tasks.start(quality.KIND, ", ".join(models), lambda report,
                                     cancel: self.quality.measure(ask, report, cancel))
        async for update in self._watch(words, made):
            yield update

    async def come_back(self, request: gr.Request) -> AsyncIterator[Update]:
        """A page that is opened takes up what runs, and finds the last report."""
        task = self.page.tasks.latest(quality.KIND)
        if task is None:
            yield gr.skip()
            return
        async for update in self._watch(language(request), task):
            yield update

    async def _watch(self, words: str, task: Any) -> AsyncIterator[Update]:
        p = self.parts
        async for _ in task.looks(PERIOD):
            yield {p["measure"]: gr.Button(visible=False), p["measure_cancel"]: gr.Button(visible=True),
                   p["measure_free"]: gr.Button(visible=False),
                   p["measure_work"]: shown(work(words, [task]))}
        yield self._ended(words, task)

    def _ended(self, words: str, task: Any) -> Update:
        p = self.parts
        out = {p["measure"]: gr.Button(visible=True), p["measure_cancel"]: gr.Button(visible=False)}
        if task.state == "cancelled":
            return {**out, p["measure_work"]: shown(html.notice("warn",
                                                                tr(words, "work_cancelled",
                                                                   name=tr(words, "quality_title"))))}
        if task.error is not None:
            crowded = isinstance(task.error, OutOfMemory) and bool(self.page.studio.loaded())
            return {**out, p["measure_work"]: shown(html.refusal(words, task.error)),
                    p["measure_free"]: gr.Button(visible=crowded)}
        return {**out, p["measure_work"]: shown(""), **self._shown(words, task.result)}

    def _shown(self, words: str, report: dict[str, Any]) -> Update:
        p, points = self.parts, show.points(report)
        names = {"size": f"{tr(words, 'fact_size')} (MB)", "speed": tr(words, "axis_speed"), "kl": tr(words, "axis_kl"),
                 "reference": tr(words, "the_reference")}
        figure = plots.trade_off(points, names) if points else None
        return {p["report"]: report, p["report_view"]: shown(show.report(words, report)),
                p["plot"]: gr.Plot(figure, visible=bool(points)), p["exports"]: gr.Row(visible=bool(report["rows"]))}

    def cancel(self) -> None:
        for task in self.page.tasks.running(quality.KIND):
            task.cancel.set()

    def free(self, request: gr.Request) -> tuple[Any, Any, int]:
        return (*freed(self.page, language(request)), self.page.studio.changed.version)

    # ------------------------------------------------------------------------------------------ files
    def csv(self, report: dict[str, Any]) -> str:
        return html.file("gainz-quality.csv", quality.to_csv(report), "text/csv")

    def json(self, report: dict[str, Any]) -> str:
        return html.file("gainz-quality.json", quality.to_json(report), "application/json")


def freed(page: Page, words: str) -> tuple[Any, Any]:
    """Every model out of memory: (its button, what is said)."""
    names = list(page.studio.loaded())
    for name in names:
        page.studio.unload(name)
    return gr.Button(visible=False), shown(html.notice("plain", tr(words, "freed", names=", ".join(names))))
