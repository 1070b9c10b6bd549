"""One life of the engine process, seen from the front: the child, the pipe to it, and who waits for which answer.

Knows how a process dies and what that means for those who wait. Refuses to know models, options or how often it is started
again: that is the host's. Nothing here imports torch.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import pickle
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from backends.base import Cancel, EngineDied, EngineStopping, GainzError, ProgressFn

if TYPE_CHECKING:  # the child's own module: light, but the front needs only its values
    from backends.engine.worker import Beat, WorkerSettings

log = logging.getLogger(__name__)
KILLED, ILLEGAL = -9, -4


def _child(connection: Connection, settings: WorkerSettings) -> None:
    from backends.engine.worker import main
    main(connection, settings)


class Call:
    """One command on its way and what comes back for it, in order: ("progress" | "done" | "fail" | "events", value)."""

    __slots__ = ("id", "inbox", "_link")

    def __init__(self, link: Link, number: int) -> None:
        self.id, self._link, self.inbox = number, link, SimpleQueue()

    def result(self, progress: ProgressFn | None = None) -> Any:
        """Wait for the value; raises what the command raised, or EngineDied."""
        try:
            while True:
                kind, value = self.inbox.get()
                if kind == "done":
                    return value
                if kind == "fail":
                    raise value
                if progress is not None:
                    progress(value)
        finally:
            self.drop()

    def cancel(self) -> None:
        """Ask for an early end; what is waited for still comes."""
        self._link.post("cancel", self.id)

    def drop(self) -> None:
        """Nobody waits for this any more."""
        self._link.calls.pop(self.id, None)


class Link:
    """When the child ends without having been told to, ``on_death`` is called from the reader's thread before those who
    wait hear of it, and ``told`` after. ``beaten`` hears the counters of every heartbeat there."""

    def __init__(self, settings: WorkerSettings, on_death: Callable[[Link, GainzError], None],
                 told: Callable[[], None], beaten: Callable[[Any], None] = lambda counters: None) -> None:
        context = multiprocessing.get_context("spawn")      # never fork: threads and CUDA do not survive it
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_child, args=(theirs, settings), name="gainz-engine", daemon=True)
        self.process.start()
        theirs.close()                                      # else the pipe would not end with the child
        self.calls: dict[int, Call] = {}
        self.death: GainzError | None = None                # why no further call is possible
        self.last_beat: Beat | None = None
        self.heard = time.monotonic()
        self._on_death, self._told, self._beaten = on_death, told, beaten
        self._stopping = False
        self._crash: GainzError | None = None               # the child's own last words
        self._hello, self._over = threading.Event(), threading.Event()
        self._numbers, self._lock = itertools.count(1), threading.Lock()
        threading.Thread(target=self._read, name="engine-reader", daemon=True).start()

    @property
    def alive(self) -> bool:
        return self.death is None and not self._stopping

    @property
    def ready(self) -> bool:
        return self.alive and self._hello.is_set()

    @property
    def pid(self) -> int | None:
        return self.process.pid

    # ------------------------------------------------------------------------------------------ towards the child
    def call(self, verb: str, *arguments: Any) -> Call:
        call = Call(self, next(self._numbers))
        self.calls[call.id] = call
        if self.death is not None:                          # looked at after registering: one of the two sides sees it
            call.drop()
            raise self.death
        self._send(verb, call.id, *arguments)
        return call

    def post(self, verb: str, number: int = 0) -> None:
        """A command without an answer; to a dead child it goes nowhere, since its death has already been told."""
        if self.death is None:
            self._send(verb, number)

    def _send(self, *message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            try:
                self.connection.send_bytes(data)
            except OSError:                                 # the reader finds the end of the pipe and tells all who wait
                return

    def wait_ready(self, seconds: float, cancel: Cancel) -> None:
        """Until the child has said hello. EngineDied if it cannot, or not within ``seconds``; Cancelled."""
        deadline = time.monotonic() + seconds
        while not self._hello.wait(0.05):
            cancel.raise_if_set("The start of the engine")
            if self.death is not None:
                raise self.death
            if time.monotonic() > deadline:
                self.kill()
                raise EngineDied("The engine process did not start in time.", seconds=seconds)
        if self.death is not None:
            raise self.death

    def stop(self, seconds: float = 5.0) -> None:
        """End the child in good order, then by force. Those who still wait get EngineStopping."""
        self._stopping = True
        self.post("stop")
        if not self._hello.is_set() or not self._over.wait(seconds):    # before hello nobody there listens
            self.kill()
            self._over.wait(seconds)

    def kill(self) -> None:
        self.process.kill()

    # ------------------------------------------------------------------------------------------ from the child
    def _read(self) -> None:
        try:
            while True:
                self._take(pickle.loads(self.connection.recv_bytes()))
        except (EOFError, OSError):
            self._mourn()
        except Exception as error:  # noqa: BLE001  a message that cannot be read: those who wait must not wait for ever
            log.exception("a message of the engine cannot be read")
            self._crash = EngineDied("A message of the engine cannot be read.", reason=f"{type(error).__name__}: {error}")
            self.kill()
            self._mourn()

    def _take(self, message: tuple) -> None:
        kind, *rest = message
        self.heard = time.monotonic()
        if kind == "events":
            for number, events in rest[0]:
                if (call := self.calls.get(number)) is not None:
                    call.inbox.put((kind, events))
        elif kind == "beat":
            self.last_beat = rest[0]
            self._beaten(rest[0].counters)
        elif kind == "hello":
            self._hello.set()
        elif kind == "crash":
            self._crash = rest[0]
        elif (call := self.calls.get(rest[0])) is not None:
            call.inbox.put((kind, rest[1]))

    def _mourn(self) -> None:
        self.process.join(5.0)
        if self.process.exitcode is None:                   # it closed the pipe and lives on: of no use to anybody
            self.process.kill()
            self.process.join(5.0)
        stopped = EngineStopping("The engine was stopped.")
        self.death = stopped if self._stopping else died(self.process.exitcode, self._crash)
        if not self._stopping:
            self._on_death(self, self.death)                # first, so that whoever is told sees the host as dead
        for call in list(self.calls.values()):
            call.inbox.put(("fail", self.death))
        self.connection.close()
        self._over.set()
        self._hello.set()
        if not self._stopping:
            self._told()


def died(exitcode: int | None, crash: GainzError | None) -> GainzError:
    """What an exit code tells. A child that could not even start for want of a package says that itself."""
    if crash is not None and crash.code == "missing_requirement":
        return crash
    evidence: dict[str, Any] = {"exit_code": exitcode}
    if exitcode is not None and exitcode < 0:
        evidence["signal"] = _signal_name(-exitcode)
    if crash is not None:
        evidence["reason"] = str(crash)
    cause = "The engine process ended while it worked"
    if exitcode == KILLED:
        return EngineDied(f"{cause}: it was killed, most likely because the system ran out of memory.", **evidence)
    if exitcode == ILLEGAL:
        return EngineDied(f"{cause}: this processor lacks an instruction that a kernel used.",
                          remedy="Load the model with the kernels “ref” or “aten”.", **evidence)
    return EngineDied(f"{cause}; logs/engine.log and logs/engine-crash.log say more.", **evidence)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
