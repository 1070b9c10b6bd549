"""One script at the very top of the page, before Gradio's own: language and colour scheme of the person's choice.

Gradio reads ``navigator.language`` and the ``__theme`` query while its bundle starts, before anything given as ``head``
is run, so the choice has to be in the document itself. Knows ASGI and HTML; refuses to know Gradio and services.
"""

from __future__ import annotations

LANGUAGE_COOKIE, SCHEME_KEY = "gainz_lang", "gainz_scheme"

SCRIPT = """<script>(function () {
  var html = document.documentElement, found = document.cookie.match(/(?:^|; )%(cookie)s=(en|zh)/);
  var chosen = found ? found[1] : (navigator.language || 'en').toLowerCase().indexOf('zh') === 0 ? 'zh' : 'en';
  var tag = chosen === 'zh' ? 'zh-CN' : 'en';
  Object.defineProperty(navigator, 'language', {get: function () { return tag; }, configurable: true});
  Object.defineProperty(navigator, 'languages', {get: function () { return [tag]; }, configurable: true});
  if (!found) { document.cookie = '%(cookie)s=' + chosen + '; path=/; max-age=31536000; SameSite=Strict'; }
  html.lang = tag;
  var scheme = null;
  try { scheme = localStorage.getItem('%(scheme)s'); } catch (error) { /* storage is off: the system's scheme */ }
  if (scheme === 'dark' || scheme === 'light') {
    var url = new URL(location.href);
    url.searchParams.set('__theme', scheme);
    history.replaceState(null, '', url);
  }
})();</script>""" % {"cookie": LANGUAGE_COOKIE, "scheme": SCHEME_KEY}


class EarlyScript:
    """ASGI middleware: puts `SCRIPT` behind ``<head>`` of HTML documents; everything else passes untouched."""

    def __init__(self, app) -> None:
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        await self.app(scope, receive, _Rewriter(send).send)


class _Rewriter:
    """Holds an HTML response back until it is whole; other responses are passed on piece by piece."""

    def __init__(self, send) -> None:
        self._send, self._start, self._body = send, None, b""

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
        body = self._body.replace(b"<head>", b"<head>" + SCRIPT.encode(), 1)
        headers = [(k, v) for k, v in self._start["headers"] if k.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _is_html(message) -> bool:
    return any(k.lower() == b"content-type" and v.startswith(b"text/html") for k, v in message["headers"])
