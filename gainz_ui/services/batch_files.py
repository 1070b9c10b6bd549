"""A batch's results on disk: one row a task, appended as it ends, so that a kill at any moment loses at most the row under way.

On opening, a torn last line is cut off (its task is done again) and a whole one that only lacks its end gets it. The failures stand
in a file of their own, as the lines that they were, ready to be run again; it is made anew from the rows on opening. Knows rows and
bytes; nothing of models.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from backends.base import BrokenFile, DiskFull, InvalidRequest, NameTaken
from gainz_ui.services.batch_tasks import unreadable

FAILURES = ".failures.jsonl"


def refuse_same(source: Path, target: Path) -> None:
    """InvalidRequest where the results would be written over the tasks, or the failures over either."""
    for path in (target, failures_of(target)):
        if path.resolve() == source.resolve() or path.exists() and source.exists() and path.samefile(source):
            raise InvalidRequest("The results cannot go into the file of the tasks.", field="output", path=path,
                                 remedy="Choose another file for the results.")


def failures_of(target: Path) -> Path:
    return target.with_name(target.name.removesuffix(".jsonl") + FAILURES)


class Results:
    """Thread-safe. `rows`: task id → status, of what is done. One writer at a time: a second is a NameTaken."""

    def __init__(self, target: Path, tasks: Mapping[str, bytes], model: str) -> None:
        """``tasks``: id → its line. Rows of other tasks or of another model are an InvalidRequest: they belong to another batch."""
        self.path, self.rows = Path(target), {}
        self._tasks, self._write_lock = tasks, threading.Lock()
        self._lock = FileLock(f"{target}.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise NameTaken(f"Another batch is writing {target} now.", field="output", remedy="Wait for it, or choose another file.") from error
        except OSError as error:
            raise DiskFull(f"{target} cannot be written.", reason=error.strerror) from error
        try:
            self._take_up(model)
        except BaseException:
            self._lock.release()
            raise

    def _take_up(self, model: str) -> None:
        whole = _mend(self.path)
        for number, raw in enumerate(whole.split(b"\n")[:-1], 1):
            self._take_row(number, raw, model)
        self._file = open(self.path, "ab", buffering=0)             # noqa: SIM115  stays open while the batch runs
        failed = [self._tasks[name] for name, status in self.rows.items() if status != "ok"]
        self._failures = open(failures_of(self.path), "wb", buffering=0)    # noqa: SIM115
        for raw in failed:
            self._failures.write(raw + b"\n")

    def _take_row(self, number: int, raw: bytes, model: str) -> None:
        try:
            row = json.loads(raw)
            name, status, by = row["task_id"], row["status"], row["model"]
        except (ValueError, KeyError, TypeError) as error:
            raise BrokenFile(f"Line {number} of {self.path} is no result.", remedy="Choose another file for the results.") from error
        if name not in self._tasks or name in self.rows or by != model:
            why = f"made by {by!r}" if by != model else "twice there" if name in self.rows else "none of these tasks"
            raise InvalidRequest(f"{self.path} belongs to another batch: the result of {name!r} is {why}.", field="output", line=number,
                                 remedy="Choose another file for the results.")
        self.rows[name] = status

    def add(self, row: Mapping[str, Any]) -> None:
        """Append one row in one write. DiskFull."""
        data = _line(row)
        with self._write_lock:
            try:
                if row["status"] != "ok":
                    self._failures.write(self._tasks[row["task_id"]] + b"\n")
                _write(self._file, data)
            except OSError as error:
                raise DiskFull(f"{self.path} cannot be written.", reason=error.strerror,
                               remedy="Free some room and start the same batch again: it goes on where it stopped.") from error
            self.rows[row["task_id"]] = row["status"]

    def close(self) -> None:
        with self._write_lock:
            self._file.close()
            self._failures.close()
            if not any(status != "ok" for status in self.rows.values()):
                failures_of(self.path).unlink(missing_ok=True)
            self._lock.release()
            Path(self._lock.lock_file).unlink(missing_ok=True)


def _line(row: Mapping[str, Any]) -> bytes:
    """UTF-8, readable; escaped where a text holds half a surrogate pair, which UTF-8 has no bytes for."""
    try:
        return (json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(row, separators=(",", ":")) + "\n").encode()


def _write(file: Any, data: bytes) -> None:
    while data:
        data = data[file.write(data):]


def _mend(path: Path) -> bytes:
    """The whole rows of a file; what is torn at its end is cut off the disk."""
    if not path.exists():
        return b""
    try:
        data = path.read_bytes()
        place = data.rfind(b"\n") + 1
        tail = data[place:]
        if not tail:
            return data
        if _is_row(tail):
            with open(path, "ab") as file:
                file.write(b"\n")
            return data + b"\n"
        os.truncate(path, place)
        return data[:place]
    except OSError as error:
        raise unreadable(path, error) from error


def _is_row(tail: bytes) -> bool:
    try:
        return isinstance(json.loads(tail.decode()), dict)
    except ValueError:
        return False
