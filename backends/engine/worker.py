"""The engine process: reads commands from a pipe, drives one engine, sends events back, one message a step.

Three kinds of thread. The main thread runs the engine's loop and nothing else. The mailbox reads the pipe, so that a cancel
or a question about health never waits for a computation. Loads and unloads have a thread each, since they take long.
Refuses to know what a model or a page is. It lives as long as its pipe: when the front dies, even by kill -9, it ends.

Commands (front → here):  (verb, id, *arguments)
    load name path backend options revision · check name path backend options · unload name · generate name request
    tokenize name prompt special · detokenize name ids · difference target draft
    embed name prompts · stats · cancel · stop
Messages (here → front):  ("hello", pid) · ("beat", Beat) · ("progress", id, Progress) · ("done", id, value)
    ("fail", id, GainzError) · ("events", [(id, (Event, …)), …]) · ("crash", GainzError)
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from backends.base import (
    Cancel, Event, InvalidRequest, Model, ModelDir, ModelNotLoaded, Progress, Request, make_options)
from backends.engine import process as system
from backends.registry import Registry

log = logging.getLogger(__name__)
BEAT_SECONDS = 0.5
UNLOAD_SECONDS = 10.0                   # running answers of a model get so long to notice that they are cancelled
CRASHED = 70                            # exit code after the loop itself raised (EX_SOFTWARE)


@dataclass(frozen=True)
class Beat:
    """A sign of life. ``step_age``: seconds since the last step while there is work, else None."""

    step_age: float | None = None
    counters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerSettings:
    """What the front tells its child at birth; plain values, so that any start method can carry them."""

    logs: str | None = None
    package: str = "backends"                               # where the registry looks
    engine: str = "backends.engine.loop:Engine"             # module:class of the loop
    engine_options: tuple[tuple[str, Any], ...] = ()


class Outbox:
    """The way out. Events gather until the step ends; everything else goes at once, after the events before it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._events: dict[int, list[Event]] = {}

    def event(self, call: int, event: Event) -> None:
        with self._lock:
            self._events.setdefault(call, []).append(event)

    def flush(self) -> None:
        if self._events:
            with self._lock:
                self._send_events()

    def send(self, *message: Any) -> None:
        with self._lock:
            self._send_events()
            self._write(message)

    def _send_events(self) -> None:
        if self._events:
            batch, self._events = [(call, tuple(events)) for call, events in self._events.items()], {}
            self._write(("events", batch))

    def _write(self, message: Any) -> None:
        self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


