"""What a person at a terminal sees: progress and errors on stderr, results on stdout.

A terminal gets one line that changes; a file or a pipe gets a line for each stage and each tenth of it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from backends.base import GainzError, Progress
from gainz_ui.units import size

BYTES = {"fetch", "unpack", "import", "verify"}     # stages counted in bytes
PAUSE = 0.1                                         # seconds between two changes of a terminal's line


class Bar:
    """A `ProgressFn`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self._seen: tuple[str, int] = ("", -1)
        self._last, self._open = 0.0, False

    def __call__(self, progress: Progress) -> None:
        if self.live:
            self._change(progress)
        else:
            self._append(progress)

    def _change(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.stage == self._seen[0] and now - self._last < PAUSE and progress.done < progress.total:
            return
        if self._open and progress.stage != self._seen[0]:
            self.stream.write("\n")
        self._seen, self._last, self._open = (progress.stage, 0), now, True
        self.stream.write("\r\033[K" + describe(progress))
        self.stream.flush()

    def _append(self, progress: Progress) -> None:
        tenth = int(10 * progress.done / progress.total) if progress.total else 0
        if (progress.stage, tenth) != self._seen:
            self._seen = (progress.stage, tenth)
            print(describe(progress), file=self.stream, flush=True)

    def end(self) -> None:
        if self._open:
            self.stream.write("\n")
            self._open = False


def describe(progress: Progress) -> str:
    note = f" {progress.note}" if progress.note else ""
    if not progress.total:
        return f"{progress.stage} …{note}"
    share = f"{100 * progress.done / progress.total:3.0f} %"
    if progress.stage in BYTES:
        return f"{progress.stage} {share}  {size(progress.done)} of {size(progress.total)}{note}"
    return f"{progress.stage} {share}{note}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def complain(error: GainzError) -> None:
    """One line: what, and what to do."""
    say("Error: " + " ".join(str(error).split()))


def show_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=2, default=str))


def show_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    lines = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
