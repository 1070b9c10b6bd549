"""Stop strings in a stream: cuts at the first one and holds back only what may still become one.

Knows characters only, not tokens. Text is held as long as its end is a proper prefix of a stop string, no longer: text that
looks like none has no delay.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """``push`` returns the text that is certain; after a match ``matched`` is the stop string and nothing more comes."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, active: bool = True) -> str:
        """Not ``active``: the text passes, and no stop string may begin in it (fewer tokens than asked for so far)."""
        if not self._stops or not text:
            return text
        if not active:
            return self.flush() + text
        text, self._held = self._held + text, ""
        found = min(((place, -len(stop), stop) for stop in self._stops if (place := text.find(stop)) >= 0), default=None)
        if found is not None:
            self.matched = found[2]
            return text[:found[0]]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep:]
        return text[:len(text) - keep]

    def flush(self) -> str:
        """What was held, once it is certain that no stop string comes: at the end of the answer."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper prefix of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
