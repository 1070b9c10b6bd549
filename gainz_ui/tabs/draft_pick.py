"""The choice of a draft: what fits the chosen model, kept up with the models in memory. The chat tab places the widgets."""

from __future__ import annotations

from typing import Any

import gradio as gr

from backends.base import GainzError
from gainz_ui.i18n import language
from gainz_ui.page import Page
from gainz_ui.tabs import draft_view as show
from gainz_ui.widgets import shown

QUIET = {"api_visibility": "private", "show_progress": "hidden", "queue": False}


def wire_drafts(page: Page, parts: dict[str, Any]) -> None:
    """``parts``: model, draft, draft_length, draft_note. A draft that went with its model is no longer chosen."""
    def look(request: gr.Request, model: str | None, chosen: str | None):
        words, note = language(request), ""
        try:
            target = page.studio.model(model).info
            pairs = page.studio.drafts(target.name)
        except GainzError:                                  # no model is loaded: the gate says so
            return gr.skip(), gr.skip(), gr.skip()
        offered = show.choices(words, pairs)
        chosen = chosen if chosen in {value for _, value in offered} else ""
        note = show.about(words, chosen, pairs, target)
        return gr.Dropdown(choices=offered, value=chosen), gr.Dropdown(visible=bool(chosen)), shown(note)

    inputs = [parts["model"], parts["draft"]]
    outputs = [parts["draft"], parts["draft_length"], parts["draft_note"]]
    parts["draft"].input(look, inputs, outputs, **QUIET)
    parts["model"].change(look, inputs, outputs, **QUIET)
    page.version.change(look, inputs, outputs, **QUIET)
    page.on_load(look, inputs, outputs, queue=False)
