"""Run a file of tasks through a model; started again, it goes on where it stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

from backends.base import Cancel, GainzError, Progress, ProgressFn
from gainz_ui.longwork import failed, watched
from gainz_ui.settings import Settings
from gainz_ui.terminal import say, show_json

NAME, HELP, ORDER = "batch", "run a file of tasks through a model, and go on where it stopped", 48
SETTINGS = ("models", "outputs", "logs", "log_content")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tasks", type=Path, help='JSON lines: {"task_id": "1", "prompt": "…", "max_tokens": 64}, or OpenAI batch lines')
    parser.add_argument("--model", required=True, metavar="NAME", help="a model under models/")
    parser.add_argument("--output", type=Path, metavar="FILE", help="results, JSON lines (default: outputs/batch/TASKS.results.jsonl)")
    parser.add_argument("--time-limit", type=float, metavar="S", help="seconds a task may take, where it does not say itself")
    parser.add_argument("--attempts", type=int, default=3, metavar="N", help="how often a task that fails is tried (default: 3)")
    parser.add_argument("--context", type=int, default=0, metavar="TOKENS", help="context of the model (default: as much as fits)")
    parser.add_argument("--streams", type=int, default=8, metavar="N", help="tasks at once (default: 8)")
    parser.add_argument("--skip-bad", action="store_true", help="leave lines that cannot be run out, and say which")
    parser.add_argument("--json", action="store_true", help="progress as JSON lines on stderr")


def run(settings: Settings, given: argparse.Namespace) -> int:
    with watched(given.json) as (progress, cancel):
        try:
            return _run(settings, given, progress, cancel)
        except GainzError as error:
            return failed(error, given.json)


def _run(settings: Settings, given: argparse.Namespace, progress: ProgressFn, cancel: Cancel) -> int:
    from gainz_ui.services import batch, batch_tasks
    from gainz_ui.services.studio import Studio
    found = batch_tasks.read(given.tasks, given.model)
    for problem in found.problems if given.skip_bad else ():
        say(f"Left out: {problem}")
    tasks = found.tasks if given.skip_bad else found.sound()
    output = given.output or _default(settings, given.tasks)
    plan = batch.Plan(tasks, given.tasks, output, given.model, given.time_limit, given.attempts)
    studio = Studio(settings)
    try:
        options = {"streams": given.streams} | ({"context": given.context} if studio.entry(given.model).local else {})
        studio.load(given.model, options, progress, cancel)
        running = batch.Batch(studio, plan)
        if running.resumed:
            say(f"Going on: {running.resumed} of {len(tasks)} tasks are done.")
        end = batch.follow(running.start(), lambda now: progress(_progress(now)), cancel)
        show_json(batch.describe(running))
    finally:
        studio.close()
    if end.error is not None:
        raise end.error
    return 0 if end.state == "done" and not end.failed else 1


def _default(settings: Settings, tasks: Path) -> Path:
    folder = settings.outputs / "batch"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{tasks.stem}.results.jsonl"


def _progress(now) -> Progress:
    speed = f"{now.tokens_per_second:.0f} tok/s" if now.tokens_per_second else ""
    left = f", {now.seconds_left:.0f} s left" if now.seconds_left else ""
    return Progress("batch", now.done, now.total, f"{now.done} of {now.total}, {now.failed} failed {speed}{left}".strip())
