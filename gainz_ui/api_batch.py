"""The public name /batch of Gradio's client: tasks as a list, standing as it goes, rows at the end. `api_names` registers it.

The tasks are kept beside the results in outputs/batch/ (`services.batch.begin`).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr

from backends.base import InvalidRequest
from gainz_ui.api_work import BEAT_SECONDS
from gainz_ui.page import asker
from gainz_ui.services import batch as batches


def function(studio: Any, spoken: Callable[[Callable[[], Any]], Any]) -> Callable[..., Iterator[dict]]:
    """``spoken``: turns a typed error into one that the client hears."""
    def batch(tasks: list[dict], model: str, name: str | None = None, attempts: int = 3, time_limit: float | None = None,
              who: gr.Request | None = None) -> dict:
        """Run many tasks ({"task_id", "prompt" or "messages", sampling fields …}, or OpenAI batch lines) through a loaded model. Yields
        done, failed, total, rate and seconds_left; at last also the rows. Leaving stops it; the same tasks under the same `name` go on."""
        running = spoken(lambda: begin(studio, tasks, model, name, attempts, time_limit, asker(who)))
        try:
            yield batches.describe(running)         # at once: only a call that has answered can be cancelled
            while not running.wait(BEAT_SECONDS):
                yield batches.describe(running)
            yield {**batches.describe(running), "rows": rows(running)}
        finally:
            running.cancel.set()

    return batch


def begin(studio: Any, tasks: Any, model: str, name: str | None, attempts: Any, time_limit: float | None, key: str = "") -> batches.Batch:
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise InvalidRequest('tasks is a list of objects, each with "task_id" and "prompt" or "messages".', field="tasks")
    data = b"".join(json.dumps(task).encode() + b"\n" for task in tasks)
    whole = int(attempts) if isinstance(attempts, float) and attempts.is_integer() else attempts
    name = name or f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    return batches.begin(studio, data, model, name, attempts=whole, time_limit=time_limit, key=key)


def rows(running: batches.Batch) -> list[dict[str, Any]]:
    """In the order of the tasks."""
    made = {row["task_id"]: row for row in map(json.loads, running.plan.output.read_bytes().split(b"\n")[:-1])}
    return [made[task.id] for task in running.plan.tasks if task.id in made]
