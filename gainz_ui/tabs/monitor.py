"""The monitor tab: how the server does, live while somebody looks at it, and a bundle of it for a report. Figures come from
services/monitor.py; this tab draws them, and only while it is the one that is open.
"""

from __future__ import annotations

import asyncio
from typing import Any

import gradio as gr

from backends.base import GainzError
from gainz_ui import html
from gainz_ui.i18n import T, language, tr
from gainz_ui.page import Page, Tab
from gainz_ui.services import diagnostics
from gainz_ui.tabs import monitor_view as show
from gainz_ui.widgets import Html, shown

NAME = "tab_monitor"
PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}


def build(page: Page) -> None:
    with gr.Column(elem_classes="gz-card"):
        gr.Markdown(T("mon_title"), elem_classes="gz-title")
        now = Html(elem_id="gz-monitor")
    with gr.Column(elem_classes="gz-card"):
        gr.Markdown(T("mon_recent"), elem_classes="gz-title")
        gr.Markdown(T("mon_recent_help"), elem_classes="gz-soft")
        recent, errors = Html(elem_id="gz-monitor-recent"), Html(visible=False, elem_id="gz-monitor-errors")
    with gr.Column(elem_classes="gz-card"):
        gr.Markdown(T("mon_bundle_title"), elem_classes="gz-title")
        gr.Markdown(T("mon_bundle_help"), elem_classes="gz-soft")
        with gr.Row(elem_classes="gz-actions"):
            make = gr.Button(T("mon_bundle"), elem_id="gz-monitor-bundle")
        said, file = Html(visible=False, elem_id="gz-monitor-said"), gr.File(label=T("mon_bundle_file"), visible=False, interactive=False,
                                                                           elem_id="gz-monitor-file")
    away, back = (gr.Button(visible="hidden", elem_id=f"gz-monitor-{name}") for name in ("away", "back"))
    last = gr.State("")                 # the table as it stands in the browser: the same again is not sent
    Live(page, now, recent, errors, last).wire(away, back)
    _wire_bundle(page, make, said, file)


class Live:
    """The tick, and when there is none."""

    def __init__(self, page: Page, now: Any, recent: Any, errors: Any, last: Any) -> None:
        self.page, self.timer = page, page.watch_timer
        self.outputs, self.last = [now, recent, errors, last], last

    def wire(self, away: Any, back: Any) -> None:
        quiet = {**PRIVATE, "queue": False}
        self.timer.tick(self.draw, self.last, self.outputs, **quiet)
        self.page.tabs.select(self.turn, self.last, [self.timer, *self.outputs], **quiet)
        away.click(lambda: gr.Timer(active=False), None, self.timer, **quiet)      # the browser shows another page (page.js)
        back.click(lambda: gr.Timer(active=True), None, self.timer, **quiet)

    def turn(self, request: gr.Request, seen: str, chosen: gr.SelectData):
        """Another tab was chosen: the clock runs only for this one, which shows something at once."""
        if chosen.index != self.page.order.index(NAME):
            return gr.Timer(active=False), *[gr.skip()] * len(self.outputs)
        return gr.Timer(active=True), *self.draw(request, seen)

    def draw(self, request: gr.Request, seen: str):
        words, now = language(request), self.page.monitor.look()
        table, errors = show.recent(words, now.recent), show.errors(words, now)
        if table + errors == seen:
            return show.live(words, now), gr.skip(), gr.skip(), gr.skip()
        return show.live(words, now), table, shown(errors), table + errors


def _wire_bundle(page: Page, make: Any, said: Any, file: Any) -> None:
    async def bundle(request: gr.Request):
        words = language(request)
        yield shown(html.bar(None, tr(words, "mon_bundle_making"))), gr.File(visible=False)
        try:
            path = await asyncio.to_thread(diagnostics.write, page.studio, page.monitor)
        except GainzError as error:
            yield shown(html.refusal(words, error)), gr.File(visible=False)
            return
        yield shown(html.notice("good", tr(words, "mon_bundle_done"), [tr(words, "mon_bundle_look")])), gr.File(str(path), visible=True)

    make.click(bundle, None, [said, file], concurrency_limit=1, **PRIVATE)


TAB = Tab(NAME, 80, build)
