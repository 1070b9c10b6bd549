"""The chat tab: layout and wiring. What happens is in `chat_flow`, what is shown in `chat_view`."""

from __future__ import annotations

from typing import Any

import gradio as gr

from backends.base import ModelNotLoaded, Sampling
from gainz_ui import html
from gainz_ui.forms import Form
from gainz_ui.i18n import T, language, tr
from gainz_ui.page import Page, Tab
from gainz_ui.services.chat import PRESETS, to_export, to_markdown
from gainz_ui.services.snapshot import Snapshot
from gainz_ui.tabs import chat_view as show
from gainz_ui.tabs.chat_flow import Flow, so_far, titles
from gainz_ui.tabs.chat_presets import Presets
from gainz_ui.tabs.draft_pick import draft_widgets, wire_drafts
from gainz_ui.widgets import Html, shown

# one choice an answer, and no log-probabilities: the chat does not show them
SKIPPED = ("n", "logprobs", "prompt_logprobs")
FOLDED = ("min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "seed", "min_tokens", "stop",
          "stop_ids", "ignore_eos")
PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}


def build(page: Page) -> None:
    parts: dict[str, Any] = {"chat": page.browser["chat"], "earlier": page.browser["earlier"]}
    with gr.Row(elem_classes="gz-page"):
        with gr.Column(scale=3, min_width=320):
            _conversation(parts)
            _api(parts)
        with gr.Column(scale=1, min_width=300):
            form = _settings(parts)
    flow = Flow(page, parts, form.make)
    presets = Presets(page, parts, form)
    _wire_asking(page, parts, flow, form)
    _wire_rest(page, parts, flow)
    presets.wire()
    _wire_models(page, parts)
    wire_drafts(page, parts)
    page.followed.append(parts["chatbot"])          # its dots, before the first word


# ---------------------------------------------------------------------------------------------- layout
def _conversation(parts: dict[str, Any]) -> None:
    with gr.Column(elem_classes="gz-card"):
        parts["gate"] = Html(visible=False, elem_id="gz-gate")
        parts["gate_look"] = gr.Button(visible="hidden", elem_id="gz-gate-look")     # pressed by page.js as the state changes
        with gr.Row(elem_classes="gz-actions", visible=False) as parts["gate_actions"]:
            parts["to_models"] = gr.Button(
                T("open_models"), variant="primary", elem_classes="gz-fit", elem_id="gz-open-models"
            )
            parts["start_again"] = gr.Button(T("try_again"), visible=False, elem_classes="gz-fit", elem_id="gz-start-again")
        parts["chatbot"] = gr.Chatbot(
            elem_id="gz-chatbot",
            show_label=False,
            label=T("tab_chat"),
            height="54vh",
            min_height=260,
            editable="all",
            allow_tags=False,
            buttons=["copy"],
            layout="bubble",
            placeholder=T("chat_placeholder"),
            group_consecutive_messages=False,
            reasoning_tags=[show.THINKING],
            container=False,
        )
        parts["notice"] = Html(visible=False, elem_id="gz-notice")
        with gr.Row(elem_id="gz-compose") as parts["compose"]:
            parts["composer"] = gr.Textbox(
                show_label=False,
                label=T("message"),
                placeholder=T("composer"),
                lines=1,
                max_lines=8,
                elem_id="gz-composer",
                container=False,
                autofocus=True,
            )
            parts["send"] = gr.Button(T("send"), variant="primary", elem_id="gz-send")
            parts["stop"] = gr.Button(T("stop"), variant="stop", visible=False, elem_id="gz-stop")
        with gr.Row(elem_classes="gz-actions"):
            parts["continue"] = gr.Button(T("continue"), size="sm", visible=False, elem_id="gz-continue")
            parts["retry"] = gr.Button(T("ask_again"), size="sm", visible=False, elem_id="gz-retry")
            parts["new"] = gr.Button(T("new_chat"), size="sm", elem_id="gz-new")
            parts["markdown"] = gr.Button(T("export_markdown"), size="sm", elem_id="gz-export-md")
            parts["json"] = gr.Button(T("export_json"), size="sm", elem_id="gz-export-json")
        parts["stats"] = Html(visible=False, elem_id="gz-stats")
        parts["file"] = Html("", visible="hidden", elem_id="gz-file-chat")


