"""The queue of one model as those in it see it: their place, about how long it will take, and when they have waited too long.

The estimate is of the requests served last: their mean time in work, shared among the streams. Knows answers and a clock; who runs
is the scheduler's affair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from backends.base import Event, Progress
from backends.engine.sequence import Answer
from backends.errors import QueueFull

REMEMBERED = 32


class Queue:
    def __init__(self, streams: int) -> None:
        self._streams = max(1, streams)
        self._served: deque[float] = deque(maxlen=REMEMBERED)
        self._told: dict[Answer, tuple[int, int]] = {}

    def served(self, seconds: float) -> None:
        """A request was in work for so long."""
        self._served.append(seconds)

    def seconds(self, before: int) -> float | None:
        """About how long ``before`` requests keep one that comes after them; None: nothing has been served yet."""
        return before / self._streams * sum(self._served) / len(self._served) if self._served else None

    def look(self, answers: Sequence[Answer], now: float) -> Iterator[tuple[Answer, QueueFull]]:
        """Tell those that wait their new places; those that have waited longer than they may."""
        waiting = [answer for answer in answers if answer.admitted is None]
        self._told = {answer: told for answer, told in self._told.items() if answer.admitted is None}
        for place, answer in enumerate(waiting, 1):
            limit = answer.request.queue_limit
            if limit is not None and now >= answer.submitted + limit:
                self._told.pop(answer, None)
                yield answer, QueueFull(f"The request waited {limit:g} s without its turn.", waiting=len(waiting), place=place,
                                        seconds=_round(self.seconds(place)))
            elif self._told.get(answer) != (place, len(waiting)):
                self._told[answer] = place, len(waiting)
                about = self.seconds(place)
                answer.sink(Event(0, progress=Progress("queue", place, len(waiting), "" if about is None else f"about {about:.0f} s")))


def _round(seconds: float | None) -> float:
    return round(max(1.0, seconds or 1.0), 1)


def full(waiting: int, limit: int, seconds: float | None) -> QueueFull:
    return QueueFull(f"{waiting} requests are waiting already.", waiting=waiting, limit=limit, seconds=_round(seconds))
