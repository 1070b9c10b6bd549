"""A batch in a process of its own, over a studio without an engine, to be killed: python -m tests.batch_child TASKS OUTPUT."""

from __future__ import annotations

import sys
from pathlib import Path

from gainz_ui.services import batch, batch_tasks
from tests.api_fakes import FakeStudio

if __name__ == "__main__":
    source, output = map(Path, sys.argv[1:])
    studio = FakeStudio()
    studio.pace = 0.001
    made = batch.Batch(studio, batch.Plan(batch_tasks.read(source).sound(), source, output, "tiny"))
    print("ready", flush=True)
    made.start().wait()
