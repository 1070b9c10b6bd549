"""What stands before every route, ours and Gradio's alike: host, origin, key, size, and the headers of every answer.

One ASGI wrapper around the whole application, so that a route added later cannot escape it. Knows addresses, headers and a
key; refuses to know routes, but for the few public ones.

A page elsewhere on the web may try to reach a server on this machine through the visitor's browser: by its own name pointed
here (caught by the Host rule: an IP literal, this machine's names, or a name that was allowed) or across sites (caught by the
Origin rule). The content policy keeps a model's answer from making the browser call out.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from backends.reach import VIA
from gainz_ui.api.errors import body as error_shape
from gainz_ui.api.hosts import is_address
from gainz_ui.api.limits import VIA as CAME
from gainz_ui.services.keys import PLACE, KeyRing

API = ("/v1/", "/generate", "/tokenize", "/detokenize", "/metrics", "/health", "/openapi.json")     # what a key with limits opens
PUBLIC = frozenset({"/health"})             # answers without a key: it says whether, not what
BODY_LIMIT = 4 << 20                        # bytes of a request's body
UPLOAD_LIMIT = 64 << 20                     # bytes of an upload through the page
DROPPED, DROP_SECONDS = 16 << 20, 5.0       # of a refused body: a client reads the answer only once it has sent its own part
UPLOADS = "/gradio_api/upload"
POLICY = ("default-src 'self'; script-src 'self' 'unsafe-inline' blob:; style-src 'self' 'unsafe-inline'; "
          "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
          "frame-ancestors 'none'; object-src 'none'; base-uri 'self'; form-action 'self'")
HEADERS = ((b"content-security-policy", POLICY.encode()), (b"x-content-type-options", b"nosniff"),
           (b"referrer-policy", b"no-referrer"), (b"x-frame-options", b"DENY"),
           (b"cross-origin-resource-policy", b"same-origin"), (b"cross-origin-opener-policy", b"same-origin"))
CORS = ((b"access-control-allow-methods", b"GET, POST, OPTIONS"), (b"access-control-max-age", b"600"),
        (b"access-control-allow-headers", b"authorization, content-type, x-api-key"))
HOPS = 32                                   # installations that a request may name
OUTSIDE = ("file=http:", "file=https:", "proxy=")   # Gradio's routes by which the server itself would fetch an address


@dataclass(frozen=True)
class Refusal:
    status: int
    code: str
    message: str
    remedy: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Guard:
    """ASGI middleware. ``keys``: who may come in; ``key``: the single one of the settings, for a ring of it alone; ``answered``:
    hears the status of every answer; ``here``: as in `Reach`."""

    def __init__(self, app, *, host: str, key: str = "", keys: KeyRing | None = None, hosts: Iterable[str] = (),
                 origins: Iterable[str] = (), answered: Callable[[int], None] = lambda status: None, here: str = "") -> None:
        self.app, self.answered, self.here = app, answered, here
        self.hosts = {"localhost", socket.gethostname().lower(), host.lower(), *(name.lower() for name in hosts)}
        self.origins = {origin.rstrip("/").lower() for origin in origins}
        self.keys = keys or KeyRing(single=key)

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":         # nothing here speaks WebSocket
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        shared = self._shared(headers)
        send = _with_headers(send, HEADERS + shared, self.answered)
        if shared and scope["method"] == "OPTIONS":
            await _answer(send, 204, b"", CORS)
            return
        refusal = self._check(scope, headers)
        if refusal is None and b"content-length" not in headers and b"transfer-encoding" in headers:
            receive, refusal = await _read_ahead(receive, _limit(scope["path"]))
        refusal = refusal or self._check_limits(scope)
        if refusal is not None:
            await _drop(receive)
            data = json.dumps(error_shape(refusal.code, refusal.message, refusal.remedy, status=refusal.status)).encode()
            await _answer(send, refusal.status, data, ((b"content-type", b"application/json"), *refusal.headers))
            return
        await self._pass(scope, receive, send)

    async def _pass(self, scope, receive, send) -> None:
        """On to the application, counted as running for its key until the last byte."""
        held = scope.get(PLACE)
        try:
            await self.app(scope, receive, send)
        finally:
            if held is not None and _counts(scope):
                self.keys.end(held)

    # ------------------------------------------------------------------------------------------ the rules
    def _check(self, scope, headers: dict[bytes, str]) -> Refusal | None:
        return (self._check_host(headers) or self._check_origin(headers) or self._check_key(scope, headers)
                or _check_size(scope, headers) or _check_outside(scope) or self._check_loop(scope, headers))

    def _check_host(self, headers: dict[bytes, str]) -> Refusal | None:
        host = _host_of("//" + headers.get(b"host", ""))[0]
        if host in self.hosts or is_address(host):
            return None
        return Refusal(403, "host_refused", f"This server does not answer to the name {host[:100]!r}.",
                       "Use the address that it printed, or add the name to the setting allowed_hosts.")

    def _check_origin(self, headers: dict[bytes, str]) -> Refusal | None:
        origin = headers.get(b"origin")
        if origin is None:
            elsewhere = headers.get(b"sec-fetch-site") == "cross-site" and headers.get(b"sec-fetch-mode") != "navigate"
        else:
            elsewhere = _host_of(origin)[1] != headers.get(b"host", "").lower() and origin.lower() not in self.origins
        if not elsewhere:
            return None
        return Refusal(403, "origin_refused", "Requests from another web site are refused.",
                       "Add the site to the setting allowed_origins if it may call this API.")

    def _check_loop(self, scope, headers: dict[bytes, str]) -> Refusal | None:
        scope[CAME] = came_through(headers)
        if self.here and self.here in scope[CAME]:
            return Refusal(508, "loop", "This request has come through this very server already.",
                           "One of its models names this server, or one that asks it, as the server that answers.")
        return None

    def _shared(self, headers: dict[bytes, str]) -> tuple[tuple[bytes, bytes], ...]:
        """The CORS answer to an origin that was allowed by name; never a wildcard."""
        origin = headers.get(b"origin", "")
        if origin.lower() not in self.origins:
            return ()
        return (b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")

    def _check_key(self, scope, headers: dict[bytes, str]) -> Refusal | None:
        if scope["path"] in PUBLIC or not self.keys.required:
            return None
        holder = self.keys.find(presented(headers))
        if holder is not None:
            scope[PLACE] = holder
            return None
        wants_page = "text/html" in headers.get(b"accept", "")      # a browser then asks the person: any name, the key as password
        return Refusal(401, "key_required", "This server asks for a key.", "Send it as Authorization: Bearer KEY.",
                       ((b"www-authenticate", b'Basic realm="Gainz: any name, the key as password"' if wants_page else b"Bearer"),))


    def _check_limits(self, scope) -> Refusal | None:
        """The last rule, since it counts. What the page does cannot be counted by a key, so one with limits opens the API only."""
        holder = scope.get(PLACE)
        if holder is None:
            return None
        if holder.limits.any and not scope["path"].startswith(API):
            return Refusal(403, "key_refused", "This key has limits, and opens the API only, not the page.", "Use a key without limits.")
        if not _counts(scope):
            return None
        refused = self.keys.begin(holder)
        if refused is None:
            return None
        why, seconds = refused
        return Refusal(429, "key_limit", why, "Wait, or use another key.", ((b"retry-after", str(math.ceil(seconds)).encode()),))


def _counts(scope) -> bool:
    """Whether a request uses up something of its key's limits."""
    return scope["method"] == "POST" and scope["path"].startswith(API)


