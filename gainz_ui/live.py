"""What a page asks for again and again, past Gradio: the header every second or two, the monitor and how far a benchmark is while they are
looked at.

Gradio's client goes through the whole page for every event, a tenth of a second of a core and more; a browser beside the engine would
take that from the answers. So page.js asks here, says what it has, hears nothing where that still holds, and puts HTML of the server's
own where it belongs. Behind the same guard as everything else. Knows pages and HTTP; how figures look, header and monitor_view know.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gainz_ui import header as head, html
from gainz_ui.i18n import language, tr
from gainz_ui.page import Page
from gainz_ui.tabs import monitor_view

CALM, BUSY = 2.0, 0.7                   # seconds until a page should ask again; while something is measured it is left in peace
WATCH = 5.0                             # and for the monitor
PLACE = 1.5                             # and for a place of a tab
MEASURED = "bench"                      # kind of the tasks that measure
FRESH = {"cache-control": "no-store"}


def mark(text: str) -> str:
    """Equal for equal texts, short enough for an address."""
    return f"{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"


def router(page: Page) -> APIRouter:
    """Routes in threads: a look takes a few system calls."""
    routes = APIRouter()

    @routes.get("/page/state", include_in_schema=False)
    def state(http: Request, seen: str = "") -> Response:
        """{mark, version, pace, status, banner, gone}: header and banner, and what stands in the header's place when nobody answers."""
        words, snapshot, running = language(http), page.studio.snapshot(), page.tasks.running()
        text, warning, version = head.header(words, snapshot, running), head.banner(words, snapshot), page.studio.changed.version
        measured = any(task.kind == MEASURED for task in running)
        pace = BUSY if (running or snapshot.loading) and not measured else CALM
        first = page.startup_task()
        now = mark(f"{words} {version} {pace} {text} {warning} {first and (first.number, first.state, first.progress)} {page.startup_error()}")
        gone = html.chip(tr(words, "chip_gone"), "bad", tr(words, "chip_gone_tip"))
        return _unless(now == seen, {"mark": now, "version": version, "pace": pace, "status": text, "banner": warning, "gone": gone})

    @routes.get("/page/monitor", include_in_schema=False)
    def monitor(http: Request, seen: str = "") -> Response:
        """{mark, pace, parts}: the parts that differ from what the page has, by name."""
        words = language(http)
        made = dict(zip(monitor_view.PARTS, monitor_view.parts(words, page.monitor.look()), strict=True))
        return _unless(*changed(words, made, seen))

    @routes.get("/page/place/{name}", include_in_schema=False)
    def place(name: str, http: Request, seen: str = "") -> Response:
        """{mark, pace, html} of one of ``page.places``."""
        make = page.places.get(name)
        if make is None:
            return Response(status_code=404, headers=FRESH)
        text = make(language(http))
        return _unless(mark(text) == seen, {"mark": mark(text), "pace": PLACE, "html": text})

    return routes


def changed(words: str, made: dict[str, str], seen: str) -> tuple[bool, dict[str, Any]]:
    """Whether a page that has ``seen`` has it all; and what it needs."""
    marks = [mark(words + text) for text in made.values()]
    had: Sequence[str] = seen.split(".")
    known = had if len(had) == len(marks) else [""] * len(marks)
    parts = {name: text for (name, text), now, before in zip(made.items(), marks, known) if now != before}
    return not parts, {"mark": ".".join(marks), "pace": WATCH, "parts": parts}


def _unless(same: bool, data: dict[str, Any]) -> Response:
    return Response(status_code=204, headers=FRESH) if same else Response(
        json.dumps(data, ensure_ascii=False).encode("utf-8", "replace"), headers=FRESH, media_type="application/json")