class Worker:
    def __init__(self, connection: Connection, engine: Any, registry: Registry) -> None:
        self.connection, self.engine, self.registry = connection, engine, registry
        self.outbox = Outbox(connection)
        self.models: dict[str, Model] = {}
        self.cancels: dict[int, Cancel] = {}                # by call: loads and answers
        self.answers: dict[int, str] = {}                   # running answers, with the model's name
        self.wake, self.stopping = threading.Event(), threading.Event()
        self.stepped = time.monotonic()
        self.loading = threading.Lock()                     # one load at a time: they share the disk and the memory
        self.desk = ThreadPoolExecutor(1, "desk")           # tokenizing, in order of arrival

    # ------------------------------------------------------------------------------------------ the loop
    def run(self) -> None:
        """Until told to stop. What the engine's step raises is a fault of the loop itself and ends the process, visibly."""
        while not self.stopping.is_set():
            busy = self.engine.step()
            self.stepped = time.monotonic()
            self.outbox.flush()
            if not busy:
                self.wake.wait(BEAT_SECONDS)
                self.wake.clear()

    def beat(self) -> Beat:
        age = time.monotonic() - self.stepped if self.answers else None
        return Beat(age, dict(self.engine.stats()))

    # ------------------------------------------------------------------------------------------ the mailbox
    def read(self) -> None:
        """The mailbox thread. A pipe that closes means that the front is gone: nobody is left to work for."""
        due = 0.0
        try:
            while not self.stopping.is_set():
                if self.connection.poll(BEAT_SECONDS):
                    self.take(*self.connection.recv())
                if time.monotonic() >= due:
                    self.outbox.send("beat", self.beat())
                    due = time.monotonic() + BEAT_SECONDS
        except (EOFError, OSError):
            os._exit(0)                                     # at once, whatever native code the loop is in
        except Exception as error:  # noqa: BLE001  a mailbox that is deaf would leave a process that nobody can reach
            crash(self.outbox, error)

    def take(self, verb: str, call: int, *arguments: Any) -> None:
        getattr(self, "do_" + verb)(call, *arguments)

    def attempt(self, call: int, doing: str, work: Callable[[], Any]) -> None:
        """Run a command and answer with its value or its error: the one place where any exception becomes a message."""
        try:
            value = work()
        except Exception as error:  # noqa: BLE001  the border of the process: logged and sent on, typed
            if (known := system.typed(error, doing)) is not error:
                log.exception("unforeseen while %s", doing)
            self.outbox.send("fail", call, known)
        else:
            self.outbox.send("done", call, value)

    def apart(self, call: int, doing: str, work: Callable[[], Any]) -> None:
        threading.Thread(target=self.attempt, args=(call, doing, work), name=doing, daemon=True).start()

    # ------------------------------------------------------------------------------------------ commands
    def do_stop(self, call: int) -> None:
        self.stopping.set()
        self.wake.set()

    def do_cancel(self, call: int) -> None:
        if (cancel := self.cancels.get(call)) is not None:
            cancel.set()
            self.wake.set()

    def do_stats(self, call: int) -> None:
        self.attempt(call, "counting", self.beat)

    def do_tokenize(self, call: int, name: str, prompt: Any, special: bool) -> None:
        self.desk.submit(self.attempt, call, "tokenizing", lambda: self.model(name).tokenize(prompt, special=special))

    def do_detokenize(self, call: int, name: str, ids: tuple[int, ...]) -> None:
        self.desk.submit(self.attempt, call, "detokenizing", lambda: self.model(name).detokenize(ids))

    def do_embed(self, call: int, name: str, prompts: tuple) -> None:
        self.cancels[call] = Cancel()
        self.apart(call, "embedding", lambda: self.embed(call, name, prompts))

    def do_difference(self, call: int, target: str, draft: str) -> None:
        self.desk.submit(self.attempt, call, "comparing vocabularies",
                         lambda: self.engine.difference(self.model(target), self.model(draft)))

    def do_load(self, call: int, *arguments: Any) -> None:
        self.cancels[call] = cancel = Cancel()
        self.apart(call, f"loading {arguments[0]}", lambda: self.load(call, cancel, *arguments))

    def do_check(self, call: int, *arguments: Any) -> None:
        self.apart(call, f"checking options for {arguments[0]}", lambda: self.check(*arguments))

    def do_unload(self, call: int, name: str) -> None:
        self.apart(call, f"unloading {name}", lambda: self.unload(name))

    def do_generate(self, call: int, name: str, request: Request) -> None:
        self.cancels[call], self.answers[call] = Cancel(), name    # before tokenizing, so that a cancel finds it
        self.desk.submit(self.attempt, call, "starting an answer", lambda: self.generate(call, name, request))

    # ------------------------------------------------------------------------------------------ what they do
    def model(self, name: str) -> Model:
        found = self.models.get(name)
        if found is None:
            raise ModelNotLoaded(f"{name!r} is not loaded.", field="model", loaded=", ".join(self.models) or "none")
        return found

    def generate(self, call: int, name: str, request: Request) -> None:
        def sink(event: Event) -> None:
            self.outbox.event(call, event)
            if event.last:
                self.forget(call)

        try:
            self.engine.submit(self.model(name), request, self.cancels[call], sink)
        except BaseException:
            self.forget(call)
            raise
        self.wake.set()

    def embed(self, call: int, name: str, prompts: tuple) -> Any:
        try:
            job = self.engine.embed(self.model(name), prompts, self.cancels[call])
            self.wake.set()
            return job.result()
        finally:
            self.cancels.pop(call, None)

    def forget(self, call: int) -> None:
        self.cancels.pop(call, None)
        self.answers.pop(call, None)

    def check(self, name: str, path: str, backend: str, options: dict) -> None:
        model = ModelDir.of(path, name)
        chosen = self.registry.pick(model, backend)
        choices = make_options(chosen.options, options)
        if chosen.check is not None:
            with self.loading:                              # threads and libraries are set up by one at a time
                chosen.check(model, choices)

    def load(self, call: int, cancel: Cancel, name: str, path: str, backend: str, options: dict,
             revision: str | None) -> Any:
        def progress(seen: Progress) -> None:
            self.outbox.send("progress", call, seen)

        try:
            while not self.loading.acquire(timeout=0.1):
                cancel.raise_if_set(f"Loading {name}")
            try:
                return self.load_alone(cancel, progress, name, path, backend, options, revision)
            finally:
                self.loading.release()
        finally:
            self.cancels.pop(call, None)

    def load_alone(self, cancel, progress, name: str, path: str, backend: str, options: dict, revision: str | None) -> Any:
        if name in self.models:
            raise InvalidRequest(f"{name!r} is loaded already.", field="model")
        chosen = self.registry.pick(ModelDir.of(path, name), backend)
        choices = make_options(chosen.options, options)
        began = time.monotonic()
        try:
            with system.peak_growth() as peak:
                model = chosen.load(ModelDir.of(path, name), choices, progress, cancel)
            self.engine.attach(model)
        except BaseException:
            system.give_memory_back()                       # half a model must not stay until somebody needs the room
            raise
        self.models[name] = model
        given = tuple((item.name, getattr(choices, item.name)) for item in fields(choices))
        return replace(model.info, name=name, revision=revision or model.info.revision, options=given,
                       peak_bytes=model.info.peak_bytes or peak[0],
                       load_seconds=model.info.load_seconds or time.monotonic() - began)

    def unload(self, name: str) -> bool:
        """True when the model is really gone: nothing refers to it any more."""
        model = self.model(name)
        del self.models[name]
        for call in [call for call, owner in list(self.answers.items()) if owner == name]:
            self.do_cancel(call)
        deadline = time.monotonic() + UNLOAD_SECONDS
        while name in list(self.answers.values()) and time.monotonic() < deadline:
            time.sleep(0.005)
        self.outbox.send("beat", self.beat())               # its last counts: with it they go
        self.engine.detach(model)
        model.close()
        gone = weakref.ref(model)
        del model
        system.give_memory_back()
        if gone() is not None:
            log.warning("%s was unloaded, but %d objects still refer to it", name, len(gc.get_referrers(gone())))
        return gone() is None


def crash(outbox: Outbox, error: Exception) -> None:
    """End this process because the loop or the mailbox itself failed: say why, log it, and let the front start another."""
    log.error("the engine ends", exc_info=error)
    outbox.send("crash", system.typed(error, "running the engine"))
    os._exit(CRASHED)


def main(connection: Connection, settings: WorkerSettings) -> None:
    """The child's entry: say hello when the engine is importable, then work until told to stop."""
    logs = Path(settings.logs) if settings.logs else None
    system.settle(logs)
    outbox = Outbox(connection)
    try:
        module, _, name = settings.engine.partition(":")
        engine = getattr(importlib.import_module(module), name)(**dict(settings.engine_options))
        worker = Worker(connection, engine, Registry.scan(settings.package))
        system.bound_threads()
        outbox.send("hello", os.getpid())
        threading.Thread(target=worker.read, name="mailbox", daemon=True).start()
        worker.run()
    except Exception as error:  # noqa: BLE001  the loop's own fault: it ends this process, and says why
        crash(outbox, error)
    os._exit(0)                                             # threads in native code are not worth waiting for
