"""One peer as a resident process: a question down its stdin, an answer up its stdout, each one line of JSON.

A worker that is not asked is stopped by signal, with all its children: no library's spinning threads can slow another's run.
Knows processes and pipes; knows nothing of what is asked.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path

import psutil

WORKERS = Path(__file__).with_name("workers")


class WorkerFailed(Exception):
    """A peer that cannot do what it was asked: the rest of the session goes on without it."""


class Worker:
    """``python`` runs workers/``peer``_worker.py; its stderr goes to ``log``. ``versions`` is its own answer."""

    def __init__(self, peer: str, python: Path, log: Path, threads: int, timeout: float = 600) -> None:
        self.peer, self.timeout, self.log = peer, timeout, log
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
                                    "PYTHONUNBUFFERED": "1"}
        environment.pop("PYTHONPATH", None)
        with log.open("w") as stderr:
            self._process = subprocess.Popen([str(python), str(WORKERS / f"{peer}_worker.py")], stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE, stderr=stderr, start_new_session=True, env=environment)
        self._stopped = False
        self._buffer = b""
        self.versions = self._answer()["versions"]
        self._freeze()

    def ask(self, do: str, **values) -> dict:
        """The answer, with ``disturbed``: the share of the machine that others used meanwhile. Raises WorkerFailed."""
        self._thaw()
        own, began = self._spent(), busy()
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")
            self._process.stdin.flush()
            found = self._answer()
        except BrokenPipeError as error:
            raise WorkerFailed(self._died()) from error
        ended = busy()
        own = self._spent() - own
        self._freeze()
        if "error" in found:
            raise WorkerFailed(found["error"])
        everybody, clock = ended[0] - began[0], ended[1] - began[1]
        return found | {"disturbed": max(0.0, (everybody - own) / (clock * psutil.cpu_count()))}

    def close(self) -> None:
        self._thaw()
        self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            pass
        self._signal(signal.SIGKILL)                       # children that outlive it, too
        self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> dict:
        until = time.monotonic() + self.timeout
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise WorkerFailed(f"no answer within {self.timeout:.0f} s")
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            if not part:
                raise WorkerFailed(self._died())
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _died(self) -> str:
        code = self._process.wait()
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        return f"ended with {code}: {last[0][:300]}"

    def _freeze(self) -> None:
        self._signal(signal.SIGSTOP)
        self._stopped = True

    def _thaw(self) -> None:
        if self._stopped:
            self._signal(signal.SIGCONT)
            self._stopped = False

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass                                           # gone already: the next question says so

    def _spent(self) -> float:
        """CPU seconds of this worker and its children."""
        own = 0.0
        try:
            process = psutil.Process(self._process.pid)
            for one in (process, *process.children(recursive=True)):
                spent = one.cpu_times()
                own += spent.user + spent.system
        except psutil.NoSuchProcess:
            pass
        return own


def busy() -> tuple[float, float]:
    """CPU seconds of everybody, and the clock."""
    times = psutil.cpu_times()
    return (times.user + times.nice + times.system + getattr(times, "irq", 0) + getattr(times, "softirq", 0),
            time.monotonic())
