"""The doctor tab: what this machine has, what it lacks and what to do. The findings come from the doctor service."""

from __future__ import annotations

import asyncio
import json
from itertools import groupby
from typing import Any

import gradio as gr

from gainz_ui import html
from gainz_ui.i18n import T, has, language, said, tr
from gainz_ui.page import Page, Tab
from gainz_ui.widgets import Html, shown

KINDS = {"ok": "good", "info": "plain", "warn": "warn", "fail": "bad"}
PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}


def build(page: Page) -> None:
    with gr.Column(elem_classes="gz-card"):
        with gr.Row(elem_classes="gz-actions"):
            run = gr.Button(T("doctor_run"), variant="primary", elem_id="gz-doctor-run")
            gr.Button(T("doctor_save"), elem_id="gz-doctor-save")
        intro = Html(T("doctor_intro"), elem_id="gz-doctor-intro", elem_classes="gz-soft")
        report = Html(elem_id="gz-doctor")
        raw = Html("", visible="hidden", elem_id="gz-file-doctor")

    async def look(request: gr.Request):
        words = language(request)
        yield (
            html.empty(
                tr(words, "doctor_running"), [tr(words, "doctor_running_help")], html.bar(None, tr(words, "doctor_running"))
            ),
            gr.skip(),
            gr.skip(),
        )
        task = asyncio.create_task(asyncio.to_thread(page.doctor))
        while not task.done():              # a sign of life, so that a closed page is noticed
            await asyncio.wait([task], timeout=0.25)
            if not task.done():
                yield gr.skip(), gr.skip(), gr.skip()
        found = task.result()
        yield render(words, found), _file(found), shown("")

    run.click(look, None, [report, raw, intro], concurrency_id="doctor", concurrency_limit=1, **PRIVATE)


def _file(report: Any) -> str:
    return html.file("gainz-doctor.json", json.dumps(report.to_dict(), ensure_ascii=False, indent=1), "application/json")


def render(words: str, report: Any) -> str:
    """All findings by section; what is wrong first in words."""
    bad = [check for check in report.checks if check.status in {"fail", "warn"}]
    head = html.notice("good", tr(words, "doctor_fine")) if not bad else html.notice(
        "bad" if not report.ok else "warn", tr(words, "doctor_found", count=len(bad)), [f"{said(words, c.name)}: {said(words, c.value)}" for c in bad])
    order = {check.section: i for i, check in reversed(list(enumerate(report.checks)))}
    checks = sorted(report.checks, key=lambda check: order[check.section])
    parts = [
        f'<h3 class="gz-h gz-gap">{html.escape(_section(words, section))}</h3><ul class="gz-checks">{"".join(_row(words, row) for row in rows)}</ul>'
        for section, rows in groupby(checks, key=lambda check: check.section)
    ]
    return head + "".join(parts)


def _section(words: str, section: str) -> str:
    key = f"section_{section}"
    return tr(words, key) if has(key) else section


def _row(words: str, check: Any) -> str:
    remedy = f"<em>{html.escape(said(words, check.remedy))}</em>" if check.remedy else ""
    return (
        f'<li><i class="gz-dot gz-{KINDS[check.status]}" role="img" aria-label="{check.status}"></i><b>{html.escape(said(words, check.name))}</b>'
        f"<span>{html.escape(said(words, check.value))}{remedy}</span></li>"
    )


TAB = Tab("tab_doctor", 90, build)
