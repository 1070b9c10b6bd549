"""The benchmark tab: two configurations, a verdict, what it rests on, and what was measured before. Layout only; the bench_* files do
things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr

from gainz_ui import __version__, html
from gainz_ui.i18n import T, language, tr
from gainz_ui.page import Page, Tab
from gainz_ui.services.bench import exports
from gainz_ui.services.bench.history import History
from gainz_ui.services.bench.run import Benches
from gainz_ui.services.compare import related
from gainz_ui.tabs.bench_flow import PLOTS, TRADE, Flow
from gainz_ui.tabs.bench_form import USUAL, ProtocolForm, SideForm
from gainz_ui.tabs.bench_history import Past
from gainz_ui.tabs.compare_view import names
from gainz_ui.widgets import Html, shown

PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}


def build(page: Page) -> None:
    parts: dict[str, Any] = {}
    with gr.Column(elem_classes="gz-page gz-column"):
        with gr.Column(elem_classes="gz-card"):
            sides, protocol = _form(parts)
        with gr.Column(elem_classes="gz-page gz-column", visible=False, elem_id="gz-bench-result") as parts["result"]:
            _result(parts)
        with gr.Column(elem_classes="gz-card"):
            _past(parts)
        with gr.Accordion(T("api_panel"), open=False, elem_classes="gz-card", elem_id="gz-api-benchmark"):
            gr.Markdown(T("api_benchmark_help"))
            parts["api"] = gr.Markdown(elem_id="gz-api-code-benchmark", latex_delimiters=[])
    history = History(page.studio.records)
    count = len(sides[0].widgets)

    def read(values: Sequence[Any]) -> list[Any]:
        a, b = sides[0].read(values[:count]), sides[1].read(values[count:2 * count])
        return protocol.read(a, b, values[2 * count:])

    flow = Flow(page, parts, Benches(page.studio, page.jobs, __version__, history), read)
    flow.wire([*sides[0].widgets, *sides[1].widgets, *protocol.widgets])
    Past(page, parts, flow, history, sides, protocol).wire()
    _wire_models(page, parts, sides)


def _form(parts: dict[str, Any]) -> tuple[tuple[SideForm, SideForm], ProtocolForm]:
    gr.Markdown(T("bench_title"), elem_classes="gz-title")
    gr.Markdown(T("bench_intro"), elem_classes="gz-soft")
    with gr.Row(elem_classes="gz-sides gz-page"):
        made = []
        for letter in "ab":
            with gr.Column(min_width=260):
                made.append(SideForm(letter))
    parts["nothing"] = Html(visible=False)
    protocol = ProtocolForm()
    with gr.Row(elem_classes="gz-actions"):
        parts["run"] = gr.Button(T("bench_run"), variant="primary", elem_id="gz-bench-run")
        parts["cancel"] = gr.Button(T("bench_cancel"), variant="stop", visible=False, elem_id="gz-bench-cancel")
    parts["work"] = Html(visible=False, elem_id="gz-bench-work")
    parts["report"] = gr.State(None)
    parts["kept"] = gr.Number(0, visible="hidden")      # changes when a report is kept
    return (made[0], made[1]), protocol


def _result(parts: dict[str, Any]) -> None:
    with gr.Column(elem_classes="gz-card"):
        parts["verdict"] = Html(elem_id="gz-bench-verdict")
        parts["candidates"] = Html(visible=False, elem_id="gz-bench-candidates")
        parts["table"] = Html(elem_id="gz-bench-table")
        parts["levels"] = Html(visible=False, elem_id="gz-bench-levels")
        with gr.Row(elem_classes="gz-actions"):
            for arm in "ab":
                parts[f"use_{arm}"] = gr.Button(T(f"bench_use_{arm}"), size="sm", elem_id=f"gz-bench-use-{arm}")
            for name in exports.FORMATS:
                parts[f"save_{name}"] = gr.Button(T(f"export_{name}"), size="sm", elem_id=f"gz-bench-{name}")
            gr.Button(T("export_png"), size="sm", elem_id="gz-bench-png")       # drawn in the browser, by page.js
        parts["used"] = Html(visible=False, elem_id="gz-bench-used")
        parts["file"] = Html(visible="hidden", elem_id="gz-file-bench")
    with gr.Row(elem_classes="gz-page gz-sides gz-plots"):
        for name in (*PLOTS, TRADE):
            with gr.Column(elem_classes="gz-card", visible=False, min_width=260) as parts[f"box_{name}"]:
                gr.Markdown(T(f"plot_{name}"), elem_classes="gz-title")
                gr.Markdown(T(f"plot_{name}_help"), elem_classes="gz-soft")
                parts[f"plot_{name}"] = gr.Plot(visible=False, show_label=False, container=False, elem_id=f"gz-plot-bench-{name}")
    with gr.Column(elem_classes="gz-card"):
        gr.Markdown(T("bench_circumstances"), elem_classes="gz-title")
        parts["about"] = Html(elem_id="gz-bench-about")
        with gr.Row(elem_classes="gz-actions"):
            parts["baseline"] = gr.Dropdown([], value=None, label=T("bench_baseline"), elem_id="gz-bench-baseline")
            parts["compare"] = gr.Button(T("bench_compare"), size="sm", elem_id="gz-bench-compare")
        parts["changes"] = Html(visible=False, elem_id="gz-bench-changes")


def _past(parts: dict[str, Any]) -> None:
    gr.Markdown(T("bench_past"), elem_classes="gz-title")
    parts["filter"] = gr.Textbox("", label=T("bench_filter"), placeholder=T("bench_filter_example"), max_lines=1, elem_id="gz-bench-filter")
    parts["runs"] = gr.Radio([], show_label=False, label=T("bench_past"), container=False, visible=False, elem_id="gz-bench-runs",
                             elem_classes="gz-list")
    parts["none"] = Html(visible=False, elem_id="gz-bench-none")
    with gr.Row(elem_classes="gz-actions"):
        parts["open"] = gr.Button(T("bench_open"), size="sm", elem_id="gz-bench-open")
        parts["again"] = gr.Button(T("bench_again"), size="sm", elem_id="gz-bench-again")
        parts["refresh"] = gr.Button(T("rescan"), size="sm", elem_id="gz-bench-refresh")
    parts["past_said"] = Html(visible=False, elem_id="gz-bench-past-said")


def _wire_models(page: Page, parts: dict[str, Any], sides: tuple[SideForm, SideForm]) -> None:
    """The choices follow what is in models/; what is chosen stands as long as it is there."""
    def listing(request: gr.Request, a: str | None, b: str | None):
        entries = [entry for entry in page.studio.catalog() if entry.ready]
        there, choices = [entry.name for entry in entries], names(language(request), entries)
        first = related(entries) or [""]
        picked = [one if one in there else first[min(place, len(first) - 1)] or None for place, one in enumerate((a, b))]
        drafts = [USUAL, ("lookup", "lookup"), *((name, name) for name in there), *((f"lookup+{name}", f"lookup+{name}") for name in there)]
        lone = "" if there else html.notice("plain", tr(language(request), "bench_no_models"), live=False)
        same = b not in there and picked[0] == picked[1]                    # one model: with a draft against without
        drafted = [gr.Dropdown(choices=drafts), gr.Dropdown(choices=drafts, **({"value": "lookup"} if same else {}))]
        return (*(gr.Dropdown(choices=choices, value=one) for one in picked), *drafted, shown(lone))

    inputs = [side.model for side in sides]
    outputs = [*inputs, *(side.draft for side in sides), parts["nothing"]]
    page.version.change(listing, inputs, outputs, queue=False, **PRIVATE)
    page.on_load(listing, inputs, outputs, queue=False)


TAB = Tab("tab_benchmark", 40, build)
