"""The batch tab: a file of tasks through a loaded model, with progress, pause and cancel. The work outlives the page; a page that
is opened later finds it. What a batch is, services/batch.py knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gradio as gr

from backends.base import Cancel, GainzError, InvalidRequest, Progress
from gainz_ui import html
from gainz_ui.i18n import T, explain, language, tr
from gainz_ui.page import Page, Tab, asker
from gainz_ui.services import batch as batches
from gainz_ui.services.batch_files import failures_of
from gainz_ui.widgets import Html, shown

PERIOD = 0.5
PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}
STATES = {"running": "batch_running", "paused": "batch_paused", "stopping": "batch_stopping", "cancelled": "batch_cancelled",
          "done": "batch_done", "error": "batch_error"}
EXAMPLE = '{"task_id": "1", "prompt": "The capital of France is", "max_tokens": 16}'


def build(page: Page) -> None:
    parts: dict[str, Any] = {}
    with gr.Column(elem_classes="gz-card"):
        gr.Markdown(T("batch_title"), elem_classes="gz-title")
        gr.Markdown(T("batch_intro"), elem_classes="gz-soft")
        gr.Code(EXAMPLE, language=None, interactive=False, show_label=False, lines=1, max_lines=2)
        parts["file"] = gr.File(label=T("batch_file"), file_types=[".jsonl", ".json", ".txt"], type="filepath", height=120, elem_id="gz-batch-file")
        parts["model"] = gr.Dropdown([], label=T("batch_model"), elem_id="gz-batch-model")
        with gr.Accordion(T("more_options"), open=False, elem_classes="gz-fold"):
            parts["name"] = gr.Textbox(label=T("batch_name"), info=T("batch_name_help"), max_lines=1, elem_id="gz-batch-name")
            with gr.Row():
                parts["attempts"] = gr.Number(3, label=T("batch_attempts"), precision=0, elem_id="gz-batch-attempts")
                parts["limit"] = gr.Number(0, label=T("batch_limit"), elem_id="gz-batch-limit")
            parts["skip"] = gr.Checkbox(label=T("batch_skip"), info=T("batch_skip_help"), elem_id="gz-batch-skip")
        with gr.Row(elem_classes="gz-actions"):
            parts["run"] = gr.Button(T("batch_run"), variant="primary", elem_id="gz-batch-run")
            parts["pause"] = gr.Button(T("batch_pause"), visible=False, elem_id="gz-batch-pause")
            parts["resume"] = gr.Button(T("batch_resume"), visible=False, elem_id="gz-batch-resume")
            parts["cancel"] = gr.Button(T("cancel"), variant="stop", visible=False, elem_id="gz-batch-cancel")
        parts["work"] = Html(visible=False, elem_id="gz-batch-work")
        parts["files"] = gr.File(label=T("batch_results"), visible=False, interactive=False, file_count="multiple", elem_id="gz-batch-results")
    Running(page, parts).wire()


class Running:
    """The batches of this installation by name, and what the page shows of the last one."""

    def __init__(self, page: Page, parts: dict[str, Any]) -> None:
        self.page, self.parts = page, parts
        self.batches: dict[str, batches.Batch] = {}

    def wire(self) -> None:
        p = self.parts
        outputs = [p[name] for name in ("run", "pause", "resume", "cancel", "work", "files")]
        inputs = [p[name] for name in ("file", "model", "name", "attempts", "limit", "skip")]
        p["run"].click(self.start, inputs, outputs, concurrency_limit=None, **PRIVATE)
        p["file"].change(self.cleared, None, [p["work"], p["files"]], queue=False, **PRIVATE)
        for name, act in (("pause", lambda one: one.pause()), ("resume", lambda one: one.resume()), ("cancel", lambda one: one.cancel.set())):
            p[name].click(self._each(act), None, None, queue=False, **PRIVATE)
        self.page.version.change(self.models, p["model"], p["model"], queue=False, **PRIVATE)
        self.page.on_load(self.models, p["model"], p["model"], queue=False)
        self.page.on_load(self.come_back, None, outputs, concurrency_limit=None)

    def models(self, chosen: str | None) -> Any:
        names = [name for name, info in self.page.studio.loaded().items() if info.speaks]
        return gr.Dropdown(choices=names, value=chosen if chosen in names else names[0] if names else None)

    def cleared(self) -> Any:
        """Another file is chosen: what was said of the last one goes, unless it still runs."""
        if next(iter(self.page.tasks.running(batches.KIND)), None) is not None:
            return gr.skip(), gr.skip()
        return shown(""), gr.File(visible=False)

    def _each(self, act: Any) -> Any:
        def work() -> None:
            for task in self.page.tasks.running(batches.KIND):
                if task.subject in self.batches:
                    act(self.batches[task.subject])
        return work

    # ------------------------------------------------------------------------------------------ doing
    async def start(self, request: gr.Request, file: str | None, model: str | None, name: str, attempts: float, limit: float,
                    skip: bool) -> AsyncIterator[dict]:
        words = language(request)
        try:
            task = await asyncio.to_thread(self._begin, file, model, name, attempts, limit, skip, asker(request))
        except GainzError as error:
            yield {self.parts["work"]: shown(html.refusal(words, error)), self.parts["files"]: gr.File(visible=False)}
            return
        async for update in self._watch(words, task):
            yield update

    def _begin(self, file: str | None, model: str | None, name: str, attempts: float, limit: float, skip: bool, key: str) -> Any:
        if not file:
            raise InvalidRequest("No file is chosen.", field="tasks", remedy="Choose a file of tasks, one JSON object a line.")
        if not model:
            raise InvalidRequest("No model is loaded.", field="model", remedy="Load one on the Models tab.")
        called = (name or "").strip() or Path(file).stem
        made = batches.begin(self.page.studio, Path(file).read_bytes(), model, called, attempts=int(attempts or 0), time_limit=limit or None,
                             skip_bad=skip, key=key)
        self.batches[called] = made
        return self.page.tasks.start(batches.KIND, called, lambda report, cancel: _follow(made, report, cancel))

    async def come_back(self, request: gr.Request) -> AsyncIterator[dict]:
        """A page that is opened takes up what runs, and finds the last one's results."""
        task = self.page.tasks.latest(batches.KIND)
        if task is None or task.subject not in self.batches:
            yield {self.parts["work"]: gr.skip()}
            return
        async for update in self._watch(language(request), task):
            yield update

    async def _watch(self, words: str, task: Any) -> AsyncIterator[dict]:
        p, made = self.parts, self.batches[task.subject]
        async for _ in task.looks(PERIOD):
            now = made.standing()
            yield {p["run"]: gr.Button(visible=False), p["pause"]: gr.Button(visible=now.state == "running"),
                   p["resume"]: gr.Button(visible=now.state == "paused"), p["cancel"]: gr.Button(visible=True),
                   p["work"]: shown(render(words, task.subject, now)), p["files"]: gr.File(visible=False)}
        files = [str(path) for path in (made.plan.output, failures_of(made.plan.output)) if path.exists()]
        yield {p["run"]: gr.Button(visible=True), **{p[name]: gr.Button(visible=False) for name in ("pause", "resume", "cancel")},
               p["work"]: shown(render(words, task.subject, made.standing())), p["files"]: gr.File(files, visible=bool(files))}


