"""The monitor tab: how the server does, live while somebody looks at it, and a bundle of it for a report. Here are the places; page.js
fetches what belongs there (live.py), and only while they are in sight.
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

PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}


def build(page: Page) -> None:
    with gr.Column(elem_classes="gz-card"):
        gr.Markdown(T("mon_title"), elem_classes="gz-title")
        Html(show.places("tiles", "charts", "times", "models"), elem_id="gz-monitor")
    with gr.Column(elem_classes="gz-card"):
        gr.Markdown(T("mon_recent"), elem_classes="gz-title")
        gr.Markdown(T("mon_recent_help"), elem_classes="gz-soft")
        Html(show.places("recent", "errors"), elem_id="gz-monitor-requests")
    with gr.Column(elem_classes="gz-card"):
        gr.Markdown(T("mon_bundle_title"), elem_classes="gz-title")
        gr.Markdown(T("mon_bundle_help"), elem_classes="gz-soft")
        with gr.Row(elem_classes="gz-actions"):
            make = gr.Button(T("mon_bundle"), elem_id="gz-monitor-bundle")
        said, file = Html(visible=False, elem_id="gz-monitor-said"), gr.File(label=T("mon_bundle_file"), visible=False, interactive=False,
                                                                           elem_id="gz-monitor-file")
    _wire_bundle(page, make, said, file)


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


TAB = Tab("tab_monitor", 80, build)