def _api(parts: dict[str, Any]) -> None:
    with gr.Accordion(T("api_panel"), open=False, elem_classes="gz-card", elem_id="gz-api-chat"):
        gr.Markdown(T("api_chat_help"))
        parts["api"] = gr.Markdown(elem_id="gz-api-code-chat", latex_delimiters=[])


def _settings(parts: dict[str, Any]) -> Form:
    with gr.Column(elem_classes="gz-card"):
        parts["model"] = gr.Dropdown([], label=T("model"), elem_id="gz-model", info=T("model_help"))
        draft_widgets(parts, "gz")
        parts["system"] = gr.Textbox(label=T("system_prompt"), placeholder=T("system_placeholder"), lines=2, max_lines=8,
                                     elem_id="gz-system")
        parts["preset"] = gr.Dropdown([(T(f"preset_{name}"), name) for name in PRESETS], value="balanced", label=T("preset"),
                                      elem_id="gz-preset")
        form = Form(
            Sampling,
            skip=SKIPPED,
            advanced=FOLDED,
            title=T("more_sampling"),
            defaults=PRESETS["balanced"],
            prefix="gz-sampling",
        )
        parts["overflow"] = gr.Radio([(T("overflow_drop"), "drop"), (T("overflow_refuse"), "refuse")], value="drop",
                                     label=T("overflow"), elem_id="gz-overflow")
        with gr.Accordion(T("save_preset"), open=False, elem_classes="gz-fold", elem_id="gz-presets"):
            parts["preset_name"] = gr.Textbox(label=T("preset_name"), max_lines=1, max_length=40, elem_id="gz-preset-name")
            with gr.Row(elem_classes="gz-actions"):
                parts["preset_save"] = gr.Button(T("save"), size="sm", elem_id="gz-preset-save")
                parts["preset_delete"] = gr.Button(T("delete"), size="sm", elem_id="gz-preset-delete")
            parts["preset_note"] = Html(visible=False)
        with gr.Accordion(T("earlier"), open=False, elem_classes="gz-fold", elem_id="gz-earlier"):
            gr.Markdown(T("earlier_help"))
            parts["history"] = gr.Dropdown([], label=T("earlier_open"), elem_id="gz-history")
            parts["history_clear"] = gr.Button(
                T("earlier_clear"), size="sm", elem_classes="gz-fit", elem_id="gz-history-clear"
            )
    return form


# ---------------------------------------------------------------------------------------------- wiring
def _wire_asking(page: Page, parts: dict[str, Any], flow: Flow, form: Form) -> None:
    """The listeners that generate: no limit here, the engine admits."""
    settings = [*(parts[name] for name in ("model", "system", "overflow", "draft", "draft_length")), *form.widgets]
    outputs = [
        parts[name]
        for name in ("chat", "chatbot", "composer", "stats", "notice", "send", "stop", "continue", "retry", "api", "system")
    ]
    free = {**PRIVATE, "concurrency_limit": None, "outputs": outputs}
    with_text = [parts["chat"], parts["composer"], *settings]
    gr.on([parts["send"].click, parts["composer"].submit], flow.send, with_text, **free)
    gr.on([parts["chatbot"].retry, parts["retry"].click], flow.again, [parts["chat"], *settings], **free)
    parts["continue"].click(flow.go_on, [parts["chat"], *settings], **free)
    parts["chatbot"].edit(flow.edit, [parts["chat"], *settings], **free)
    page.on_load(flow.come_back, parts["chat"], outputs, concurrency_limit=None)
    parts["stop"].click(flow.stop, parts["chat"], None, queue=False, **PRIVATE)