def _host_of(address: str) -> tuple[str, str]:
    """(host, host with port), both in small letters; empty for an address that is none: its port no number, or a user in it."""
    try:
        parts = urlsplit(address)
        if parts.port is not None and not parts.netloc.endswith(f":{parts.port}") or "@" in parts.netloc:
            return "", ""
        return parts.hostname or "", parts.netloc.lower()
    except ValueError:
        return "", ""


def presented(headers: dict[bytes, str]) -> str:
    """The key of a request: Bearer, X-API-Key, or the password of Basic (what a browser can send)."""
    scheme, _, value = headers.get(b"authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return headers.get(b"x-api-key", "")


def came_through(headers: Mapping[bytes, str]) -> tuple[str, ...]:
    """The installations that a request names as those it came through."""
    return tuple(name.strip()[:64] for name in headers.get(VIA.encode(), "").split(",")[:HOPS] if name.strip())


def _limit(path: str) -> int:
    return UPLOAD_LIMIT if path.startswith(UPLOADS) else BODY_LIMIT


def _too_large(limit: int) -> Refusal:
    return Refusal(413, "body_too_large", f"The body is larger than {limit} bytes.", "Send less at once.", ((b"connection", b"close"),))


def _check_size(scope, headers: dict[bytes, str]) -> Refusal | None:
    length = headers.get(b"content-length", "0")
    if not length.isascii() or not length.isdigit():
        return Refusal(400, "invalid_request", "Content-Length is no number.")
    limit = _limit(scope["path"])
    return _too_large(limit) if int(length) > limit else None


def _check_outside(scope) -> Refusal | None:
    if any(mark in scope["path"] for mark in OUTSIDE):
        return Refusal(403, "outside_refused", "This server fetches no addresses for others.")
    return None


# ---------------------------------------------------------------------------------------------- ASGI pieces
async def _read_ahead(receive, limit: int):
    """A body of unannounced length, read up to the limit and handed on whole."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return _replay([message], receive), None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            return _replay([{**message, "body": b""}], receive), _too_large(limit)      # whether more comes, whoever drops the rest must know
        if not message.get("more_body"):
            return _replay([{"type": "http.request", "body": b"".join(parts), "more_body": False}], receive), None


async def _drop(receive) -> None:
    """Read and forget a refused body, within bounds: closing on unread bytes resets the connection, and the answer is lost."""
    left = DROPPED
    try:
        async with asyncio.timeout(DROP_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
    except TimeoutError:
        return


def _replay(messages: list, receive):
    async def again():
        return messages.pop(0) if messages else await receive()
    return again


def _with_headers(send, extra: tuple[tuple[bytes, bytes], ...], answered: Callable[[int], None]):
    async def wrapped(message):
        if message["type"] == "http.response.start":
            answered(message["status"])
            names = {name for name, _ in extra}
            kept = [pair for pair in message.get("headers", ()) if pair[0].lower() not in names]
            message = {**message, "headers": [*kept, *extra]}
        await send(message)
    return wrapped


async def _answer(send, status: int, data: bytes, headers) -> None:
    await send({"type": "http.response.start", "status": status,
                "headers": [*headers, (b"content-length", str(len(data)).encode())]})
    await send({"type": "http.response.body", "body": data})
