"""The choice of a draft: what fits the chosen model, or several, kept up with the models in memory. Tabs place the widgets."""

from __future__ import annotations

from typing import Any

import gradio as gr

from backends.base import GainzError
from gainz_ui.i18n import T, language
from gainz_ui.page import Page
from gainz_ui.services import draft_offers
from gainz_ui.tabs import compare_view, draft_view as show
from gainz_ui.widgets import Html, shown

QUIET = {"api_visibility": "private", "show_progress": "hidden", "queue": False}


def draft_widgets(parts: dict[str, Any], prefix: str) -> None:
    """draft, draft_length and draft_note of ``parts``; their elements begin with ``prefix``."""
    lengths = [(T("draft_auto"), 0), *((str(n), n) for n in show.LENGTHS)]
    with gr.Row():                      # side by side where there is room for both
        parts["draft"] = gr.Dropdown([(T("draft_off"), "")], value="", label=T("draft"), info=T("draft_help"), min_width=260,
                                     scale=2, elem_id=f"{prefix}-draft")
        parts["draft_length"] = gr.Dropdown(lengths, value=0, visible=False, label=T("draft_length"), min_width=260,
                                            elem_id=f"{prefix}-draft-length")
    parts["draft_note"] = Html(visible=False, elem_id=f"{prefix}-draft-note")


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

    _keep_up(page, parts, parts["model"], look)


def wire_shared_draft(page: Page, parts: dict[str, Any]) -> None:
    """One draft for several models. ``parts``: models (a list of names), draft, draft_length, draft_note."""
    def look(request: gr.Request, models: list[str] | None, chosen: str | None):
        words, loaded = language(request), page.studio.loaded()
        models = [name for name in models or [] if isinstance(name, str)]
        pairs = draft_offers.offers(page.studio, models)
        offered = show.choices(words, pairs)
        chosen = chosen if chosen in {value for _, value in offered} else ""
        unfit = draft_offers.unfit(page.studio, models, show.spec(chosen))
        inexact = [name for name in models if name in loaded and name not in unfit and not loaded[name].lossless]
        note = compare_view.drafting_note(words, chosen, pairs, unfit, inexact)
        return gr.Dropdown(choices=offered, value=chosen), gr.Dropdown(visible=bool(chosen)), shown(note)

    _keep_up(page, parts, parts["models"], look)


def _keep_up(page: Page, parts: dict[str, Any], models: Any, look: Any) -> None:
    """``look`` whenever the choice, the models chosen or those in memory change."""
    inputs = [models, parts["draft"]]
    outputs = [parts["draft"], parts["draft_length"], parts["draft_note"]]
    parts["draft"].input(look, inputs, outputs, **QUIET)
    models.change(look, inputs, outputs, **QUIET)
    page.version.change(look, inputs, outputs, **QUIET)
    page.on_load(look, inputs, outputs, queue=False)
