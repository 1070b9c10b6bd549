"""The form that makes a draft of the chosen model, and what a draft that is there has learned. The work runs as tasks."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import gradio as gr

from backends.base import BrokenFile, GainzError, InvalidRequest, make_options, read_json
from backends.draft_recipe import DraftOptions
from gainz_ui import html, plots
from gainz_ui.forms import Form
from gainz_ui.i18n import T, language, tr
from gainz_ui.page import Page
from gainz_ui.services.draft_making import KIND, PLAN, DraftMaking, made
from gainz_ui.widgets import Html, shown

FIRST = ("layers", "minutes", "head_ids")       # the rest is folded


class DraftForm:
    """``add``: (button, start, inputs) of both buttons, as `models_add.add_forms` gives them; ``catalog``: the widget that says
    which model; ``notice``: where the form tells how it went."""

    def __init__(self, page: Page, catalog: Any) -> None:
        self.page, self.drafts, self.catalog = page, DraftMaking(page.studio, page.jobs), catalog
        with gr.Accordion(T("make_draft"), open=False, elem_classes="gz-card", elem_id="gz-make-draft"):
            gr.Markdown(T("make_draft_help"))
            with gr.Column(elem_id="gz-options-draft-form"):
                folded = [item.name for item in fields(DraftOptions) if item.name not in FIRST]
                self.form = Form(DraftOptions, advanced=folded, title=T("more_options"), prefix="gz-newdraft")
            text = gr.Textbox(label=T("draft_text"), info=T("draft_text_help"), placeholder=T("draft_bundled"), max_lines=1,
                              elem_id="gz-draft-text")
            name = gr.Textbox(label=T("name_optional"), max_lines=1, elem_id="gz-draft-name")
            look = gr.Button(T("draft_check"), elem_classes="gz-fit", elem_id="gz-draft-look")
            self.cost = Html(visible=False, elem_id="gz-draft-cost")
            self.make = gr.Button(T("draft_run"), visible=False, variant="primary", elem_classes="gz-fit", elem_id="gz-draft-run")
            self.notice = Html(visible=False, elem_id="gz-draft-notice")
        self.inputs = [catalog, text, name, *self.form.widgets]
        self.add = [(look, self.look, self.inputs), (self.make, self.begin, self.inputs)]
        self.said = {self.look: self.notice, self.begin: self.notice}
        self.after = {self.look: (self.show_cost, self.inputs, [self.cost, self.make]),
                      self.begin: (self.done, None, [self.cost, self.make])}

    def look(self, *values: Any) -> tuple[str, str, Any]:
        plan = self._plan(*values)
        return PLAN, plan.name, lambda report, cancel: self.drafts.look(plan, report, cancel)

    def begin(self, *values: Any) -> tuple[str, str, Any]:
        plan = self._plan(*values)
        return KIND, plan.name, lambda report, cancel: self.drafts.make(plan, report, cancel)["name"]

    def _plan(self, model: str | None, words: str, called: str, *values: Any) -> Any:
        if not model:
            raise InvalidRequest("No model is chosen.", field="model", remedy="Choose the model to start from in the list.")
        options = make_options(DraftOptions, self.form.read(values))
        return self.drafts.plan(model, options, (called or "").strip() or None,
                                Path(words.strip()) if (words or "").strip() else None)

    # ---- after the looking
    def show_cost(self, request: gr.Request, *values: Any):
        """What leaving the layers out costs, and the button that goes on; nothing where the looking failed."""
        words = language(request)
        try:
            plan = self._plan(*values)
        except GainzError:                      # the notice has it already
            return shown(""), gr.Button(visible=False)
        task = self.page.tasks.latest(PLAN, plan.name)
        if task is None or task.state != "done":
            return shown(""), gr.Button(visible=False)
        found = task.result
        head = tr(words, "draft_cost", kept=", ".join(map(str, found["kept"])), before=_figure(found["perplexity_before"]),
                  after=_figure(found["perplexity_after"]))
        tail = tr(words, "draft_cost_trained" if plan.options.trained else "draft_cost_pruned")
        kind = "plain" if plan.options.trained else "warn"
        return shown(html.notice(kind, head, [tail])), gr.Button(visible=True)

    def done(self):
        return shown(""), gr.Button(visible=False)


class DraftCard:
    """What the chosen model, where it is a draft, has learned: facts and the curve of its training."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.facts = Html(visible=False, elem_id="gz-draft-facts")
        self.plot = gr.Plot(visible=False, show_label=False, container=False, elem_id="gz-draft-curve")

    def show(self, request: gr.Request, name: str | None):
        words = language(request)
        try:
            found = made(name, read_json(self.page.settings.models / name / "manifest.json")) if name else None
        except BrokenFile:                      # the catalog says so
            found = None
        if found is None:
            return shown(""), gr.Plot(visible=False)
        lines = [tr(words, "draft_facts_layers", kept=", ".join(map(str, found.layers)))]
        if found.agreement is None:
            before, after = map(_figure, found.perplexities)
            lines.append(tr(words, "draft_facts_pruned", before=before, after=after))
        else:
            lines.append(tr(words, "draft_facts_guesses", agreement=f"{100 * found.agreement:.1f}",
                            overlap=f"{100 * (found.overlap or 0):.1f}"))
            lines.append(tr(words, "draft_facts_trained", time=html.duration(60 * found.minutes)))
        notice = html.notice("plain", tr(words, "draft_facts", name=name, parent=found.parent), lines, live=False)
        titles = {"step": tr(words, "curve_step"), "right": tr(words, "curve_right"), "loss": tr(words, "curve_loss")}
        figure = plots.learning(found.curve, titles) if found.curve else None
        return shown(notice), gr.Plot(figure, visible=figure is not None)


def _figure(perplexity: float) -> str:
    return f"{perplexity:,.1f}" if perplexity < 1000 else html.number(perplexity)
