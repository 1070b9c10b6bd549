"""Part of the models tab: keep the configuration of a model that works, and offer it when a load of that model fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from backends.base import GainzError
from gainz_ui import html
from gainz_ui.i18n import T, language, tr
from gainz_ui.page import Page
from gainz_ui.services.working import Working
from gainz_ui.widgets import Html, shown

QUIET = {"api_visibility": "private", "show_progress": "hidden", "queue": False}


class WorkingForm:
    """Two buttons: one while the model is loaded, the other after its load has failed."""

    def __init__(self, page: Page) -> None:
        self.page, self.working = page, Working(page.studio, page.settings.models)
        self.said = Html(visible=False, elem_id="gz-working-said")
        with gr.Row(elem_classes="gz-actions"):
            self.keep = gr.Button(T("working_keep"), visible=False, size="sm", elem_id="gz-working-keep")
            self.retry = gr.Button(T("working_load"), visible=False, elem_id="gz-working-load")

    def wire(self, catalog: Any, version: Any, load: Callable, outputs: list[Any]) -> None:
        """``load``: the tab's own listener for loads, which takes (request, name, options)."""
        both = [self.keep, self.retry, self.said]
        gr.on([catalog.change, version.change], self.show, catalog, both, **QUIET)
        self.keep.click(self.remember, catalog, self.said, **QUIET)

        async def again(request: gr.Request, name: str):
            async for update in load(request, name, self.working.offer(name) or {}):
                yield update

        self.retry.click(again, catalog, outputs, api_visibility="private", show_progress="hidden", concurrency_limit=None).then(
            self.show, catalog, both, **QUIET)

    def show(self, request: gr.Request, name: str | None):
        """After a load or another choice."""
        words, loaded = language(request), bool(name) and name in self.page.studio.loaded()
        task = self.page.tasks.latest("load", name) if name and not loaded else None
        offer = self.working.offer(name) if task is not None and task.state == "failed" else None
        said = html.notice("plain", tr(words, "working_offer"), [_words(offer)]) if offer else ""
        return gr.Button(visible=loaded), gr.Button(visible=offer is not None), shown(said)

    def remember(self, request: gr.Request, name: str):
        words = language(request)
        try:
            return shown(html.notice("good", tr(words, "working_kept"), [_words(self.working.keep(name))]))
        except GainzError as error:
            return shown(html.refusal(words, error))


def _words(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in options.items())
