"""The compare tab: variants side by side, and below them the quality report. Layout only; the compare_* files do things."""

from __future__ import annotations

from typing import Any

import gradio as gr

from backends.base import Sampling
from gainz_ui import html
from gainz_ui.forms import Form
from gainz_ui.i18n import T, language, tr
from gainz_ui.page import Page, Tab
from gainz_ui.services.compare import MOST, related
from gainz_ui.tabs import compare_view as show
from gainz_ui.tabs.compare_flow import Flow
from gainz_ui.tabs.compare_offer import Offer
from gainz_ui.tabs.compare_quality import Measuring
from gainz_ui.tabs.draft_pick import draft_widgets, wire_shared_draft
from gainz_ui.widgets import Html, shown

PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}
SHOWN = ("temperature", "top_k", "top_p", "max_tokens", "seed")
SKIPPED = tuple(name for name in Sampling.__dataclass_fields__ if name not in SHOWN)
FIRST = {"max_tokens": 200}             # what the form shows at first; temperature 0, so that only the weights differ


def build(page: Page) -> None:
    parts: dict[str, Any] = {}
    with gr.Column(elem_classes="gz-page gz-column"):
        with gr.Column(elem_classes="gz-card", visible=False, elem_id="gz-offer-card") as parts["offer_card"]:
            _offer(parts)
        with gr.Column(elem_classes="gz-card"):
            form = _question(parts)
        _answers(parts)
        with gr.Column(elem_classes="gz-card"):
            _quality(parts)
        with gr.Accordion(T("api_panel"), open=False, elem_classes="gz-card", elem_id="gz-api-compare"):
            gr.Markdown(T("api_compare_help"))
            parts["api"] = gr.Markdown(elem_id="gz-api-code-compare", latex_delimiters=[])
    flow = Flow(page, parts, form.make)
    flow.wire(form.widgets)
    Measuring(page, parts).wire()
    offer = Offer(page, parts, flow, form.widgets)
    offer.wire()
    _wire_models(page, parts, offer)
    wire_shared_draft(page, parts)


def _offer(parts: dict[str, Any]) -> None:
    parts["offer_text"] = Html(elem_id="gz-offer-text")
    with gr.Row(elem_classes="gz-actions"):
        parts["offer"] = gr.Button(T("offer_button"), variant="primary", elem_id="gz-offer")
        parts["offer_cancel"] = gr.Button(T("cancel"), variant="stop", visible=False, elem_id="gz-offer-cancel")
        parts["offer_free"] = gr.Button(T("free_memory"), visible=False, elem_id="gz-offer-free")
    parts["offer_work"] = Html(visible=False, elem_id="gz-offer-work")


def _question(parts: dict[str, Any]) -> Form:
    parts["models"] = gr.Dropdown([], value=[], multiselect=True, max_choices=MOST, label=T("compare_models"),
                                  info=T("compare_models_help"), elem_id="gz-compare-models")
    parts["nothing"] = Html(visible=False)
    parts["prompt"] = gr.Textbox(label=T("compare_prompt"), placeholder=T("compare_example"), lines=2, max_lines=8,
                                 elem_id="gz-compare-prompt")
    draft_widgets(parts, "gz-compare")
    with gr.Row(elem_classes="gz-actions"):
        parts["run"] = gr.Button(T("compare_run"), variant="primary", elem_id="gz-compare-run")
        parts["stop"] = gr.Button(T("stop"), variant="stop", visible=False, elem_id="gz-compare-stop")
        parts["save"] = gr.Button(T("export_json"), size="sm", visible=False, elem_id="gz-compare-save")
    with gr.Accordion(T("compare_settings"), open=False, elem_classes="gz-fold"):
        with gr.Column(elem_id="gz-options-compare"):
            form = Form(Sampling, skip=SKIPPED, defaults=FIRST, prefix="gz-compare")
        parts["system"] = gr.Textbox(label=T("system_prompt"), placeholder=T("system_placeholder"), lines=1,
                                     elem_id="gz-compare-system")
        parts["in_turn"] = gr.Checkbox(label=T("compare_in_turn"), info=T("compare_in_turn_help"), elem_id="gz-compare-turn")
        parts["plain"] = gr.Checkbox(label=T("compare_plain"), info=T("compare_plain_help"), elem_id="gz-compare-plain")
    parts["plan"] = Html(visible=False, elem_id="gz-compare-plan")
    parts["answers"] = gr.State(None)
    parts["answers_file"] = Html(visible="hidden", elem_id="gz-file-compare")
    return form