def _follow(made: batches.Batch, report: Any, cancel: Cancel) -> dict[str, Any]:
    end = batches.follow(made, lambda now: report(Progress("batch", now.done, now.total)), cancel)
    if end.error is not None:
        raise end.error
    return batches.describe(made)


def render(words: str, name: str, now: batches.Standing) -> str:
    """Where a batch stands: a bar, and its figures."""
    say = lambda key, **values: tr(words, key, **values)  # noqa: E731
    share = now.done / now.total if now.total else 1.0
    rows = [(say("batch_done_count"), say("batch_of", done=html.number(now.done), total=html.number(now.total)))]
    if now.failed:
        rows.append((say("batch_failed"), html.number(now.failed)))
    if now.tokens_per_second:
        rows.append((say("batch_speed"), f"{now.tokens_per_second:,.0f} tok/s · {60 * (now.rate or 0):,.0f} {say('batch_a_minute')}"))
    if now.seconds_left:
        rows.append((say("batch_left"), html.duration(now.seconds_left)))
    kind = {"done": "warn" if now.failed else "good", "error": "bad", "cancelled": "warn"}.get(now.state, "plain")
    head = html.notice(kind, f"{name}: {say(STATES[now.state])}", [" ".join(explain(words, now.error)[1:])] if now.error else [])
    return head + html.bar(share, f"{100 * share:.0f} %") + html.facts(rows)


TAB = Tab("tab_batch", 45, build)
