"""From the engine's blocking iterator of events to the event loop, one thread for each answer, none of the loop's pool.

The pool that serves short work must not be filled by long answers: with four threads and eight streams the ninth request
would wait for a whole answer. How many answers there are at once is the engine's to bound.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from backends.base import Cancel, Event, GainzError

log = logging.getLogger(__name__)
Start = Callable[[Cancel], Iterator[Event]]
T = TypeVar("T")


class Answer:
    """One generation, or several at once, whose choices then count on: choice i of the k-th is ``k * stride + i``. `batch` hands over what has come since the last call, `rest` all that is still to come; `close` cancels.

    The loop is woken only while it waits: waking it for every token would cost more than sending them.
    """

    def __init__(self, *starts: Start, stride: int = 1) -> None:
        self.cancel = Cancel()
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._items: deque[Event | GainzError] = deque()
        self._waiting = self._ended = False
        self._left, self._lock = len(starts), threading.Lock()
        for place, start in enumerate(starts):
            threading.Thread(target=self._draw, args=(start, place * stride), name="http answer", daemon=True).start()

    def _draw(self, start: Start, offset: int) -> None:
        try:
            for event in start(self.cancel):
                self._items.append(replace(event, index=event.index + offset) if offset and event.index >= 0 else event)
                if self._waiting:
                    self._tell()
        except GainzError as error:
            self._items.append(error)
        except Exception as error:  # noqa: BLE001  a thread's fault must reach its request, not vanish with the thread
            log.exception("an answer failed")
            self._items.append(GainzError(f"{type(error).__name__} while answering.", remedy="The server's log has the traceback."))
        finally:
            with self._lock:
                self._left -= 1
                self._ended = not self._left
            self._tell()

    def _tell(self) -> None:
        self._waiting = False
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:        # the loop has closed: the server is gone, nobody listens
            self.cancel.set()

    async def batch(self) -> list[Event]:
        """All events at hand, at least one; [] at the end. Raises what `submit` raised."""
        while True:
            ended = self._ended     # looked at before the items: what came in between is taken with them
            if events := self._take():
                return events
            if ended:
                return []
            self._wake.clear()
            self._waiting = True
            if not self._items and not self._ended:     # looked at after the flag: one of the two sides sees the other
                await self._wake.wait()

    async def rest(self) -> list[Event]:
        """Everything up to the end, for those who need no pieces: woken once."""
        self._wake.clear()
        self._waiting = False
        while not self._ended:
            await self._wake.wait()
            self._wake.clear()
        return self._take()

    def _take(self) -> list[Event]:
        events: list[Event] = []
        while self._items:
            item = self._items.popleft()
            if isinstance(item, GainzError):
                raise item
            events.append(item)
        return events

    async def first(self) -> list[Event]:
        """Events up to the first that says something. One that failed before a single token is raised, so that the
        answer's status is still free to say so."""
        found: list[Event] = []
        while batch := await self.batch():
            found += [event for event in batch if event.progress is None]
            if found:
                break
        for event in found:
            if event.error is not None and not any(item.ids or item.text for item in found):
                raise event.error
        return found

    def close(self) -> None:
        self.cancel.set()


async def aside(call: Callable[[Cancel], T], receive: Any = None) -> T:
    """``call`` in a thread of its own, awaited. With ``receive`` a client that leaves sets its flag. Raises what it raises."""
    loop, cancel = asyncio.get_running_loop(), Cancel()
    found: asyncio.Future[T] = loop.create_future()

    def settle(set_, value) -> None:
        if not found.done():
            set_(value)

    def work() -> None:
        try:
            value = call(cancel)
        except Exception as error:  # noqa: BLE001  raised again where it is awaited
            outcome = found.set_exception, error
        else:
            outcome = found.set_result, value
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:        # the loop has closed: the server is gone
            log.debug("nobody awaits this any more")

    threading.Thread(target=work, name="http work", daemon=True).start()
    watcher = asyncio.create_task(watch_disconnect(receive, cancel)) if receive is not None else None
    try:
        return await found
    finally:
        cancel.set()
        if watcher is not None:
            watcher.cancel()


async def watch_disconnect(receive, cancel: Cancel) -> None:
    """Set ``cancel`` when the client goes away. The body has been read: what still comes is the disconnect."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            cancel.set()
            return
