"""Models that nobody asks give their memory back after a while, and come back with the next request.

Knows when; how a model rests and wakes is the host's. A thread of its own, which looks a few times within the limit.
"""

from __future__ import annotations

import logging
import threading

from backends.base import GainzError
from backends.host import EngineHost

log = logging.getLogger(__name__)
OFTEN, SELDOM = 0.25, 15.0              # seconds between two looks, at least and at most


class Idle:
    """``seconds`` without a request before a model rests; 0 = never, and no thread."""

    def __init__(self, host: EngineHost, seconds: float) -> None:
        self._host, self._seconds, self._over = host, seconds, threading.Event()
        if seconds:
            threading.Thread(target=self._run, name="idle models", daemon=True).start()

    def _run(self) -> None:
        while not self._over.wait(min(SELDOM, max(OFTEN, self._seconds / 10))):
            self.look()

    def look(self) -> list[str]:
        """The names of those that rest from now on."""
        rested = []
        for name, idle in self._host.idle().items():
            try:
                if idle >= self._seconds and self._host.rest(name, self._seconds):
                    log.info("%s rests after %.0f s without a request", name, idle)
                    rested.append(name)
            except GainzError as error:     # the next look tries again
                log.warning("%s could not give its memory back: %s", name, error)
        return rested

    def close(self) -> None:
        self._over.set()
