"""How a public name of Gradio's client runs a job and tells of it. `api_names`, `api_variants` and `api_bench` call it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gainz_ui.services.tasks import Task

BEAT_SECONDS = 0.25         # a generator that yields nothing cannot be closed: it says the same again


def working(kind: str, subject: str, work: Callable, spoken: Callable, path: str) -> Iterator[dict]:
    """A job of one client's: leaving cancels it. Its result goes out by `plain`. ``spoken``: turns a typed error into one that the client
    hears."""
    task = Task(0, kind, subject)
    threading.Thread(target=task.run, args=(work,), name=f"{kind} {subject}", daemon=True).start()
    try:
        while task.running:
            seen = task.progress
            yield {"stage": seen.stage, "done": seen.done, "total": seen.total, "note": seen.note}
            time.sleep(BEAT_SECONDS)
        yield {"stage": "done", **plain(spoken(task.outcome), path)}
    finally:
        task.cancel.set()


def plain(value: Any, path: str) -> Any:
    """As JSON: paths and other objects as text. A field ``path`` gets this other name, since Gradio's client takes every object with
    a "path" for a file to fetch."""
    if isinstance(value, Mapping):
        return {path if key == "path" else str(key): plain(item, path) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, path) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
