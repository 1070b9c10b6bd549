"""A command that works for minutes: progress as a bar or as JSON lines, a signal that cancels it, exit codes.

With ``--json`` every line on stderr is one JSON object ({"progress": …} or {"error": …}), for the page that runs the
command as its child; the result on stdout is JSON too. Knows nothing of what the work is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from backends.base import Cancel, GainzError, InvalidRequest, Progress, ProgressFn
from gainz_ui.services.jobs import CHILD
from gainz_ui.terminal import Bar, complain

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def lines(progress: Progress) -> None:
    """A `ProgressFn` for a program that reads."""
    print(json.dumps({"progress": asdict(progress)}, ensure_ascii=False), file=sys.stderr, flush=True)


@contextmanager
def watched(as_json: bool) -> Iterator[tuple[ProgressFn, Cancel]]:
    """Progress to stderr, and a flag that Ctrl-C or SIGTERM sets. A second signal ends the process at once."""
    bar, cancel = Bar(), Cancel()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def stop(number: int, frame: Any) -> None:
        for one, handler in before.items():
            signal.signal(one, handler)
        cancel.set()

    for number in SIGNALS:
        signal.signal(number, stop)
    if CHILD in os.environ:
        threading.Thread(target=_until_left, args=(cancel,), name="parent", daemon=True).start()
    try:
        yield (lines if as_json else bar), cancel
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        bar.end()


def _until_left(cancel: Cancel) -> None:
    """Stop when whoever started us goes, whatever way: the end of a pipe is seen on every system."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    cancel.set()


def failed(error: GainzError, as_json: bool) -> int:
    """Say what went wrong; the exit code: 2 where an argument was wrong, else 1."""
    if as_json:
        print(json.dumps({"error": error.to_dict()}, ensure_ascii=False), file=sys.stderr, flush=True)
    else:
        complain(error)
    return 2 if isinstance(error, InvalidRequest) else 1
