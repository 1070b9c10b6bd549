"""Batches: many tasks through one loaded model, as many at once as it has streams, each result written when it is there.

A row: {task_id, status, output, usage, cost_ms, attempts, error, finish, model, revision}; status "ok", or "failed" after the last
attempt. What the task itself is to blame for (a bad value, too long) is not tried again. Pausing lets what runs end; cancelling
stops it, unwritten, and the next run of the same batch does it. Knows the studio; nothing of pages or formats.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from backends.base import (
    Cancel, EngineStopping, GainzError, InvalidRequest, ModelNotLoaded, NameTaken, NotSupported, Request, Usage)
from gainz_ui.services.batch_files import Results, failures_of, refuse_same
from gainz_ui.services.batch_tasks import Task, parse
from gainz_ui.services.records import safe_name

KIND = "batch"                                  # the folder of outputs/
HOPELESS = (InvalidRequest, NotSupported)       # the same again would give the same again
ENDS_ALL = (EngineStopping, ModelNotLoaded)     # nothing that any task could help
SPARE = 2                                       # tasks beyond the streams, so that none is ever empty
PAUSE_SECONDS = 0.5                             # before another attempt, doubled each time


@dataclass(frozen=True)
class Plan:
    """``time_limit``: seconds a task may take, where it does not say itself; ``attempts``: how often it is tried; ``key``: as in
    `Request`."""

    tasks: tuple[Task, ...]
    source: Path
    output: Path
    model: str
    time_limit: float | None = None
    attempts: int = 3
    key: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or not 1 <= self.attempts <= 100:
            raise InvalidRequest("attempts is a whole number from 1 to 100.", field="attempts")
        Request("", time_limit=self.time_limit)             # its range is checked there
        refuse_same(self.source, self.output)


@dataclass(frozen=True)
class Standing:
    """How far a batch is. ``rate``: tasks a second since the start of this run; ``tokens_per_second`` likewise."""

    done: int
    failed: int
    total: int
    running: int
    rate: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    state: str                          # "running", "paused", "stopping", "cancelled", "done", "error"
    error: GainzError | None = None


class Batch:
    """One run of a plan. `start` returns at once, `wait` until it is over."""

    def __init__(self, studio: Any, plan: Plan) -> None:
        """Opens the results. ModelNotLoaded, NameTaken, InvalidRequest, DiskFull before any work."""
        self.plan, self._studio = plan, studio
        self._info = studio.model(plan.model).info
        self.results = Results(plan.output, {task.id: task.raw for task in plan.tasks}, self._info.name)
        self.resumed = len(self.results.rows)
        self._left = [task for task in reversed(plan.tasks) if task.id not in self.results.rows]
        self.cancel, self._go, self._lock = Cancel(), threading.Event(), threading.Lock()
        self._go.set()
        self._running, self._tokens, self._began = 0, 0, time.monotonic()
        self._ended: float | None = None
        self._error: GainzError | None = None
        self._over = threading.Event()
        self.cancel.on_set(self._go.set)

    def start(self) -> Batch:
        count = min(len(self._left), max(1, self._info.streams) + SPARE)
        self._hands = [threading.Thread(target=self._work, name=f"batch {i}", daemon=True) for i in range(count)]
        for hand in self._hands:
            hand.start()
        threading.Thread(target=self._finish, name="batch", daemon=True).start()
        return self

    def pause(self) -> None:
        """Begin no further task; those that run end."""
        if not self.cancel.is_set():
            self._go.clear()

    def resume(self) -> None:
        self._go.set()

    def wait(self, seconds: float | None = None) -> bool:
        return self._over.wait(seconds)

    # ------------------------------------------------------------------------------------------ the work
    def _finish(self) -> None:
        for hand in self._hands:
            hand.join()
        self.results.close()
        self._ended = time.monotonic()
        self._over.set()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                row = self._row(task)
                if row is not None:
                    self.results.add(row)
            except GainzError as error:         # the disk is full, the model is gone: no further task could do better
                self._error = self._error or error
                self.cancel.set()
            finally:
                with self._lock:
                    self._running -= 1

    def _next(self) -> Task | None:
        while True:
            self._go.wait()
            with self._lock:
                if self.cancel.is_set() or not self._left:
                    return None
                if self._go.is_set():
                    self._running += 1
                    return self._left.pop()

    def _row(self, task: Task) -> dict[str, Any] | None:
        """None: it was cancelled, and is left to the next run."""
        limit = task.request.time_limit or self.plan.time_limit
        request = replace(task.request, time_limit=limit, key=self.plan.key)
        for attempt in range(1, self.plan.attempts + 1):
            began = time.monotonic()
            text, usage, finish, error = self._ask(request)
            if isinstance(error, ENDS_ALL):
                raise error
            if self.cancel.is_set() and (error is not None or finish == "cancelled"):
                return None
            if error is None and finish == "time_limit":
                error = InvalidRequest(f"The task took longer than {limit} s.", field="time_limit", remedy="Give it more time.")
            if error is None or isinstance(error, HOPELESS) or attempt == self.plan.attempts:
                break
            if self._cancelled_while_waiting(PAUSE_SECONDS * 2 ** (attempt - 1)):
                return None
        self._tokens += usage.completion_tokens if usage else 0
        return {"task_id": task.id, "status": "ok" if error is None else "failed", "output": text, "finish": finish, "usage": asdict(usage) if usage else None,
                "cost_ms": round((time.monotonic() - began) * 1000, 1), "attempts": attempt, "error": error and error.to_dict(),
                "model": self._info.name, "revision": self._info.revision}

    def _cancelled_while_waiting(self, seconds: float) -> bool:
        gone = threading.Event()
        self.cancel.on_set(gone.set)
        return gone.wait(seconds)

    def _ask(self, request: Request) -> tuple[str, Usage | None, str | None, GainzError | None]:
        """``usage`` None: it was not told, by another server or because nothing began."""
        text, usage, finish, error = [], None, None, None
        try:
            for event in self._studio.submit(request, self.plan.model, self.cancel):
                text.append(event.text)
                finish = event.finish or finish
                if event.last:
                    usage, error = event.usage or usage, event.error
        except GainzError as raised:
            error = raised
        return "".join(text), usage, finish, error

    # ------------------------------------------------------------------------------------------ how far
    def standing(self) -> Standing:
        rows, total, over = dict(self.results.rows), len(self.plan.tasks), self._over.is_set()
        fresh, seconds = len(rows) - self.resumed, max((self._ended or time.monotonic()) - self._began, 1e-6)
        rate = fresh / seconds if fresh else None
        return Standing(len(rows), sum(status != "ok" for status in rows.values()), total, self._running, rate,
                        self._tokens / seconds if fresh else None, (total - len(rows)) / rate if rate and not over else None,
                        self._state(len(rows) == total), self._error)

    def _state(self, complete: bool) -> str:
        if not self._over.is_set():
            return "stopping" if self.cancel.is_set() else "running" if self._go.is_set() else "paused"
        return "error" if self._error is not None else "done" if complete else "cancelled"


def begin(studio: Any, data: bytes, model: str, name: str, *, attempts: int = 3, time_limit: float | None = None,
          skip_bad: bool = False, key: str = "") -> Batch:
    """Start what ``data`` (JSON lines) asks for, in outputs/batch/: the tasks are kept beside the results, so that the same name with
    the same tasks goes on where it stopped, on the command line too. Everything that can be wrong is raised before any work."""
    studio.model(model)
    found = parse(io.BytesIO(data), model)
    tasks = found.tasks if skip_bad else found.sound()
    source = studio.records.outputs / KIND / f"{safe_name(name)}.tasks.jsonl"
    if source.exists() and source.read_bytes() != data:
        raise NameTaken(f"There is a batch {name!r} with other tasks.", field="name", remedy="Choose another name for this one.")
    source = studio.records.write_output(KIND, source.name, data)
    return Batch(studio, Plan(tasks, source, source.with_name(f"{name}.results.jsonl"), model, time_limit, attempts, key)).start()


def describe(batch: Batch) -> dict[str, Any]:
    """As JSON, for the command line and Gradio's client."""
    now = batch.standing()
    failures = failures_of(batch.plan.output)
    return {**{key: value for key, value in asdict(now).items() if key != "error"}, "resumed": batch.resumed,
            "output": str(batch.plan.output), "failures": str(failures) if now.failed else None,
            "error": now.error and now.error.to_dict()}


def follow(batch: Batch, report: Callable[[Standing], Any], cancel: Cancel, every: float = 0.25) -> Standing:
    """Wait for the end, telling how far it is; ``cancel`` stops it."""
    cancel.on_set(batch.cancel.set)
    while not batch.wait(every):
        report(batch.standing())
    return batch.standing()
