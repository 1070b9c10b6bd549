"""Long work that a page starts and may leave: loads, imports, pulls, the starter. One thread each, watched by polling.

A task outlives the page that started it: closing the browser neither stops it nor loses its outcome. Knows progress,
cancel and results; refuses to know what the work is.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from backends.base import Cancel, Cancelled, GainzError, Progress, ProgressFn

log = logging.getLogger(__name__)
State = Literal["running", "done", "failed", "cancelled"]
Work = Callable[[ProgressFn, Cancel], Any]
KEPT = 32                               # finished tasks that stay readable


class Task:
    """One piece of work. ``kind`` and ``subject`` say what: ("load", "starter"). Fields are read by any thread."""

    def __init__(self, number: int, kind: str, subject: str) -> None:
        self.number, self.kind, self.subject = number, kind, subject
        self.cancel = Cancel()
        self.progress = Progress("start")
        self.state: State = "running"
        self.result: Any = None
        self.error: GainzError | None = None
        self.started, self.ended = time.monotonic(), 0.0
        self._finished = threading.Event()

    def report(self, progress: Progress) -> None:
        self.progress = progress

    def wait(self, seconds: float | None = None) -> bool:
        """True once the work has ended."""
        return self._finished.wait(seconds)

    @property
    def running(self) -> bool:
        return not self._finished.is_set()

    async def looks(self, every: float) -> AsyncIterator[None]:
        """A turn at once and one every so many seconds until the work has ended: for a page that watches."""
        while self.running:
            yield
            await asyncio.sleep(every)

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.started

    def outcome(self) -> Any:
        """The result; raises the task's own error. Only for an ended task."""
        if self.error is not None:
            raise self.error
        return self.result

    def run(self, work: Work) -> None:
        try:
            self.result = work(self.report, self.cancel)
            self.state = "done"
        except Cancelled as error:
            self.state, self.error = "cancelled", error
        except GainzError as error:
            self.state, self.error = "failed", error
        except Exception as error:  # noqa: BLE001  a thread's fault must reach whoever watches, not vanish with the thread
            log.exception("%s %s failed", self.kind, self.subject)
            self.state = "failed"
            self.error = GainzError(
                f"{type(error).__name__}: {error}", remedy="The log has the traceback; please report it."
            )
        finally:
            self.ended = time.monotonic()
            self._finished.set()


class Tasks:
    """The board of one installation's tasks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._tasks: list[Task] = []

    def start(self, kind: str, subject: str, work: Work) -> Task:
        """Run ``work(progress, cancel)`` in a thread. The same work asked for twice is one task."""
        with self._lock:
            same = next((t for t in self._tasks if t.running and (t.kind, t.subject) == (kind, subject)), None)
            if same is not None:
                return same
            task = Task(next(self._numbers), kind, subject)
            self._tasks.append(task)
            self._forget()
        threading.Thread(target=task.run, args=(work,), name=f"{kind} {subject}", daemon=True).start()
        return task

    def _forget(self) -> None:
        ended = [task for task in self._tasks if not task.running]
        for task in ended[:max(0, len(ended) - KEPT)]:
            self._tasks.remove(task)

    def running(self, kind: str | None = None) -> list[Task]:
        with self._lock:
            return [t for t in self._tasks if t.running and kind in (None, t.kind)]

    def latest(self, kind: str, subject: str | None = None) -> Task | None:
        """The newest task of that kind, running or ended."""
        with self._lock:
            return next((t for t in reversed(self._tasks) if t.kind == kind and subject in (None, t.subject)), None)

    def close(self) -> None:
        """Ask everything to stop; the threads are daemons and end at their next look at ``cancel``."""
        for task in self.running():
            task.cancel.set()
