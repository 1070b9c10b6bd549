"""One answer of another server: a thread that reads it, and the iterator of events that whoever asked draws from.

Everything is measured here, at the client: the time to the first token holds the way there and back. What the server does not tell
(tokens of a stream without counts, passes, its queue) is None, not zero. Cancelling ends it at once and closes the connection, which
is how a server learns that nobody listens.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from backends.base import Cancel, Event, FinishReason, GainzError, Progress, QueueFull, RemoteFailed, Request, Timing, Usage
from backends.remote_chunks import Chunks, Piece, whole_number
from backends.remote_http import Client, Exchange, Interrupted
from backends.sse import Reader

DRAIN = 0.5                             # seconds in which the end of a finished stream may come, so that its connection can be kept


class Places:
    """At most so many requests at once; others wait here, and may stop waiting."""

    def __init__(self, count: int) -> None:
        self._free, self._turn, self.waiting = count, threading.Condition(), 0

    def take(self, gone: threading.Event, until: float | None) -> None:
        """QueueFull after ``until`` (monotonic); Interrupted once ``gone`` is set."""
        with self._turn:
            self.waiting += 1
            try:
                while not self._free:
                    if gone.is_set():
                        raise Interrupted
                    left = None if until is None else until - time.monotonic()
                    if left is not None and left <= 0:
                        raise QueueFull("The request waited longer than it may for a free connection to the other server.")
                    self._turn.wait(0.1 if left is None else min(0.1, left))
                self._free -= 1
            finally:
                self.waiting -= 1

    def leave(self) -> None:
        with self._turn:
            self._free += 1
            self._turn.notify()


class RemoteAnswer(Iterator[Event]):
    """Under way as soon as it is made. ``over``: called once when it has ended."""

    def __init__(self, client: Client, places: Places, request: Request, asked: tuple[str, Any], cancel: Cancel,
                 over: Callable[[RemoteAnswer], None]) -> None:
        now = time.monotonic()
        limit = lambda seconds: None if seconds is None else now + seconds  # noqa: E731
        self._client, self._places, self._request, self._asked, self._over = client, places, request, asked, over
        self._exchange = Exchange(limit(request.time_limit), limit(request.queue_limit), request.via)
        self._chunks, self._lock = Chunks(request), threading.Lock()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._began, self._turn, self._first, self._last, self._now = now, None, None, None, now
        self._sealed = self._drawn = False
        cancel.on_set(self.cancel)          # before anything is sent: one that is set already sends nothing
        threading.Thread(target=self._run, name="remote answer", daemon=True).start()

    # ------------------------------------------------------------------------------------------ drawing
    def __next__(self) -> Event:
        if self._drawn:
            raise StopIteration
        event = self._events.get()
        self._drawn = event.last
        return event

    def close(self) -> None:
        """Nobody wants the rest."""
        self.cancel()
        self._drawn = True

    def cancel(self) -> None:
        """Ended now, whatever the connection is doing."""
        self._seal("cancelled")
        self._exchange.interrupt()

    # ------------------------------------------------------------------------------------------ the thread
    def _run(self) -> None:
        try:
            if self._request.sampling.max_tokens == 0:      # to some servers it means "as many as fit", so nobody is asked
                return self._seal("length")
            self._places.take(self._exchange.gone, self._exchange.queue_deadline or self._exchange.deadline)
            try:
                self._turn = time.monotonic()
                self._emit(Event(-1, progress=Progress("connect", note=str(self._client.address))))
                self._read()
            finally:
                self._exchange.close()
                self._places.leave()
        except Interrupted:
            self._seal("time_limit" if self._exchange.late else "cancelled")
        except QueueFull as error:
            self._seal("time_limit") if self._exchange.late else self._seal("error", error)
        except GainzError as error:
            self._seal("error", error)
        except Exception as error:  # noqa: BLE001  a thread's fault must reach whoever waits, not leave it waiting
            self._seal("error", GainzError(f"{type(error).__name__}: {error}", remedy="This is a fault of Gainz; please report it."))
        finally:
            self._over(self)

    def _read(self) -> None:
        exchange, (route, body) = self._exchange, self._asked
        self._client.open("POST", route, body, exchange)
        if "json" in exchange.response.headers.get("content-type", "") and "event-stream" not in exchange.response.headers["content-type"]:
            raw, self._now = exchange.read_all(), time.monotonic()
            self._take(raw)                         # it does not stream: the whole answer at once
            exchange.good = True
            return self._end()
        reader, done = Reader(), False
        while not done and (piece := exchange.read()):
            self._now = time.monotonic()            # what came in one piece came at one time, whoever held it back
            for sent in reader.push(piece):
                done = done or self._sent(sent)
        for sent in () if done else reader.flush():
            done = done or self._sent(sent)
        if not done and not self._complete():
            raise RemoteFailed("The connection ended in the middle of the answer.", address=self._client.address)
        self._end()
        if done:
            exchange.good = True
            self._drain()

    def _sent(self, sent: Any) -> bool:
        """True: the server has said its last word."""
        if sent.data.strip() == "[DONE]":
            return True
        if sent.kind == "error":
            raise RemoteFailed(f"The other server failed in the middle: {self._client.quote(sent.data.encode())}")
        self._take(sent.data.encode())
        return False

    def _take(self, raw: bytes) -> None:
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise RemoteFailed("The server sent what is no JSON.", address=self._client.address, text=self._client.quote(raw[:200])) from error
        try:
            pieces = self._chunks.take(data)
        except RemoteFailed as error:
            error.cause = self._client.quote(error.cause.encode())
            raise
        for piece in pieces:
            self._piece(piece)

    def _piece(self, piece: Piece) -> None:
        if piece.text:
            self._first, self._last = self._first or self._now, self._now
        if piece.text or piece.logprobs or piece.finish:
            self._emit(Event(piece.index, piece.text, logprobs=piece.logprobs, finish=piece.finish, matched=piece.matched))

    def _complete(self) -> bool:
        choices = self._chunks.choices
        return len(choices) == self._request.sampling.n and all(choice.finish is not None for choice in choices.values())

    def _end(self) -> None:
        for piece in self._chunks.close():
            self._piece(piece)
        if not self._chunks.choices:
            raise RemoteFailed("The server answered without an answer.", address=self._client.address)
        self._seal(None, self._chunks.broken())

    def _drain(self) -> None:
        """Read to the end of what was a whole answer: only then can its connection serve another one."""
        self._exchange.deadline = time.monotonic() + DRAIN
        try:
            while self._exchange.read():
                pass
        except (Interrupted, GainzError):
            self._exchange.interrupt()

    # ------------------------------------------------------------------------------------------ the end
    def _emit(self, event: Event) -> None:
        with self._lock:
            if not self._sealed:
                self._events.put(event)

    def _seal(self, finish: FinishReason | None, error: GainzError | None = None) -> None:
        """The last events, once: whoever comes first has the word. ``finish``: of choices that have none yet."""
        with self._lock:
            if self._sealed:
                return
            self._sealed = True
            for index in range(self._request.sampling.n):
                choice = self._chunks.choices.get(index)
                if choice is None or choice.finish is None:
                    self._events.put(Event(index, finish=finish or "error"))
            seed = None if error is not None else self._request.sampling.seed
            self._events.put(Event(-1, usage=self._usage(), timing=self._timing(), error=error, seed=seed))

    def _usage(self) -> Usage | None:
        told, timings = self._chunks.usage, self._chunks.timings
        made, prompt = whole_number(told, "completion_tokens"), whole_number(told, "prompt_tokens")
        if made is None or prompt is None:
            return None
        cached = whole_number(told, "prompt_tokens_details", "cached_tokens")
        return Usage(prompt, made, whole_number(timings, "cache_n") if cached is None else cached)

    def _timing(self) -> Timing:
        now, usage = time.monotonic(), self._usage()
        queued = None if self._turn is None else self._turn - self._began
        span = self._last - self._first if self._first is not None else None
        per = (usage.completion_tokens - self._request.sampling.n) / span if usage and span else None
        timing = Timing(queued, None if self._first is None else self._first - self._began, None, span, now - self._began, None,
                        per if per and per > 0 else None)
        return replace(timing, **self._server_clock())

    def _server_clock(self) -> dict[str, float]:
        """llama.cpp's and our own servers say how long the prompt took there; with one choice only, where it is not a sum."""
        told = self._chunks.timings
        if told is None or self._request.sampling.n > 1:
            return {}
        found = {name: told.get(key) for name, key in (("prefill_seconds", "prompt_ms"), ("prefill_tokens_per_second", "prompt_per_second"))}
        scale = {"prefill_seconds": 1000.0}
        return {name: value / scale.get(name, 1.0) for name, value in found.items()
                if isinstance(value, int | float) and not isinstance(value, bool) and value > 0}
