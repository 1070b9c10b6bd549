"""The engine process from the front: started when a model is loaded, supervised, started again, ended with its last model.

Knows which models the engine ought to have, so that a new process gets them back when they are next asked for. Refuses to
know what is in them. The same `Model` protocol stands on both sides of the pipe. Nothing here imports torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from queue import Empty
from typing import Any

import psutil

from backends.answer import Answer
from backends.base import (
    Cancel, EngineStopping, GainzError, InvalidRequest, Model, ModelInfo, ModelNotLoaded, Progress, ProgressFn, Request)
from backends.engine.worker import Beat, WorkerSettings
from backends.link import Call, Link
from backends.proxy import EngineModel
from backends.speculative import UNCOMPARED, Difference, parts

START_SECONDS = 180.0                   # importing torch from a cold, slow disk
CANCEL_SECONDS, STOP_SECONDS = 0.5, 0.5  # at the end: for cancelled answers to be heard, and for the process to go by itself
STATS_SECONDS = 0.2                     # how long `stats` waits before it falls back on the last heartbeat


@dataclass(eq=False)
class Loaded:
    """A model that the engine ought to have, and the life of the engine in which it has it."""

    name: str
    path: str
    backend: str
    options: dict[str, Any]
    revision: str | None
    info: ModelInfo | None = None
    link: Link | None = None
    gate: threading.Lock = field(default_factory=threading.Lock)    # one load of it at a time
    users: int = 0                      # answers and questions under way that need it in memory
    used: float = field(default_factory=time.monotonic)             # when the last of them ended
    resting: bool = False               # it gave its memory back for want of work, and comes back when it is asked for


@dataclass(frozen=True)
class EngineBeat:
    """How the engine is, from what it last told: no round trip. ``step_age``: see `Beat`; it also grows while the child
    is silent although somebody waits for it."""

    state: str
    reason: str
    running: int = 0
    waiting: int = 0
    rss: int = 0                        # bytes
    step_age: float | None = None
    counters: Mapping[str, Any] = field(default_factory=dict)


def _quiet() -> None:
    """Nobody wants to know."""


class EngineHost:
    """Thread-safe. ``engine_options`` go to the engine's constructor. ``on_change`` is called, from any thread, when the
    engine died. Every method that needs the child may raise EngineDied."""

    def __init__(self, logs: Path | None = None, *, package: str = "backends", engine: str = "backends.engine.loop:Engine",
                 **engine_options: Any) -> None:
        self.on_change: Callable[[], None] = _quiet
        self.on_beat: Callable[[Mapping[str, Any]], None] = lambda counters: None       # every heartbeat's counters, from the reader's thread
        self._settings = WorkerSettings(str(logs) if logs else None, package, engine, tuple(engine_options.items()))
        self._lock = threading.RLock()                      # never held while waiting for the child
        self._link: Link | None = None
        self._death: GainzError | None = None               # why the last life ended, until the next begins
        self._models: dict[str, Loaded] = {}
        self._pending = 0                                   # loads on their way: the process must not end under them
        self._answers: set[Call] = set()                    # running, on this side
        self._closing, self._ending = False, threading.Lock()

    # ------------------------------------------------------------------------------------------ models
    def load(self, name: str, path: str | Path, backend: str, options: Any, progress: ProgressFn, cancel: Cancel,
             revision: str | None = None) -> Model:
        """The proxy of a model in the child, which is started if it is not there. ``options``: the backend's dataclass."""
        values = {item.name: getattr(options, item.name) for item in fields(options)}
        loaded = Loaded(name, str(path), backend, values, revision)
        with self._lock:
            if name in self._models:
                raise InvalidRequest(f"{name!r} is loaded already.", field="model")
        with self._busy():
            self.bring(loaded, progress, cancel)
            with self._lock:
                if self._models.setdefault(name, loaded) is not loaded:
                    raise InvalidRequest(f"{name!r} is loaded already.", field="model")
        return EngineModel(self, loaded)

    def check(self, name: str, path: str | Path, backend: str, options: Any, progress: ProgressFn, cancel: Cancel) -> None:
        """Raises what the child can say against ``options`` without reading a weight; nothing changes."""
        values = {item.name: getattr(options, item.name) for item in fields(options)}
        with self._busy():
            self._start(progress, cancel).call("check", name, str(path), backend, values).result()

    def unload(self, name: str) -> Loaded:
        """Give the memory of ``name`` back; the last one ends the process. Returns what `restore` takes. ModelNotLoaded."""
        with self._lock:
            loaded = self._models.pop(name, None)
        if loaded is None:
            raise ModelNotLoaded(f"{name!r} is not loaded.", field="model")
        with self._busy(), loaded.gate:
            if loaded.link is not None and loaded.link.alive:
                try:
                    loaded.link.call("unload", name).result()
                except GainzError:
                    if loaded.link.alive:                   # a death in between has given the memory back as well
                        raise
        return loaded

    def restore(self, loaded: Loaded) -> None:
        """Have an unloaded model again as it was: it comes back when it is next asked for, as after a death."""
        fresh = replace(loaded, link=None, gate=threading.Lock(), users=0, used=time.monotonic())
        with self._lock:
            self._models.setdefault(loaded.name, fresh)

    def model(self, name: str) -> Model | None:
        with self._lock:
            loaded = self._models.get(name)
        return None if loaded is None else EngineModel(self, loaded)

    def models(self) -> dict[str, ModelInfo]:
        """By name; after a death still those that come back when they are asked for."""
        with self._lock:
            return {name: loaded.info for name, loaded in self._models.items() if loaded.info is not None}

    def annotate(self, name: str, info: ModelInfo) -> None:
        """Replace what is shown about a model, e.g. to add the estimate made before the load."""
        with self._lock:
            if (loaded := self._models.get(name)) is not None:
                loaded.info = info

    def ensure(self, name: str, progress: ProgressFn, cancel: Cancel) -> ModelInfo:
        """Have ``name`` in memory now, if a death of the engine took it. ModelNotLoaded."""
        with self._lock:
            loaded = self._models.get(name)
        if loaded is None:
            raise ModelNotLoaded(f"{name!r} is not loaded.", field="model")
        self.bring(loaded, progress, cancel)
        return loaded.info

    def has(self, loaded: Loaded) -> bool:
        """Is it in memory now, so that a request need not wait for a load?"""
        return loaded.link is not None and loaded.link.alive

    def needed(self, loaded: Loaded, request: Request) -> list[Loaded]:
        """The models that an answer wants in memory: its own, and the one that drafts for it."""
        name = parts(request.draft.name)[1] if request.draft is not None else None
        with self._lock:
            draft = self._models.get(name)
        return [loaded] if draft is None else [loaded, draft]

    def idle(self) -> dict[str, float]:
        """For how many seconds nobody has needed which model that is in memory."""
        with self._lock:
            now = time.monotonic()
            return {name: now - loaded.used for name, loaded in self._models.items() if self.has(loaded) and not loaded.users}

    def missing(self) -> tuple[str, ...]:
        """The models whose files are gone: they answer while they are in memory, and cannot come back."""
        with self._lock:
            return tuple(name for name, loaded in self._models.items() if not Path(loaded.path).exists())

    def resting(self) -> tuple[str, ...]:
        """The models that gave their memory back and come back when they are asked for."""
        with self._lock:
            return tuple(name for name, loaded in self._models.items() if loaded.resting)

    def rest(self, name: str, seconds: float = 0.0) -> bool:
        """Give the memory of ``name`` back and have it come back when it is next asked for; False: it is in use, or was within the
        last so many seconds. Whoever asks meanwhile waits for it to come back."""
        with self._lock:
            loaded = self._models.get(name)
        if loaded is None:
            return False
        with self._busy(), loaded.gate:
            with self._lock:
                if loaded.users or not self.has(loaded) or time.monotonic() - loaded.used < seconds:
                    return False
                link, loaded.link, loaded.resting = loaded.link, None, True     # from here on those who come wait at the gate
            try:
                link.call("unload", name).result()
            except GainzError:
                if link.alive:
                    raise
        self.on_change()
        return True

    def take(self, *wanted: Loaded) -> bool:
        """Hold these models in memory until `give`; False, and nothing is held, where one of them is not there."""
        with self._lock:
            if not all(map(self.has, wanted)):
                return False
            for loaded in wanted:
                loaded.users += 1
            return True

    def hold(self, *wanted: Loaded) -> None:
        """As `take`, for models that are not in memory yet: they do not go to rest before `give`."""
        with self._lock:
            for loaded in wanted:
                loaded.users += 1

    def give(self, *held: Loaded, touched: bool = True) -> None:
        with self._lock:
            for loaded in held:
                loaded.users -= 1
                loaded.used = time.monotonic() if touched else loaded.used

    def bring(self, loaded: Loaded, progress: ProgressFn, cancel: Cancel) -> Link:
        """The life of the engine that holds the model: loaded now if the last life took it with it, or if it rests."""
        with self._busy(), loaded.gate:
            if self.has(loaded):
                return loaded.link
            link = self._start(progress, cancel)
            call = link.call("load", loaded.name, loaded.path, loaded.backend, loaded.options, loaded.revision)
            cancel.on_set(call.cancel)
            info, before = call.result(progress), loaded.info
            loaded.info = replace(info, estimate=info.estimate or (before and before.estimate))
            loaded.link, loaded.resting, loaded.used = link, False, time.monotonic()
        if self.model(loaded.name) is not None:             # it came back
            self.on_change()
        return link

    def difference(self, target: str, draft: str) -> Difference | None:
        """Where the vocabularies of two models part; UNCOMPARED while one of them is not in memory."""
        with self._lock:
            pair = [self._models.get(name) for name in (target, draft)]
        if None in pair or not self.take(*pair):
            return UNCOMPARED
        try:
            return pair[0].link.call("difference", target, draft).result()
        finally:
            self.give(*pair, touched=False)                 # looking at the page is no use of a model

    # ------------------------------------------------------------------------------------------ answers
    def raise_unless_open(self, loaded: Loaded) -> None:
        if self._closing:
            raise EngineStopping("The server is shutting down.")
        with self._lock:
            if self._models.get(loaded.name) is not loaded:
                raise ModelNotLoaded(f"{loaded.name!r} is not loaded any more.", field="model")

    def answer(self, loaded: Loaded, request: Request, cancel: Cancel) -> Answer | None:
        """Begin an answer; raises what is wrong with the request. None: one of the models it needs is not in memory."""
        held = self.needed(loaded, request)
        if not self.take(*held):
            return None

        def gone(call: Call) -> None:
            with self._lock:
                if call not in self._answers:               # its end and its closing may meet
                    return
                self._answers.discard(call)
            self.give(*held)

        try:
            call = loaded.link.call("generate", loaded.name, request)
        except GainzError:                                  # it died a moment ago
            self.give(*held)
            raise
        self._answers.add(call)
        answer = Answer(call, request, cancel, gone)
        answer.accept()
        return answer

    # ------------------------------------------------------------------------------------------ how it is
    @property
    def state(self) -> str:
        """idle: no process; starting; ready; dead: the last one died, and the next request starts another."""
        link, death = self._link, self._death
        if death is not None:
            return "dead"
        return "idle" if link is None else "ready" if link.ready else "starting"

    @property
    def reason(self) -> str:
        return str(self._death) if self._death is not None else ""

    def beat(self) -> EngineBeat:
        link = self._link
        if link is None or link.last_beat is None:
            return EngineBeat(self.state, self.reason, rss=self._rss(link))
        silent = time.monotonic() - link.heard
        last: Beat = link.last_beat
        age = None if last.step_age is None and not (self._answers and silent > 1.0) else (last.step_age or 0.0) + silent
        under_way = len(self._answers)                      # known here, to the moment: whoever has read an answer's end finds it gone
        waiting = min(int(last.counters.get("queue", 0)), under_way)
        return EngineBeat(self.state, self.reason, under_way - waiting, waiting, self._rss(link), age, last.counters)

    def stats(self) -> dict[str, Any]:
        """The engine's counters, asked for now; an engine that does not answer at once gives its last heartbeat's."""
        link = self._link
        if link is not None and link.ready:
            call = link.call("stats")
            try:
                kind, value = call.inbox.get(timeout=STATS_SECONDS)
                if kind == "done":
                    link.last_beat = value
            except Empty:
                pass                                        # the heartbeat's age tells the same
            finally:
                call.drop()
        beat = self.beat()
        return {**beat.counters, "state": beat.state, "reason": beat.reason, "running": beat.running,
                "waiting": beat.waiting, "memory": beat.rss, "step_age": beat.step_age}

    @staticmethod
    def _rss(link: Link | None) -> int:
        if link is None or not link.alive:
            return 0
        try:
            return psutil.Process(link.pid).memory_info().rss
        except psutil.Error:                                # it ended between the two lines
            return 0

    # ------------------------------------------------------------------------------------------ birth and death
    def _start(self, progress: ProgressFn, cancel: Cancel) -> Link:
        with self._lock:
            if self._closing:
                raise EngineStopping("The server is shutting down.")
            if self._link is None or not self._link.alive:
                self._link, self._death = Link(self._settings, self._died, lambda: self.on_change(),
                                                   lambda counters: self.on_beat(counters)), None
            link = self._link
        if not link.ready:
            progress(Progress("start", note="starting the engine process"))
            link.wait_ready(START_SECONDS, cancel)
        return link

    def _died(self, link: Link, death: GainzError) -> None:
        with self._lock:
            if self._link is link:
                self._link, self._death = None, death

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Around everything after which the process may be of no more use: without models or loads it ends."""
        with self._lock:
            self._pending += 1
        try:
            yield
        finally:
            with self._lock:
                self._pending -= 1
                link = None
                if not self._pending and not any(map(self.has, self._models.values())):
                    link, self._link = self._link, None
                    if not self._models:
                        self._death = None
            if link is not None:
                link.stop()

    def kill(self) -> None:
        """End a stuck process at once. Its answers end with EngineDied; its models come back when they are asked for."""
        if (link := self._link) is not None:
            link.kill()

    def close(self, drain_seconds: float = 0) -> None:
        """Refuse new work, let answers end for so long, cancel the rest, end the process: within a second more. A second call
        waits for the first."""
        self._closing = True
        with self._ending:
            self._until_answered(drain_seconds)
            for call in list(self._answers):
                call.cancel()
            self._until_answered(CANCEL_SECONDS)
            self._answers.clear()
            with self._lock:
                link, self._link = self._link, None
                self._models.clear()
            if link is not None:
                link.stop(STOP_SECONDS)

    def _until_answered(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._answers and time.monotonic() < deadline:
            time.sleep(0.02)