def _wire_rest(page: Page, parts: dict[str, Any], flow: Flow) -> None:
    """Undo, new chat, earlier chats, export."""
    parts_shown = [
        parts[name]
        for name in ("chat", "chatbot", "system", "stats", "notice", "send", "stop", "continue", "retry", "composer")
    ]
    parts["chatbot"].undo(flow.undo, parts["chat"], parts_shown, **PRIVATE)
    more = [*parts_shown, parts["earlier"], parts["history"]]
    parts["new"].click(flow.new, [parts["chat"], parts["earlier"]], more, **PRIVATE)
    parts["history"].input(flow.open, [parts["history"], parts["chat"], parts["earlier"]], more, **PRIVATE)
    parts["history_clear"].click(
        lambda: ([], gr.Dropdown(choices=[], value=None)), None, [parts["earlier"], parts["history"]], **PRIVATE
    )
    page.on_load(lambda earlier: gr.Dropdown(choices=titles(earlier)), parts["earlier"], parts["history"])

    def markdown(request: gr.Request, data: Any) -> str:
        words = language(request)
        names = {role: tr(words, f"role_{role}") for role in ("user", "assistant", "system")}
        return html.file("gainz-chat.md", to_markdown(so_far(page, data), names), "text/markdown")

    def as_json(data: Any) -> str:
        return html.file("gainz-chat.json", to_export(so_far(page, data)), "application/json")

    parts["markdown"].click(markdown, parts["chat"], parts["file"], **PRIVATE)
    parts["json"].click(as_json, parts["chat"], parts["file"], **PRIVATE)


def askable(studio: Any, snapshot: Snapshot) -> tuple[list[str], str | None]:
    """Names of the models that answer by themselves, and the one to be asked first: the one loaded last, if others are no better chats."""
    there = [info for info in snapshot.models if info.speaks]
    able = [info.name for info in there if info.chat_template] or [info.name for info in there]
    try:
        last = studio.model(None).info.name
    except ModelNotLoaded:                                  # unloaded meanwhile
        last = None
    return [info.name for info in there], last if last in able else able[-1] if able else None


def _wire_models(page: Page, parts: dict[str, Any]) -> None:
    """Which models may be asked, and what stands there while none may."""
    def look(request: gr.Request, chosen: str | None):
        words, snapshot = language(request), page.studio.snapshot()
        names, first = askable(page.studio, snapshot)
        choice = gr.Dropdown(choices=names, **({} if chosen in names else {"value": first}))
        if names:
            return (
                choice,
                shown(""),
                gr.Row(visible=False),
                gr.skip(),
                gr.Chatbot(visible=True),
                gr.Row(visible=True),
            )
        task, failed = page.startup_task(), page.startup_error()
        entries = sum(entry.ready for entry in page.studio.catalog())
        text = show.gate(words, snapshot, task, failed, entries)
        waiting = bool(snapshot.loading) or (task is not None and task.running)
        return (choice, shown(text), gr.Row(visible=not waiting), gr.Button(visible=failed is not None),
                gr.Chatbot(visible=False), gr.Row(visible=False))

    outputs = [
        parts["model"],
        parts["gate"],
        parts["gate_actions"],
        parts["start_again"],
        parts["chatbot"],
        parts["compose"],
    ]
    quiet = {**PRIVATE, "queue": False}
    page.version.change(look, parts["model"], outputs, **quiet)
    parts["gate_look"].click(look, parts["model"], outputs, **quiet)
    page.on_load(look, parts["model"], outputs, queue=False)
    parts["to_models"].click(lambda: gr.Tabs(selected="tab_models"), None, page.tabs, **quiet)
    parts["start_again"].click(page.start_again, None, None, **quiet).then(look, parts["model"], outputs, **quiet)


TAB = Tab("tab_chat", 10, build)
