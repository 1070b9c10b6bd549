"""Long work as a child process of our own command line: progress as JSON lines, cancel as a signal, the result on stdout.

A crash or a kill for memory ends the child and nothing else, and its memory comes back. One job at a time: two would take
the processor from each other, and a benchmark (`turn`) must not be measured beside one. Knows commands and their output;
what a command does, it does not know.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from backends.base import Cancel, GainzError, JobDied, OutOfMemory, Progress, ProgressFn
from backends.memory import machine_memory

log = logging.getLogger(__name__)
PROGRAM = (sys.executable, str(Path(__file__).parents[2] / "app.py"))
CHILD = "_GAINZ_JOB"                    # tells the child that the end of its stdin is the end of us
GRACE = 30.0                            # seconds a cancelled job gets to clean up: as long as a big layer takes
LOOK = 0.25                             # seconds between two looks at a flag


class Jobs:
    """The jobs of one installation. ``models``: the folder that they work in."""

    def __init__(self, models: Path, program: Sequence[str] = PROGRAM, grace: float = GRACE) -> None:
        self.models, self.program, self.grace = models, tuple(program), grace
        self._turn = threading.Lock()

    @contextmanager
    def turn(self, progress: ProgressFn, cancel: Cancel) -> Iterator[None]:
        """Alone among jobs and benchmarks for this block; waits, and says so, while another one runs."""
        while not self._turn.acquire(timeout=LOOK):
            progress(Progress("wait", note="another job is running"))
            cancel.raise_if_set("The job")
        try:
            yield
        finally:
            self._turn.release()

    def run(self, command: str, arguments: Sequence[str], progress: ProgressFn, cancel: Cancel,
            need: int = 0) -> dict[str, Any]:
        """The command's result. OutOfMemory before it starts where ``need`` bytes are not free; JobDied where it ends
        without a result; else the error that it reports itself."""
        with self.turn(progress, cancel):
            check_memory(need)
            cancel.raise_if_set("The job")
            whole = [*self.program, command, *arguments, "--models", str(self.models), "--json"]
            return _Child(whole, self.grace).follow(progress, cancel)


def check_memory(need: int) -> None:
    free = machine_memory()[1]
    if need > free:
        raise OutOfMemory("This job needs more memory than is free.", need_bytes=need, free_bytes=free,
                          remedy="Unload models first, or start from a smaller model.")


class _Child:
    """One child, its three pipes and its end."""

    def __init__(self, command: Sequence[str], grace: float) -> None:
        self.name, self.grace = command[2] if len(command) > 2 else command[0], grace
        self.words: deque[str] = deque(maxlen=12)
        self.error: GainzError | None = None
        self._out: list[str] = []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True, encoding="utf-8", errors="replace",
                                        env={**os.environ, CHILD: "1", "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"})

    def follow(self, progress: ProgressFn, cancel: Cancel) -> dict[str, Any]:
        reader = threading.Thread(target=self._collect, args=(self.process.stdout,), name="job output", daemon=True)
        reader.start()
        cancel.on_set(lambda: threading.Thread(target=self._stop, name="job stop", daemon=True).start())
        try:
            for line in self.process.stderr:
                self._take(line, progress)
            code = self.process.wait()
            reader.join()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                pipe.close()
        return self._outcome(code, cancel)

    def _outcome(self, code: int, cancel: Cancel) -> dict[str, Any]:
        if code == 0:                   # done, even if somebody cancelled in the last moment
            try:
                return json.loads("".join(self._out))
            except ValueError as error:
                raise JobDied("The job's result cannot be read.", job=self.name, reason=error) from error
        cancel.raise_if_set("The job")
        if self.error is not None:
            raise self.error
        log.error("job %s ended with code %s: %s", self.name, code, " | ".join(self.words))
        raise JobDied("The job's process ended without a result.", job=self.name, code=code,
                      last_words=self.words[-1] if self.words else "")

    def _collect(self, pipe: IO[str]) -> None:
        self._out.extend(pipe)

    def _take(self, line: str, progress: ProgressFn) -> None:
        """One line of stderr: ours is a JSON object, anything else comes from a library and is kept for the log."""
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if isinstance(said, dict) and "progress" in said:
            progress(Progress(**said["progress"]))
        elif isinstance(said, dict) and "error" in said:
            self.error = GainzError.from_dict(said["error"])
        elif line.strip():
            self.words.append(line.strip()[:500])

    def _stop(self) -> None:
        """Ask; after the grace time, end it. On Windows a signal would end it at once, so there it hears its stdin close."""
        if os.name == "posix":
            self.process.terminate()
        else:
            self.process.stdin.close()
        try:
            self.process.wait(self.grace)
        except subprocess.TimeoutExpired:
            self.process.kill()
