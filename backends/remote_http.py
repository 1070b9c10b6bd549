"""Requests to one server over HTTP/1.1: connections that are kept for a moment, time limits, interruption from another thread.

A request is tried again only where it cannot have begun: no connection was made, it was not sent to its end, or the server said 429
or 503, which is its word for "not now". Once it has been sent, whatever happens is the answer. Redirects are refused: they could lead
where the address itself may not. What a server says in an error is quoted, cut to a few lines, with the key taken out.
"""

from __future__ import annotations

import http.client
import json
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from backends.errors import AddressRefused, GainzError, QueueFull, RemoteFailed, RemoteRefused, RemoteUnreachable
from backends.reach import VIA, Address, Reach

IDLE = 3.0                              # seconds a connection is kept: common servers close theirs after five
QUOTED = 600                            # characters of a server's own words
LARGEST = 8 << 20                       # bytes of an answer that is read whole
LOOP = 508                              # the status of a server that finds itself among those that a request came through
PATIENCE = 30.0                         # seconds that one "not now" is waited for at most


class Interrupted(Exception):
    """Somebody called `Exchange.interrupt`, or the deadline came; not an error of the server's."""


class _Connection(http.client.HTTPConnection):
    def __init__(self, address: Address, reach: Reach, seconds: float) -> None:
        super().__init__(address.host, address.port, timeout=seconds)
        self.default_port = {"http": 80, "https": 443}[address.scheme]
        self._address, self._reach, self.raw, self.idle_since = address, reach, None, 0.0

    def connect(self) -> None:
        self.sock = self.raw = self._reach.connect(self._address, self.timeout)

    def usable(self) -> bool:
        """Nothing waits to be read: neither the end, nor the rest of an answer that nobody wanted."""
        return time.monotonic() - self.idle_since < IDLE and self.raw is not None and not select.select([self.raw], [], [], 0)[0]


class Client:
    """One server. Thread-safe. ``silence``: seconds without a byte after which an answer counts as lost."""

    def __init__(self, address: Address, reach: Reach, *, connect: float, silence: float, retries: int) -> None:
        self.address, self._reach, self._connect, self.silence, self._retries = address, reach, connect, silence, retries
        self._lock, self._idle = threading.Lock(), []

    def open(self, method: str, route: str, body: Mapping[str, Any] | None, exchange: Exchange) -> Exchange:
        """``exchange`` with its status and headers read. RemoteUnreachable, QueueFull, RemoteRefused, RemoteFailed, Interrupted."""
        data = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        for left in range(self._retries, -1, -1):
            try:
                self._send(method, route, data, exchange)
                return exchange.judged(self.quote)
            except RemoteUnreachable:
                if not left:
                    raise
                wait = 0.25 * 2 ** (self._retries - left)
            except QueueFull as error:
                wait = exchange.wait_for(error, 0.5 * 2 ** (self._retries - left))
                if not left:
                    raise
            exchange.pause(wait)
        raise AssertionError("the last try returns or raises")

    def _send(self, method: str, route: str, data: bytes | None, exchange: Exchange) -> None:
        """RemoteUnreachable: it did not reach the server, so that it may be sent again."""
        connection = self._take()
        try:
            if connection.sock is None:
                exchange.check()
                connection.connect()
                self._refuse_open_key(connection)
            exchange.begin(connection, self)
            connection.request(method, self.address.path + route, data, self._headers(data, exchange.via))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            exchange.check()
            raise RemoteUnreachable("The request could not be sent.", address=self.address, reason=_said(error)) from error
        exchange.read_head()

    def _headers(self, data: bytes | None, via: tuple[str, ...]) -> dict[str, str]:
        key, via = self._reach.key(self.address.origin), (*via, self._reach.here)
        return {"accept": "text/event-stream, application/json", "accept-encoding": "identity", "user-agent": "gainz",
                **({"content-type": "application/json"} if data is not None else {}),
                **({"authorization": f"Bearer {key}"} if key else {}), **({VIA: ", ".join(via)} if via[-1] else {})}

    def _refuse_open_key(self, connection: _Connection) -> None:
        if self.address.scheme == "http" and self._reach.key(self.address.origin) and \
                self._reach.in_the_open(self.address, connection.raw.getpeername()[0]):
            connection.close()
            raise AddressRefused("A key is not sent over the internet without encryption.", field="address", address=self.address,
                                 remedy="Use the server's https:// address.")

    def _take(self) -> _Connection:
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if connection.usable():
                    return connection
                connection.close()
        return _Connection(self.address, self._reach, self._connect)

    def give_back(self, connection: _Connection) -> None:
        connection.idle_since = time.monotonic()
        with self._lock:
            self._idle.append(connection)

    def quote(self, raw: bytes) -> str:
        """A server's own words for people: the message inside its JSON where there is one, without the key."""
        text = raw.decode("utf-8", "replace").strip()
        try:
            text = words(json.loads(text)) or text
        except (ValueError, RecursionError):
            pass
        key = self._reach.key(self.address.origin)
        text = " ".join((text.replace(key, "…") if key else text).split())
        return text if len(text) <= QUOTED else text[:QUOTED - 1] + "…"

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class Exchange:
    """One request and its answer. ``deadline``: on the monotonic clock, None = no limit. `interrupt` may come from any thread.
    ``good``: set by whoever has read a whole answer; only then is the connection used again: after an error many servers close it, and
    a request that meets that would be lost. ``via``: the installations that the request came through."""

    def __init__(self, deadline: float | None = None, queue_deadline: float | None = None, via: tuple[str, ...] = ()) -> None:
        self.deadline, self.queue_deadline, self.via, self.good = deadline, queue_deadline, via, False
        self.gone = threading.Event()
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._client: Client | None = None
        self.response: http.client.HTTPResponse | None = None

    # ------------------------------------------------------------------------------------------ time and interruption
    def interrupt(self) -> None:
        with self._lock:
            self.gone.set()
            if self._connection is not None and self._connection.raw is not None:
                _shut(self._connection.raw)

    @property
    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def check(self) -> None:
        if self.gone.is_set() or self.late:
            raise Interrupted

    def pause(self, seconds: float) -> None:
        left = seconds if self.deadline is None else min(seconds, self.deadline - time.monotonic())
        self.gone.wait(max(0.0, left))
        self.check()

    def wait_for(self, error: QueueFull, usual: float) -> float:
        """Seconds to wait before a server that had no room is asked again; ``error`` where that would be too long."""
        wait = float(error.evidence.get("seconds", usual))
        if wait > PATIENCE or self.queue_deadline is not None and time.monotonic() + wait > self.queue_deadline:
            raise error
        return wait

    def begin(self, connection: _Connection, client: Client) -> None:
        with self._lock:
            self._connection, self._client = connection, client
        connection.raw.settimeout(self._patience())
        self.check()                        # one that came before there was a socket to shut

    def _patience(self) -> float:
        left = self._client.silence
        return left if self.deadline is None else max(0.001, min(left, self.deadline - time.monotonic()))

    # ------------------------------------------------------------------------------------------ reading
    def read_head(self) -> None:
        self.response = self._guarded(self._connection.getresponse)

    def read(self) -> bytes:
        """What has come, at least one byte; b"" at the end."""
        self._connection.raw.settimeout(self._patience())
        return self._guarded(lambda: self.response.read1(1 << 16))

    def read_all(self, most: int = LARGEST) -> bytes:
        found = bytearray()
        while piece := self.read():
            found += piece
            if len(found) > most:
                raise RemoteFailed("The server's answer is too long.", bytes=len(found))
        return bytes(found)

    def _guarded(self, act: Any) -> Any:
        try:
            return act()
        except TimeoutError as error:
            self.check()
            raise RemoteFailed(f"The server sent nothing for {self._client.silence:g} s.", address=self._client.address) from error
        except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:      # the last two: read while it was shut
            self.check()
            raise RemoteFailed("The connection broke before the answer was whole.", address=self._client.address,
                               reason=_said(error)) from error

    def judged(self, quote: Any) -> Exchange:
        """Itself, if the server took the request."""
        status = self.response.status
        if 200 <= status < 300:
            return self
        said = quote(self.read_all(1 << 16)) or self.response.reason or ""
        after = self.response.headers.get("retry-after", "")
        where = self.response.headers.get("location", "")
        self.close()
        raise failure(status, said, self._client.address, float(after) if after.isdecimal() else None, where)

    def close(self) -> None:
        """Keep the connection where the answer was read to its end, else end it: the server sees that nobody listens."""
        connection, response = self._connection, self.response
        if connection is None:
            return
        whole = self.good and response is not None and (response.isclosed() or response.length == 0)
        if response is not None:
            response.close()
        if whole and not response.will_close and connection.sock is not None and not self.gone.is_set():
            self._client.give_back(connection)
        else:
            connection.close()
        with self._lock:
            self._connection = None


