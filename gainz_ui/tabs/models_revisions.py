"""The revisions of the chosen model: which is in use, which are kept, one click back, pinned or not."""

from __future__ import annotations

import time
from typing import Any

import gradio as gr

from backends.base import BrokenFile, GainzError, InvalidRequest
from gainz_ui import html
from gainz_ui.i18n import T, language, tr
from gainz_ui.page import Page
from gainz_ui.services.revisions import Kept, Revision, roll_back
from gainz_ui.widgets import Html, shown

KIND, VERIFY = "rollback", "verify"
QUIET: dict[str, Any] = {"queue": False, "api_visibility": "private", "show_progress": "hidden"}


class RevisionCard:
    """``add``: the buttons whose work takes a while, as the forms that bring a model in; `wire` joins the rest. ``catalog``: says which model."""

    def __init__(self, page: Page, catalog: Any) -> None:
        self.page, self.catalog = page, catalog
        with gr.Column(visible=False, elem_id="gz-revisions") as self.box:
            self.list = Html(elem_id="gz-revision-list")
            self.to = gr.Dropdown([], label=T("revision_to"), visible=False, elem_id="gz-revision-to")
            with gr.Row(elem_classes="gz-actions"):
                self.back = gr.Button(T("roll_back"), visible=False, size="sm", elem_id="gz-rollback")
                self.pin = gr.Button(T("pin"), size="sm", elem_id="gz-pin")
                self.check = gr.Button(T("verify"), size="sm", elem_id="gz-verify")
        self.add = [(self.back, self.start, [catalog, self.to]), (self.check, self.verify, [catalog])]

    @property
    def parts(self) -> list[Any]:
        return [self.box, self.list, self.to, self.back, self.pin]

    def wire(self) -> None:
        gr.on([self.catalog.change, self.page.version.change], self.show, self.catalog, self.parts, **QUIET)
        self.pin.click(self.toggle, self.catalog, self.parts, **QUIET)

    def show(self, request: gr.Request, name: str | None) -> list[Any]:
        words, kept = language(request), self._kept(name)
        if kept is None or not kept.revisions or kept.revisions[0].id.startswith("files-"):     # nothing that could have another revision
            return [gr.Column(visible=False), gr.skip(), gr.skip(), gr.skip(), gr.skip()]
        others = [(_label(words, one), one.id) for one in kept.revisions if not one.active]
        chosen = kept.previous or (others[0][1] if others else None)
        return [gr.Column(visible=True), listed(words, kept), gr.Dropdown(choices=others, value=chosen, visible=len(others) > 1),
                gr.Button(T("roll_back"), visible=bool(others), interactive=not kept.pinned),
                gr.Button(T("unpin") if kept.pinned else T("pin"))]

    def _kept(self, name: str | None) -> Kept | None:
        revisions = getattr(self.page.store, "revisions", None)
        try:
            return revisions.of(name) if name and revisions is not None else None
        except GainzError:                      # the details say what is wrong with it
            return None

    def toggle(self, request: gr.Request, name: str | None) -> list[Any]:
        try:
            kept = self.page.store.revisions.of(name)
            self.page.store.revisions.pin(name, not kept.pinned)
        except GainzError as error:
            return [gr.Column(visible=True), shown(html.refusal(language(request), error)), gr.skip(), gr.skip(), gr.skip()]
        return self.show(request, name)

    def verify(self, name: str | None):
        """Every file against the manifest."""
        _need(name)

        def work(report, cancel):
            bad = [one.file for one in self.page.store.verify(name, report, cancel).files if one.state != "ok"]
            if bad:
                raise BrokenFile(f"{', '.join(bad[:5])} of {name} is not as its manifest says.", files=len(bad),
                                 remedy=f"`python app.py verify {name} --repair` fetches what is wrong again; or remove the model and fetch it anew.")
            return name
        return VERIFY, name, work

    def start(self, name: str | None, to: str | None):
        _need(name)
        page, target = self.page, to or None
        previous = page.store.revisions.of(name).previous
        target = None if target == previous else target         # a step back in history, where that is what it is

        def work(report, cancel):
            roll_back(page.studio, page.store.revisions, name, target, report, cancel)
            return name
        return KIND, name, work


def _need(name: str | None) -> None:
    if not name:
        raise InvalidRequest("No model is chosen.", field="model", remedy="Choose one in the list.")


def listed(words: str, kept: Kept) -> str:
    """All of them as rows."""
    rows = "".join(f"<li>{html.tag(one.short)} {html.escape(_about(words, one, kept))}</li>" for one in kept.revisions)
    return f'<h3 class="gz-h gz-below">{html.escape(tr(words, "revisions"))}</h3><ul class="gz-revisions">{rows}</ul>'


def _about(words: str, one: Revision, kept: Kept) -> str:
    state = tr(words, "revision_pinned" if kept.pinned else "revision_used") if one.active else tr(words, "revision_kept")
    return " · ".join((state, html.size(one.bytes), time.strftime("%Y-%m-%d", time.localtime(one.made))))


def _label(words: str, one: Revision) -> str:
    return f"{one.short} · {time.strftime('%Y-%m-%d', time.localtime(one.made))}"
