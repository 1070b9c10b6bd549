"""The frame of the page: header, tabs, the one signal "models changed". Knows no tab by name: tabs/ is scanned for ``TAB``."""

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
from gainz_ui.early import LANGUAGE_COOKIE, SCHEME_KEY, EarlyScript
from gainz_ui.i18n import T, bundle, language
from gainz_ui.page import Page, Tab
from gainz_ui.services.answers import Answers
from gainz_ui.theme import style, theme

CALM, BUSY = 2.0, 0.7                   # seconds between two looks at the state of things
BROWSER = {"chat": None, "earlier": [], "presets": {}, "settings": None}    # what the browser keeps, and its first value

ON_LOAD = """() => {
  const url = new URL(location.href);
  if (url.searchParams.has('__theme')) { url.searchParams.delete('__theme'); history.replaceState(null, '', url); }
  document.title = 'Gainz';
}"""
SWITCH_LANGUAGE = f"""() => {{
  const next = document.documentElement.lang.startsWith('zh') ? 'en' : 'zh';
  document.cookie = '{LANGUAGE_COOKIE}=' + next + '; path=/; max-age=31536000; SameSite=Strict';
  setTimeout(() => location.reload(), 60);
}}"""
SWITCH_SCHEME = f"""() => {{
  const dark = document.body.classList.toggle('dark');
  try {{ localStorage.setItem('{SCHEME_KEY}', dark ? 'dark' : 'light'); }} catch (error) {{ /* storage is off: until reload */ }}
}}"""


def scan() -> list[Tab]:
    """The tabs in their order. A module of tabs/ without ``TAB`` is a helper."""
    modules = (importlib.import_module(f"{tabs_package.__name__}.{item.name}") for item in pkgutil.iter_modules(tabs_package.__path__))
    return sorted((module.TAB for module in modules if hasattr(module, "TAB")), key=lambda tab: tab.order)


def build(studio: Any, settings: Any, store: Any, tasks: Any, doctor: Callable[[], Any],
          api: Callable[[], None] | None = None, startup: Any = None) -> gr.Blocks:
    """The whole page. ``doctor()`` examines this machine; ``api()`` is called inside the Blocks and registers the public names;
    ``startup``: the server's first work, which the page shows and can begin again."""
    page = Page(studio, settings, store, tasks, doctor, Answers(), startup)
    with gr.Blocks(title="Gainz", analytics_enabled=False) as blocks:
        if api is not None:             # first: a private listener whose function is called "load" would take that name
            api()
        page.browser = {name: gr.BrowserState(first, storage_key=f"gainz-{name}", secret="gainz") for name, first in BROWSER.items()}
        page.version, timer, page.gate_timer = gr.State(-1), gr.Timer(CALM), gr.Timer(0.6, active=False)
        status, banner = _header()
        with gr.Tabs(elem_id="gz-tabs", overflow_behavior="wrap") as page.tabs:
            for tab in scan():
                with gr.Tab(T(tab.title), id=tab.title, elem_id=f"gz-tab-{tab.title}"):
                    tab.build(page)
        _wire(blocks, page, timer, status, banner)
    blocks.gainz_page = page
    return blocks


def _header() -> tuple[gr.HTML, gr.HTML]:
    with gr.Row(elem_id="gz-header"):
        status = gr.HTML(f'<div class="gz-head"><h1 class="gz-brand">{head.LOGO}Gainz</h1></div>', elem_id="gz-status")
        word = gr.Button(T("other_language"), size="sm", elem_id="gz-language", elem_classes="gz-switch")
        scheme = gr.Button(T("switch_scheme"), size="sm", elem_id="gz-scheme", elem_classes="gz-switch")
    word.click(None, js=SWITCH_LANGUAGE, api_visibility="private")
    scheme.click(None, js=SWITCH_SCHEME, api_visibility="private")
    return status, gr.HTML(visible=False, elem_id="gz-banner")


def _wire(blocks: gr.Blocks, page: Page, timer: gr.Timer, status: gr.HTML, banner: gr.HTML) -> None:
    shown = gr.State("")                # the header as it stands in the browser: the same again is not sent

    def look(request: gr.Request, seen: str):
        words, snapshot, running = language(request), page.studio.snapshot(), page.tasks.running()
        text, warning = head.header(words, snapshot, running), head.banner(words, snapshot)
        pace = gr.Timer(BUSY if running or snapshot.loading else CALM)
        if text + warning == seen:
            return page.studio.changed.version, gr.skip(), gr.skip(), gr.skip(), pace
        return page.studio.changed.version, text + warning, text, gr.HTML(warning, visible=bool(warning)), pace

    quiet = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    outputs = [page.version, shown, status, banner, timer]
    timer.tick(look, shown, outputs, **quiet)
    blocks.load(look, shown, outputs, **quiet)
    for load in page.loads:
        blocks.load(**{"show_progress": "hidden", "api_visibility": "private", **load})


def mount_options() -> dict[str, Any]:
    """Keyword arguments for `gradio.mount_gradio_app`."""
    return {"theme": theme(), "css": style(), "js": ON_LOAD, "i18n": bundle(), "favicon_path": str(Path(__file__).parent / "favicon.svg"),
            "app_kwargs": {"middleware": [Middleware(EarlyScript)], "docs_url": None, "redoc_url": None, "openapi_url": None},
            "footer_links": [], "run_history": False, "enable_monitoring": False, "ssr_mode": False, "show_error": True}


__all__ = ["Page", "Tab", "build", "mount_options", "scan"]
