"""The frame of the page: header, tabs, the one signal "models changed". Knows no tab by name: tabs/ is scanned."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from gainz_ui import header as head
from gainz_ui import tabs as tabs_package
from gainz_ui.early import EarlyScript
from gainz_ui.i18n import T, bundle
from gainz_ui.page import Page, Tab
from gainz_ui.services.answers import Answers
from gainz_ui.services.jobs import Jobs
from gainz_ui.services.monitor import Monitor
from gainz_ui.theme import style, theme
from gainz_ui.widgets import Html

FORGET = (600, 3600)                    # seconds between two clean-ups of uploads, and the age at which one goes
SESSIONS = 64                           # whose inputs Gradio remembers, chats of megabytes among them; the least recent goes
LOOK = 0.02         # seconds between two looks of Gradio's queue; its own thousandth is 900 wake-ups a second of an idle server
BROWSER = {"chat": None, "earlier": [], "presets": {}, "settings": None}    # what the browser keeps, and its first value


def scan() -> list[Tab]:
    """The tabs in their order. A module of tabs/ without ``TAB`` is a helper."""
    modules = (
        importlib.import_module(f"{tabs_package.__name__}.{item.name}")
        for item in pkgutil.iter_modules(tabs_package.__path__)
    )
    return sorted((module.TAB for module in modules if hasattr(module, "TAB")), key=lambda tab: tab.order)


def build(studio: Any, settings: Any, store: Any, tasks: Any, doctor: Callable[[], Any],
          api: Callable[[], None] | None = None, startup: Any = None, jobs: Any = None) -> gr.Blocks:
    """The whole page. ``doctor()`` examines this machine; ``api()`` is called inside the Blocks and registers the public
    names; ``startup``: the server's first work, which the page shows and can begin again; ``jobs``: runs long work as a child."""
    page = Page(studio, settings, store, tasks, doctor, Answers(), jobs or Jobs(settings.models), startup, monitor=Monitor(studio))
    with gr.Blocks(title="Gainz", analytics_enabled=False, delete_cache=FORGET) as blocks:
        if api is not None:             # first: a private listener whose function is called "load" would take that name
            api()
        page.browser = {
            name: gr.BrowserState(first, storage_key=f"gainz-{name}", secret="gainz") for name, first in BROWSER.items()
        }
        page.version = gr.Number(-1, visible="hidden", elem_id="gz-version")    # a State's change is not told to listeners beside the queue
        changed = gr.Button(visible="hidden", elem_id="gz-changed")
        _header()
        tabs = scan()
        with gr.Tabs(elem_id="gz-tabs", overflow_behavior="wrap") as page.tabs:
            for tab in tabs:
                with gr.Tab(T(tab.title), id=tab.title, elem_id=f"gz-tab-{tab.title}"):
                    tab.build(page)
        _wire(blocks, page, changed)
    blocks.state_session_capacity = SESSIONS
    blocks.gainz_page = page
    blocks._queue.sleep_when_free = blocks._queue.progress_update_sleep_when_free = LOOK
    return blocks


def _header() -> None:
    """What stands there, and what the two buttons do, is page.js's to fetch and to do."""
    with gr.Row(elem_id="gz-header"):
        Html(f'<div id="gz-state"><div class="gz-head"><h1 class="gz-brand">{head.LOGO}Gainz</h1></div></div>', elem_id="gz-status")
        gr.Button(T("other_language"), size="sm", elem_id="gz-language", elem_classes="gz-switch")
        gr.Button(T("switch_scheme"), size="sm", elem_id="gz-scheme", elem_classes="gz-switch")
    Html('<div id="gz-banner" hidden></div>', elem_id="gz-banner-place")


def _wire(blocks: gr.Blocks, page: Page, changed: gr.Button) -> None:
    """``changed``: pressed by page.js where the state that it fetched has another version than the page."""
    quiet = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    for trigger in (changed.click, blocks.load):
        trigger(lambda: page.studio.changed.version, None, page.version, **quiet)
    for load in page.loads:
        blocks.load(**{"show_progress": "hidden", "api_visibility": "private", **load})
    _follow(blocks, page)


def _follow(blocks: gr.Blocks, page: Page) -> None:
    """At every event Gradio's client looks through the whole page for each component that it follows: the outputs of every listener
    until then, shown or not, which is two thirds of what opening the page takes. It is left what shows it."""
    for fn in blocks.fns.values():
        if fn.show_progress == "hidden":
            fn.show_progress_on = [part for part in fn.outputs if part in page.followed]


def mount_options(language: str = "auto") -> dict[str, Any]:
    """Keyword arguments for `gradio.mount_gradio_app`. ``language``: of a page on which nobody has chosen one."""
    return {
        "theme": theme(),
        "css": style(),
        "i18n": bundle(),
        "favicon_path": str(Path(__file__).parent / "favicon.svg"),
        "app_kwargs": {
            "middleware": [Middleware(EarlyScript, default=language)],
            "docs_url": None,
            "redoc_url": None,
            "openapi_url": None,
        },
        "footer_links": [],
        "run_history": False,
        "enable_monitoring": False,
        "ssr_mode": False,
        "show_error": True,
    }


__all__ = ["Page", "Tab", "build", "mount_options", "scan"]
