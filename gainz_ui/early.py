"""One script (page.js) at the very top of the page, before Gradio's own: language, colours, downloads.

Gradio reads ``navigator.language`` and the ``__theme`` query while its bundle starts, before anything given as ``head``
is run, so the choice has to be in the document itself. Knows ASGI and HTML; refuses to know Gradio and services.
"""

from __future__ import annotations

from pathlib import Path

LANGUAGE_COOKIE, SCHEME_KEY = "gainz_lang", "gainz_scheme"


def script(default: str = "auto") -> bytes:
    """page.js as an element. ``default``: the language where nobody has chosen one, "auto" = the browser's."""
    text = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
    for name, value in {"cookie": LANGUAGE_COOKIE, "scheme": SCHEME_KEY, "default": default}.items():
        text = text.replace(f"@{name}@", value)
    return f"<script>{text}</script>".encode()


class EarlyScript:
    """ASGI middleware: puts `script` behind ``<head>`` of HTML documents; everything else passes untouched."""

    def __init__(self, app, default: str = "auto") -> None:
        self.app, self.script = app, script(default)

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        await self.app(scope, receive, _Rewriter(send, self.script).send)


class _Rewriter:
    """Holds an HTML response back until it is whole; other responses are passed on piece by piece."""

    def __init__(self, send, script: bytes) -> None:
        self._send, self._script, self._start, self._body = send, script, None, b""

    async def send(self, message) -> None:
        if message["type"] == "http.response.start" and _is_html(message):
            self._start = message
            return
        if self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if not message.get("more_body"):
            await self._flush()

    async def _flush(self) -> None:
        body = self._body.replace(b"<head>", b"<head>" + self._script, 1)
        headers = [(k, v) for k, v in self._start["headers"] if k.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _is_html(message) -> bool:
    return any(k.lower() == b"content-type" and v.startswith(b"text/html") for k, v in message["headers"])
