"""The forms that bring a model in: from a path on this machine, or from the Hub at a fixed revision."""

from __future__ import annotations

from typing import Any

import gradio as gr

from backends.base import InvalidRequest
from gainz_ui.i18n import T
from gainz_ui.page import Page
from gainz_ui.widgets import Html


def add_forms(page: Page) -> dict[str, Any]:
    """Makes both forms; ``add``: (button, start, inputs) of each, where start(*values) gives kind, subject and work; ``said``:
    by start, the place below the form where it tells how it went."""
    with gr.Accordion(T("add_local"), open=False, elem_classes="gz-card", elem_id="gz-add-local"):
        gr.Markdown(T("add_local_help"))
        path = gr.Textbox(label=T("path"), placeholder=T("path_example"), max_lines=1, elem_id="gz-path")
        local_name = gr.Textbox(label=T("name_optional"), max_lines=1, elem_id="gz-path-name")
        link = gr.Checkbox(label=T("link_files"), info=T("link_files_help"), elem_id="gz-path-link")
        bring = gr.Button(T("import"), elem_classes="gz-fit", elem_id="gz-import")
        imported = Html(visible=False, elem_id="gz-import-notice")
    with gr.Accordion(T("add_hub"), open=False, elem_classes="gz-card", elem_id="gz-add-hub"):
        gr.Markdown(T("add_hub_help"))
        repo = gr.Textbox(label=T("repo"), placeholder="HuggingFaceTB/SmolLM2-360M-Instruct", max_lines=1, elem_id="gz-repo")
        revision = gr.Textbox(
            label=T("revision"), info=T("revision_help"), placeholder="main", max_lines=1, elem_id="gz-revision"
        )
        files = gr.Textbox(label=T("files_optional"), placeholder="*.safetensors, *.json", max_lines=1, elem_id="gz-files")
        hub_name = gr.Textbox(label=T("name_optional"), max_lines=1, elem_id="gz-repo-name")
        pull = gr.Button(T("pull"), elem_classes="gz-fit", elem_id="gz-pull")
        pulled = Html(visible=False, elem_id="gz-pull-notice")

    def start_import(place: str, name: str, linked: bool):
        place = _given("path", place)
        return (
            "import",
            place,
            lambda report, cancel: page.store.add_local(place, (name or "").strip() or None, report, cancel, link=linked),
        )

    def start_pull(source: str, at: str, wanted: str, name: str):
        source, chosen = _given("repo", source), tuple(part.strip() for part in (wanted or "").split(",") if part.strip())
        return "pull", source, lambda report, cancel: page.store.pull(
            source, (at or "").strip() or None, chosen or None, (name or "").strip() or None, report, cancel)

    return {"add": [(bring, start_import, [path, local_name, link]), (pull, start_pull, [repo, revision, files, hub_name])],
            "said": {start_import: imported, start_pull: pulled}}


def _given(field: str, text: str | None) -> str:
    if not (text or "").strip():
        raise InvalidRequest(f"{field} is empty.", field=field, remedy="Fill in the field.")
    return text.strip()
