"""The first run's offer: GPTQ and AWQ variants of the starter, made and shown side by side, with one button."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from backends.base import OutOfMemory
from gainz_ui import html
from gainz_ui.i18n import language, tr
from gainz_ui.page import Page
from gainz_ui.services import starter
from gainz_ui.services.variants import Variants
from gainz_ui.tabs.compare_flow import Flow
from gainz_ui.tabs.compare_quality import freed
from gainz_ui.tabs.compare_view import names
from gainz_ui.tabs.models_view import work
from gainz_ui.widgets import shown

KIND = "variants"                       # of the task that makes both
PERIOD = 0.25
PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}
Update = dict[Any, Any]


class Offer:
    def __init__(self, page: Page, parts: dict[str, Any], flow: Flow, widgets: list[Any]) -> None:
        self.page, self.parts, self.flow, self.widgets = page, parts, flow, widgets
        self.variants = Variants(page.studio, page.jobs)

    def wire(self) -> None:
        p, page = self.parts, self.page
        board = [p["offer_card"], p["offer_text"], p["offer"], p["offer_cancel"], p["offer_free"], p["offer_work"]]
        outputs = [*board, p["models"], p["prompt"], page.version]
        made = p["offer"].click(self.make, p["prompt"], outputs, concurrency_limit=None, **PRIVATE)
        made.success(self.flow.run, self.flow.inputs(self.widgets), self.flow.outputs(), concurrency_limit=None, **PRIVATE)
        p["offer_cancel"].click(self.cancel, None, None, queue=False, **PRIVATE)
        p["offer_free"].click(self.free, None, [p["offer_free"], p["offer_work"], page.version], **PRIVATE)
        page.version.change(self.look, None, board, queue=False, **PRIVATE)
        page.on_load(self.come_back, p["prompt"], outputs, concurrency_limit=None)

    def stands(self) -> bool:
        """Offered while the starter is there and a variant of it is not; and while one is made."""
        return bool(self.variants.starter_missing() or self.page.tasks.running(KIND))

    def look(self, request: gr.Request) -> Update:
        words, p = language(request), self.parts
        missing = self.variants.starter_missing()
        names = " + ".join(method.upper() for method in missing)
        text = html.notice("plain", tr(words, "offer_title", methods=names), [tr(words, "offer_text", name=starter.NAME)],
                           live=False)
        return {p["offer_card"]: gr.Column(visible=self.stands()),
                p["offer_text"]: text if missing else gr.skip()}

    async def make(self, request: gr.Request, prompt: str) -> AsyncIterator[Update]:
        """Both variants; then they stand chosen, with a question, and what follows asks it."""
        def work_on(report: Any, cancel: Any) -> list[str]:
            return self.variants.make_all(self.variants.starter_plans(), report, cancel)

        task = self.page.tasks.start(KIND, starter.NAME, work_on)
        async for update in self._watch(language(request), task, prompt):
            yield update
        if task.error is not None:
            raise gr.Error(str(task.error), visible=False, print_exception=False)      # nothing follows

    async def come_back(self, request: gr.Request, prompt: str) -> AsyncIterator[Update]:
        running = self.page.tasks.running(KIND)
        if not running:
            yield self.look(request)
            return
        async for update in self._watch(language(request), running[0], prompt):
            yield update

    async def _watch(self, words: str, task: Any, prompt: str) -> AsyncIterator[Update]:
        p = self.parts
        async for _ in task.looks(PERIOD):
            yield {p["offer_card"]: gr.Column(visible=True), p["offer"]: gr.Button(visible=False),
                   p["offer_cancel"]: gr.Button(visible=True),
                   p["offer_free"]: gr.Button(visible=False), p["offer_work"]: shown(work(words, [task]))}
        yield {p["offer"]: gr.Button(visible=True), p["offer_cancel"]: gr.Button(visible=False),
               **self._ended(words, task, prompt)}

    def _ended(self, words: str, task: Any, prompt: str) -> Update:
        p = self.parts
        if task.state == "cancelled":
            return {p["offer_work"]: shown(html.notice("warn", tr(words, "work_cancelled", name=task.subject)))}
        if task.error is not None:
            crowded = isinstance(task.error, OutOfMemory) and bool(self.page.studio.loaded())
            return {p["offer_work"]: shown(html.refusal(words, task.error)),
                    p["offer_free"]: gr.Button(visible=crowded)}
        chosen = [starter.NAME, *task.result]
        return {p["offer_work"]: shown(""), p["offer_card"]: gr.Column(visible=False),
                p["models"]: gr.Dropdown(choices=names(words, self.page.studio.catalog()), value=chosen),
                p["prompt"]: prompt or tr(words, "compare_example"),
                self.page.version: self.page.studio.changed.version}

    def cancel(self) -> None:
        for task in self.page.tasks.running(KIND):
            task.cancel.set()

    def free(self, request: gr.Request) -> tuple[Any, Any, int]:
        return (*freed(self.page, language(request)), self.page.studio.changed.version)

