"""One thing told to many: "the models changed". Knows nothing of what listens."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Signal:
    """Callbacks are called in the emitter's thread, in the order of subscription. A subscriber that fails is logged with its
    traceback and does not keep the others from hearing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._callbacks: dict[int, Callable[[], None]] = {}
        self.version = 0                      # counts emissions: a poller compares it with the one it saw last

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Returns the function that unsubscribes; calling that twice is harmless."""
        with self._lock:
            key, self._next = self._next, self._next + 1
            self._callbacks[key] = callback
        return lambda: self._drop(key)

    def _drop(self, key: int) -> None:
        with self._lock:
            self._callbacks.pop(key, None)

    def emit(self) -> None:
        with self._lock:
            self.version += 1
            callbacks = list(self._callbacks.values())
        for callback in callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001  a listener's fault is the listener's: logged, and the others still hear
                log.exception("a listener failed")
