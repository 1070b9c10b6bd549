"""The form that makes a smaller variant of the chosen model, on the models tab. The work runs as a task, like a pull."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import gradio as gr

from backends.base import InvalidRequest, make_options
from backends.recipe import QuantizeOptions
from gainz_ui.forms import Form
from gainz_ui.i18n import T
from gainz_ui.page import Page
from gainz_ui.services.variants import KIND, Variants

FIRST = ("method", "bits", "group")     # the rest is folded


def variant_form(page: Page, catalog: Any) -> tuple[Any, Any, list[Any]]:
    """(button, start, inputs), as `models_add.add_forms` gives them; ``catalog``: the widget that says which model."""
    with gr.Accordion(T("make_variant"), open=False, elem_classes="gz-card", elem_id="gz-make"):
        gr.Markdown(T("make_variant_help"))
        with gr.Column(elem_id="gz-options-variant"):
            folded = [item.name for item in fields(QuantizeOptions) if item.name not in FIRST]
            form = Form(QuantizeOptions, advanced=folded, title=T("more_options"), prefix="gz-variant")
        text = gr.Textbox(label=T("calibration_text"), info=T("calibration_text_help"), placeholder=T("bundled_calibration"),
                          max_lines=1,
                          elem_id="gz-variant-text")
        name = gr.Textbox(label=T("name_optional"), max_lines=1, elem_id="gz-variant-name")
        make = gr.Button(T("make_variant_run"), elem_classes="gz-fit", elem_id="gz-variant-run")
    variants = Variants(page.studio, page.jobs)

    def start(model: str | None, words: str, called: str, *values: Any):
        if not model:
            raise InvalidRequest("No model is chosen.", field="model", remedy="Choose the model to start from in the list.")
        options = make_options(QuantizeOptions, form.read(values))
        plan = variants.plan(model, options, (called or "").strip() or None,
                             Path(words.strip()) if (words or "").strip() else None)
        return KIND, plan.name, lambda report, cancel: variants.make(plan, report, cancel)["name"]

    return make, start, [catalog, text, name, *form.widgets]
