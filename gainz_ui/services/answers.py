"""Answers under way: each is drawn from the engine by a thread of its own and watched by polling.

A page may go away in the middle (a phone switches apps, a tab is reloaded): the answer goes on for a grace time, so that
the page that comes back finds it, finished or not. Knows requests and events; refuses to know pages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from backends.base import Cancel, Event, GainzError, Progress, Timing, Usage

log = logging.getLogger(__name__)
GRACE = 120.0                           # seconds an answer goes on without anybody watching
KEPT = 600.0                            # seconds a finished answer waits to be fetched
Start = Callable[[Cancel], Iterator[Event]]


@dataclass(frozen=True)
class View:
    """An answer at one moment. ``tokens`` counts what was computed so far, None where only text comes (another server's);
    ``speed`` tokens a second, measured here while it runs and by the engine once it has ended; ``seconds`` since the question."""

    text: str = ""
    tokens: int | None = 0
    done: bool = False
    finish: str | None = None
    ttft: float | None = None
    speed: float | None = None
    seconds: float = 0.0
    progress: Progress | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    error: GainzError | None = None
    runs: tuple[tuple[str, bool], ...] = ()     # the text in runs: were these accepted draft tokens? () where none was


class Answer:
    """One generation of one choice. ``about``: whatever its watchers need to show it."""

    def __init__(self, start: Start, about: Any = None) -> None:
        self.cancel, self.about = Cancel(), about
        self._start, self._changed = start, threading.Condition()
        self._text: list[str] = []
        self._runs: list[tuple[str, bool]] = []
        self._tokens, self._version, self._first = 0, 0, None
        self._begun, self.ended = time.monotonic(), None
        self._finish = self._progress = self._usage = self._timing = self._error = None
        threading.Thread(target=self._draw, name="answer", daemon=True).start()

    def _draw(self) -> None:
        error: GainzError | None = None
        try:
            for event in self._start(self.cancel):
                self._take(event)
        except GainzError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001  a thread's fault must reach whoever watches, not vanish with the thread
            log.exception("an answer failed")
            error = GainzError(f"{type(raised).__name__} while answering.", remedy="The server's log has the traceback.")
        finally:
            with self._changed:
                self._error = error or self._error
                self._finish = self._finish or ("error" if self._error else None)
                self.ended = time.monotonic()
                self._version += 1
                self._changed.notify_all()

    def _take(self, event: Event) -> None:
        with self._changed:
            said = bool(event.ids or event.text)
            if said and self._first is None:
                self._first = time.monotonic()
            self._tokens += len(event.ids)
            self._text.append(event.text)
            for text, drafted in zip(event.parts, event.drafted) if event.parts else ((event.text, False),):
                self._run(text, drafted)
            self._finish = event.finish or self._finish
            self._progress = event.progress or (None if said else self._progress)
            if event.last:
                self._usage, self._timing, self._error = event.usage, event.timing, event.error
            self._version += 1
            self._changed.notify_all()

    def _run(self, text: str, drafted: bool) -> None:
        if self._runs and self._runs[-1][1] == drafted:
            self._runs[-1] = self._runs[-1][0] + text, drafted
        elif text:
            self._runs.append((text, drafted))

    @property
    def version(self) -> int:
        """Grows with every event: a watcher compares it with the one it saw last."""
        return self._version

    def wait(self, seen: int, seconds: float) -> int:
        """Until something newer than version ``seen`` is there, at most ``seconds``. Returns the version."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > seen or self.ended is not None, seconds)
            return self._version

    def view(self) -> View:
        with self._changed:
            now = self.ended or time.monotonic()
            timing, first = self._timing, self._first
            span = now - first if first is not None else 0.0
            live = (self._tokens - 1) / span if self._tokens > 1 and span > 0 else None
            text = "".join(self._text)
            return View(text, self._tokens if self._tokens or not text else None, self.ended is not None, self._finish,
                        timing.ttft_seconds if timing else first - self._begun if first else None,
                        (timing and timing.decode_tokens_per_second) or live, now - self._begun,
                        self._progress, self._usage, timing, self._error,
                        tuple(self._runs) if any(drafted for _, drafted in self._runs) else ())

    @property
    def running(self) -> bool:
        return self.ended is None

    def stop(self) -> None:
        self.cancel.set()


class Answers:
    """The answers of one installation by the id of their chat."""

    def __init__(self, grace: float = GRACE) -> None:
        self.grace = grace
        self._lock = threading.Lock()
        self._answers: dict[str, Answer] = {}
        self._timers: dict[str, threading.Timer] = {}
        self._watchers: dict[str, int] = {}

    def begin(self, chat: str, start: Start, about: Any = None) -> Answer:
        """A new answer; one still running for the same chat is stopped, as its question is no longer the last."""
        with self._lock:
            old = self._answers.get(chat)
            answer = self._answers[chat] = Answer(start, about)
            self._forget()
        if old is not None:
            old.stop()
        return answer

    def get(self, chat: str) -> Answer | None:
        with self._lock:
            return self._answers.get(chat)

    def stop(self, chat: str) -> bool:
        """True if there was one to stop."""
        answer = self.get(chat)
        if answer is None or not answer.running:
            return False
        answer.stop()
        return True

    def watch(self, chat: str) -> None:
        """A page looks at this chat's answer: it may go on."""
        with self._lock:
            self._watchers[chat] = self._watchers.get(chat, 0) + 1
            timer = self._timers.pop(chat, None)
        if timer is not None:
            timer.cancel()

    def leave(self, chat: str) -> None:
        """A page has looked away: without another watcher the answer stops after the grace time."""
        with self._lock:
            left = self._watchers.pop(chat, 1) - 1
            answer = self._answers.get(chat)
            if left > 0:
                self._watchers[chat] = left
            elif answer is not None and answer.running:
                timer = self._timers[chat] = threading.Timer(self.grace, answer.stop)
                timer.daemon = True
                timer.start()

    def drop(self, chat: str) -> None:
        """Forget a finished answer: its text is where it belongs."""
        with self._lock:
            if chat in self._answers and not self._answers[chat].running:
                del self._answers[chat]

    def _forget(self) -> None:
        now = time.monotonic()
        for chat in [c for c, a in self._answers.items() if a.ended is not None and now - a.ended > KEPT]:
            del self._answers[chat]

    def close(self) -> None:
        with self._lock:
            answers, timers = list(self._answers.values()), list(self._timers.values())
        for timer in timers:
            timer.cancel()
        for answer in answers:
            answer.stop()
