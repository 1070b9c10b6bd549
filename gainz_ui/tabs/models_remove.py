"""Part of the models tab: delete the chosen model, after a second question, or hear why it cannot be."""

from __future__ import annotations

from typing import Any

import gradio as gr

from backends.base import GainzError
from gainz_ui import html
from gainz_ui.i18n import T, language, tr
from gainz_ui.page import Page
from gainz_ui.services import removal
from gainz_ui.widgets import Html, shown

QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "queue": False}


class RemoveForm:
    """``asked``: the name that the second question was about; only that one is deleted, whatever is chosen by then."""

    def __init__(self, page: Page, catalog: Any) -> None:
        self.page, self.catalog, self.asked = page, catalog, gr.State("")
        with gr.Row(elem_classes="gz-actions"):
            self.ask = gr.Button(T("remove"), size="sm", visible=False, elem_id="gz-remove")
        self.said = Html(visible=False, elem_id="gz-remove-said")
        with gr.Row(elem_classes="gz-actions"):
            self.sure = gr.Button(T("remove_sure"), variant="stop", size="sm", visible=False, elem_id="gz-remove-sure")
            self.keep = gr.Button(T("remove_keep"), size="sm", visible=False, elem_id="gz-remove-keep")

    def wire(self, notice: Any) -> None:
        """``notice``: where the tab says what has been done."""
        parts = [self.ask, self.said, self.sure, self.keep, self.asked]
        gr.on([self.catalog.change, self.page.version.change, self.keep.click], self.rest, self.catalog, parts, **QUIET)
        self.ask.click(self.question, self.catalog, parts, **QUIET)
        self.sure.click(self.remove, self.asked, [*parts, notice, self.page.version], **QUIET)

    def rest(self, name: str | None, said: str = "") -> list[Any]:
        return [gr.Button(visible=bool(name)), shown(said), gr.Button(visible=False), gr.Button(visible=False), ""]

    def question(self, request: gr.Request, name: str) -> list[Any]:
        words = language(request)
        try:
            entry = removal.check(self.page.studio, name)
        except GainzError as error:
            return self.rest(name, html.refusal(words, error))
        text = tr(words, "remove_question", name=name, size=html.size(entry.size))
        return [gr.Button(visible=False), shown(html.notice("warn", text)), gr.Button(visible=True), gr.Button(visible=True), name]

    def remove(self, request: gr.Request, name: str) -> list[Any]:
        words = language(request)
        try:
            removal.remove(self.page.studio, self.page.store, name)
        except GainzError as error:
            return [*self.rest(name, html.refusal(words, error)), gr.skip(), gr.skip()]
        done = shown(html.notice("good", tr(words, "removed", name=name)))
        return [*self.rest(None), done, self.page.studio.changed.version]
