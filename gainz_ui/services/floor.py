"""Whose turn the engine is: requests run side by side, a measurement runs alone.

A measurement asks for the floor, waits until the requests that run have ended, and holds new ones back; when it leaves, those that
waited go first, so neither starves the other: a request waits for one pair at most. Knows turns; nothing of models.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from backends.base import Cancel, Cancelled, Event, QueueFull, Timing, Usage

LOOK = 0.1                              # seconds between two looks at a flag


class Floor:
    """Thread-safe. ``held``: why requests wait now, "" = they do not."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._running = self._waiting = self._turn = 0
        self.held = ""

    @contextmanager
    def alone(self, reason: str, cancel: Cancel) -> Iterator[None]:
        """Nothing else runs in this block. Cancelled while it waits."""
        with self._change:
            while self.held:
                self._wait(cancel)
            self.held = reason
            try:
                while self._running:
                    self._wait(cancel)
            except Cancelled:
                self._release()
                raise
        try:
            yield
        finally:
            with self._change:
                self._release()

    def admitted(self, start: Callable[[float], Iterator[Event]], cancel: Cancel, limit: float | None = None) -> Iterator[Event]:
        """``start(waited)`` as soon as nobody is alone, and its events. ``limit``: seconds to wait, then QueueFull. Cancelled while
        it waits: an answer that was cancelled."""
        began, free = time.monotonic(), not self.held
        if not self._enter(cancel, limit):
            return iter((Event(finish="cancelled"), _ended(time.monotonic() - began)))
        try:
            return _Guest(self, start(0.0 if free else time.monotonic() - began))
        except BaseException:
            self._leave()
            raise

    @contextmanager
    def inside(self, cancel: Cancel) -> Iterator[None]:
        """For work that is not an answer. Cancelled while it waits."""
        if not self._enter(cancel, None):
            raise Cancelled("The request was cancelled while a benchmark was running.")
        try:
            yield
        finally:
            self._leave()

    def _enter(self, cancel: Cancel, limit: float | None) -> bool:
        end = None if limit is None else time.monotonic() + limit
        with self._change:
            if not self.held:
                self._running += 1
                return True
            mine, self._waiting = self._turn, self._waiting + 1
            while self._turn == mine:
                self._change.wait(LOOK)
                if self._turn == mine and (cancel.is_set() or end is not None and time.monotonic() >= end):
                    self._waiting -= 1
                    if cancel.is_set():
                        return False
                    raise QueueFull(f"A benchmark is running, and the wait was over after {limit:g} s.", reason=self.held)
            return True                 # counted by whoever let it in

    def _leave(self) -> None:
        with self._change:
            self._running -= 1
            self._change.notify_all()

    def _release(self) -> None:
        self.held, self._turn = "", self._turn + 1
        self._running, self._waiting = self._running + self._waiting, 0
        self._change.notify_all()

    def _wait(self, cancel: Cancel) -> None:
        self._change.wait(LOOK)
        cancel.raise_if_set("The benchmark")


class _Guest(Iterator[Event]):
    """An answer that leaves the floor with its last event, when it is closed, or when it is forgotten."""

    def __init__(self, floor: Floor, events: Iterator[Event]) -> None:
        self._floor, self._events, self._inside = floor, events, True

    def __next__(self) -> Event:
        try:
            event = next(self._events)
        except BaseException:           # StopIteration among them
            self._out()
            raise
        if event.last:
            self._out()
        return event

    def close(self) -> None:
        close = getattr(self._events, "close", None)
        if close is not None:
            close()
        self._out()

    def _out(self) -> None:
        if self._inside:
            self._inside = False
            self._floor._leave()

    def __del__(self) -> None:
        self._out()


def _ended(waited: float) -> Event:
    return Event(-1, usage=Usage(), timing=Timing(queue_seconds=waited, total_seconds=waited))
