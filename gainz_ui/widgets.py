"""HTML of ours inside the page. Gradio's own HTML component evaluates a script for every update, which a strict content
policy forbids; its Markdown component passes a block of HTML through as it is. The HTML has no line breaks (`html.escape`)."""

from __future__ import annotations

from typing import Any

import gradio as gr


def Html(value: Any = "", **more: Any) -> gr.Markdown:  # noqa: N802  made and placed like a component
    """A place for HTML that this program has made and escaped."""
    return gr.Markdown(value, sanitize_html=False, latex_delimiters=[], container=False, **more)


def shown(text: str) -> Any:
    """An update: this HTML, or nothing at all where it is empty."""
    return gr.update(value=text, visible=bool(text))