def failure(status: int, said: str, address: Address, seconds: float | None = None, where: str = "") -> GainzError:
    """What a status means here. The texts are the server's own."""
    facts = {"status": status, "address": address}
    if 300 <= status < 400:
        return RemoteFailed("The server wants to send the request elsewhere, and redirects are not followed.", **facts, location=where,
                            remedy="Give the address that it names, if it is the one you mean.")
    if status == LOOP:
        return AddressRefused(f"{address} is this very server, or leads back to it: its model would ask itself for ever.", field="address",
                              remedy="Give another server's address; a model of this one is loaded under its own name.")
    if status == 401:
        return RemoteFailed(f"The server refuses the key: {said}", **facts, remedy="Give the server's key again on the Models tab, or "
                            "with `python app.py connect`.")
    if status == 403:
        return RemoteFailed(f"The server forbids this: {said}", **facts, remedy="Its own words say why: a key that may not do this, a name or "
                            "an address that it does not answer to.")
    if status == 404:
        return RemoteFailed(f"The server has no such model or route: {said}", **facts,
                            remedy="Compare address and model with what it lists at /models.")
    if status == 429 or status == 503:
        return QueueFull(f"The other server has no room now: {said}", **facts, **({"seconds": seconds} if seconds is not None else {}))
    if 400 <= status < 500:
        return RemoteRefused(f"The other server refuses the request: {said}", **facts)
    return RemoteFailed(f"The other server failed: {said}", **facts)


def words(data: Any) -> str:
    """The message in a server's error, wherever it keeps it; "": there is none."""
    if isinstance(data, str):
        return data
    if isinstance(data, list):
        return "; ".join(filter(None, map(words, data)))
    if not isinstance(data, Mapping):
        return ""
    place = ".".join(map(str, data["loc"])) + ": " if isinstance(data.get("loc"), list) else ""       # of pydantic's lists
    return next((place + found for key in ("error", "message", "detail", "msg", "errors") if (found := words(data.get(key)))), "")


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _shut(raw: socket.socket) -> None:
    """Wake whoever reads. The plain socket's own method: TLS would take its state from under the reader."""
    try:
        socket.socket.shutdown(raw, socket.SHUT_RDWR)
    except OSError:
        pass                                # it is not connected any more
