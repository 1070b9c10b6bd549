"""The form that makes a model of another server one of ours: its address, what it has, a key. The key never comes back to a page."""

from __future__ import annotations

import gradio as gr

from backends.base import GainzError, InvalidRequest
from gainz_ui import html
from gainz_ui.i18n import T, language, tr
from gainz_ui.page import Page
from gainz_ui.services import remotes
from gainz_ui.widgets import Html, shown

KIND = "connect"


class ServerForm:
    """``add``, ``said``: as `models_add.add_forms` gives them; `wire` joins the button that only looks."""

    def __init__(self, page: Page) -> None:
        self.page = page
        with gr.Accordion(T("add_server"), open=False, elem_classes="gz-card", elem_id="gz-add-server"):
            gr.Markdown(T("add_server_help"))
            self.address = gr.Textbox(label=T("server_address"), placeholder="http://127.0.0.1:8000/v1", max_lines=1, elem_id="gz-server-address")
            self.key = gr.Textbox(label=T("server_key"), info=T("server_key_help"), type="password", max_lines=1, elem_id="gz-server-key")
            self.look = gr.Button(T("server_look"), elem_classes="gz-fit", elem_id="gz-server-look")
            self.model = gr.Dropdown([], label=T("server_model"), allow_custom_value=True, elem_id="gz-server-model")
            name = gr.Textbox(label=T("name_optional"), max_lines=1, elem_id="gz-server-name")
            add = gr.Button(T("server_add"), elem_classes="gz-fit", elem_id="gz-server-add")
            self.notice = Html(visible=False, elem_id="gz-server-notice")
        self.add = [(add, self.start, [self.address, self.key, self.model, name])]
        self.said = {self.start: self.notice}
        self.after = {self.start: (self.forget_key, None, [self.key])}

    def wire(self) -> None:
        self.look.click(self.list, [self.address, self.key], [self.model, self.notice], api_visibility="private", concurrency_limit=4)

    def list(self, request: gr.Request, address: str, key: str):
        words = language(request)
        try:
            found = remotes.listed(self.page.studio, _given(address), (key or "").strip())
        except GainzError as error:
            return gr.skip(), shown(html.refusal(words, error))
        names = [row.name for row in found]
        told = html.notice("good", tr(words, "server_found", count=len(names))) if names else html.notice("warn", tr(words, "server_empty"))
        return gr.Dropdown(choices=names, value=names[0] if names else None), shown(told)

    def start(self, address: str, key: str, model: str | None, name: str):
        address, given = _given(address), (model or "").strip()
        return KIND, given or address, lambda report, cancel: remotes.add(
            self.page.studio, self.page.store, address, given, (name or "").strip(), (key or "").strip(), cancel)

    @staticmethod
    def forget_key() -> str:
        """It lies in the file now; the page keeps none."""
        return ""


def _given(address: str | None) -> str:
    if not (address or "").strip():
        raise InvalidRequest("address is empty.", field="address", remedy="Fill in the field.")
    return address.strip()