def _answers(parts: dict[str, Any]) -> None:
    with gr.Row(elem_classes="gz-page gz-sides", visible=False, elem_id="gz-sides") as parts["sides"]:
        parts["cards"] = []
        for number in range(MOST):
            with gr.Column(elem_classes="gz-card", visible=False, min_width=260, elem_id=f"gz-side-{number}") as box:
                card = Html()
            parts["cards"].append((box, card))


def _quality(parts: dict[str, Any]) -> None:
    gr.Markdown(T("quality_title"), elem_classes="gz-title")
    gr.Markdown(T("quality_intro"), elem_classes="gz-soft")
    with gr.Accordion(T("quality_settings"), open=False, elem_classes="gz-fold"):
        with gr.Row():
            parts["windows"] = gr.Number(24, label=T("quality_windows"), info=T("quality_windows_help"), precision=0,
                                         minimum=1, maximum=10_000,
                                         elem_id="gz-quality-windows")
            parts["window_tokens"] = gr.Number(512, label=T("quality_window_tokens"), precision=0, minimum=16,
                                               maximum=65_536,
                                               elem_id="gz-quality-tokens")
        parts["text"] = gr.Textbox(label=T("quality_text"), info=T("quality_text_help"), placeholder=T("bundled_text"),
                                   max_lines=1,
                                   elem_id="gz-quality-text")
        parts["task"] = gr.Checkbox(True, label=T("quality_task"), info=T("quality_task_help"), elem_id="gz-quality-task")
    with gr.Row(elem_classes="gz-actions"):
        parts["measure"] = gr.Button(T("quality_run"), elem_id="gz-quality-run")
        parts["measure_cancel"] = gr.Button(T("cancel"), variant="stop", visible=False, elem_id="gz-quality-cancel")
        parts["measure_free"] = gr.Button(T("free_memory"), visible=False, elem_id="gz-quality-free")
    parts["measure_work"] = Html(visible=False, elem_id="gz-quality-work")
    parts["report"] = gr.State(None)
    parts["report_view"] = Html(visible=False, elem_id="gz-quality-report")
    parts["plot"] = gr.Plot(visible=False, show_label=False, container=False, elem_id="gz-plot-quality")
    with gr.Row(elem_classes="gz-actions", visible=False) as parts["exports"]:
        parts["csv"] = gr.Button(T("export_csv"), size="sm", elem_id="gz-quality-csv")
        parts["json"] = gr.Button(T("export_json"), size="sm", elem_id="gz-quality-json")
        gr.Button(T("export_png"), size="sm", elem_id="gz-quality-png")             # drawn in the browser, by page.js
    parts["report_file"] = Html(visible="hidden", elem_id="gz-file-quality")


def _wire_models(page: Page, parts: dict[str, Any], offer: Offer) -> None:
    """The choices follow what is in models/; a choice that stands is not sent back."""
    def listing(request: gr.Request, chosen: list[str] | None):
        entries = [entry for entry in page.studio.catalog() if entry.ready]
        there, choices, words = [entry.name for entry in entries], show.names(language(request), entries), language(request)
        kept = [name for name in chosen or [] if name in there] or related(entries)
        few = len(there) < 2 and not offer.stands()         # the offer above says it better
        lone = html.notice("plain", tr(words, "compare_few"), [tr(words, "compare_few_help")], live=False) if few else ""
        models = gr.Dropdown(choices=choices) if kept == chosen else gr.Dropdown(choices=choices, value=kept)
        return models, shown(lone)

    quiet = {**PRIVATE, "queue": False}
    outputs = [parts["models"], parts["nothing"]]
    page.version.change(listing, parts["models"], outputs, **quiet)
    page.on_load(listing, parts["models"], outputs, queue=False)


TAB = Tab("tab_compare", 30, build)
