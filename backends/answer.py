"""Answers over the pipe: an iterator of events that always ends as `Event` promises, whatever becomes of the engine.

Closing it, or letting it go, cancels at once. Nothing here imports torch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING

from backends.base import Cancel, Cancelled, Event, FinishReason, GainzError, Progress, Request, Timing, Usage

if TYPE_CHECKING:
    from backends.host import EngineHost, Loaded
    from backends.link import Call


class Tally:
    """What of an answer has been seen, in case its end has to be told in the engine's place."""

    def __init__(self, request: Request) -> None:
        self._open = dict.fromkeys(range(request.sampling.n))
        self._tokens = 0
        self._began, self._first = time.monotonic(), None

    def see(self, event: Event) -> None:
        if event.ids:
            self._tokens += len(event.ids)
            self._first = self._first or time.monotonic()
        if event.finish is not None:
            self._open.pop(event.index, None)

    def ending(self, finish: FinishReason, error: GainzError | None) -> list[Event]:
        """The events still missing: one for each choice not yet ended, and the last one of the request."""
        now = time.monotonic()
        timing = Timing(ttft_seconds=self._first and self._first - self._began, total_seconds=now - self._began)
        last = Event(index=-1, usage=Usage(completion_tokens=self._tokens), timing=timing, error=error)
        return [*(Event(index=choice, finish=finish) for choice in self._open), last]


class Answer(Iterator[Event]):
    """One running answer of a model in the engine process. ``gone`` is told of its call when it has ended, however."""

    def __init__(self, call: Call, request: Request, cancel: Cancel, gone: Callable[[Call], None]) -> None:
        self._ended = False
        self._call, self._gone = call, gone
        self._tally = Tally(request)
        self._ready: deque[Event] = deque()
        cancel.on_set(call.cancel)

    def accept(self) -> None:
        """Wait until the engine has taken the request; raises what is wrong with it."""
        kind, value = self._call.inbox.get()
        if kind == "fail":
            self._end()
            raise value
        if kind == "events":
            self._ready.extend(value)

    def __next__(self) -> Event:
        while not self._ready:
            if self._ended:
                raise StopIteration
            self._take(*self._call.inbox.get())
        event = self._ready.popleft()
        self._tally.see(event)
        if event.last:
            self._end()
        return event

    def _take(self, kind: str, value) -> None:
        if kind == "events":
            self._ready.extend(value)
        elif kind == "fail":
            self._ready.extend(self._tally.ending("error", value))

    def close(self) -> None:
        """Stop the engine's work on it; no further events. From any thread: one that waits in ``next`` is woken."""
        if not self._ended:
            self._call.cancel()
            self._end()
            self._ready.clear()
            self._call.inbox.put(("closed", None))

    def _end(self) -> None:
        self._ended = True
        self._call.drop()
        self._gone(self._call)

    def __del__(self) -> None:
        self.close()


class Reviving(Iterator[Event]):
    """The answer of a model that is not in memory (it rests, or the engine died): progress while it is loaded, then the answer itself.
    Since events have gone out by then, what goes wrong comes in the last event. Nothing starts before the first `next`."""

    def __init__(self, host: EngineHost, loaded: Loaded, request: Request, cancel: Cancel) -> None:
        self._host, self._loaded, self._request, self._cancel = host, loaded, request, cancel
        self._stop = Cancel()                               # closing must not set the caller's flag
        cancel.on_set(self._stop.set)
        self._tally = Tally(request)
        self._reports: SimpleQueue | None = None            # Progress …, then None or a GainzError
        self._answer: Iterator[Event] | None = None         # once it is loaded: the answer; or how it failed

    def __next__(self) -> Event:
        while self._answer is None:                         # again, should they have gone to rest before the answer could begin
            if self._reports is None:
                self._reports = SimpleQueue()
                threading.Thread(target=self._reload, args=(self._reports,), name=f"reloading {self._loaded.name}", daemon=True).start()
            seen = self._reports.get()
            if isinstance(seen, Progress):
                return Event(index=-1, progress=seen)
            self._answer, self._reports = self._begin(seen), None
        return next(self._answer)

    def _reload(self, reports: SimpleQueue) -> None:
        wanted, error = self._host.needed(self._loaded, self._request), None
        self._host.hold(*wanted)
        try:
            for model in wanted:
                self._host.bring(model, reports.put, self._stop)
        except GainzError as raised:
            error = raised
        finally:
            self._host.give(*wanted)
        reports.put(error)

    def _begin(self, error: GainzError | None) -> Iterator[Event] | None:
        try:
            if error is not None:
                raise error
            self._stop.raise_if_set("The answer")
            self._host.raise_unless_open(self._loaded)
            return self._host.answer(self._loaded, self._request, self._cancel)
        except Cancelled:
            return iter(self._tally.ending("cancelled", None))
        except GainzError as error:
            return iter(self._tally.ending("error", error))

    def close(self) -> None:
        """As `Answer.close`; a reload that nobody else waits for is cancelled."""
        self._stop.set()
        answer, self._answer = self._answer, iter(())
        if isinstance(answer, Answer):
            answer.close()
