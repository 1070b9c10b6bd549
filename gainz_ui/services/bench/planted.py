"""The benchmark's own test: a difference that is known, because it was planted.

Both sides are wrapped alike and timed by our clock alone; on B every token is held back, so that its stream really comes slower by the
given share. A benchmark that does not find it is broken. Used by `bench --plant` and by tests; the report says that it was.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from backends.base import Cancel, Event, Message, ModelInfo, Request
from gainz_ui.services.bench.asking import Side


class Slowed:
    """A side whose tokens come ``share`` of their time later; 0: as they come. The engine's own clock is left out: it would not know."""

    def __init__(self, side: Side, share: float) -> None:
        self._side, self._share = side, share

    @property
    def info(self) -> ModelInfo:
        return self._side.info

    def tokenize(self, prompt: str | tuple[Message, ...], *, special: bool = True) -> tuple[int, ...]:
        return self._side.tokenize(prompt, special=special)

    def generate(self, request: Request, cancel: Cancel) -> Iterator[Event]:
        """Events are drawn by a thread that notes when each came: the engine does not wait for whoever reads."""
        come: queue.SimpleQueue[tuple[float, Event | None]] = queue.SimpleQueue()
        events = self._side.generate(request, cancel)
        threading.Thread(target=_draw, args=(events, come), name="planted", daemon=True).start()
        first = None
        while (arrival := come.get())[1] is not None:
            at, event = arrival
            if event.ids or event.text:
                first = at if first is None else first
                _until(first + (at - first) * (1 + self._share))
            yield replace(event, timing=None)


def _draw(events: Iterator[Event], come: queue.SimpleQueue[tuple[float, Event | None]]) -> None:
    try:
        for event in events:
            come.put((time.perf_counter(), event))
    finally:
        come.put((0.0, None))


def planted(sides: Sequence[Side], share: float) -> tuple[Slowed, Slowed]:
    return Slowed(sides[0], 0.0), Slowed(sides[1], share)


def _until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)
