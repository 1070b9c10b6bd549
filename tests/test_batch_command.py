"""`python app.py batch` as a person runs it: a real engine, a tiny real model; run again it does nothing twice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.test_app import FIXTURE, ROOT
from tests.test_batch import lines, rows, task


def run(folder: Path, *arguments) -> subprocess.CompletedProcess:
    settings = [f"--{name}={folder / name}" for name in ("models", "outputs", "logs")]
    return subprocess.run([sys.executable, "app.py", "batch", *map(str, arguments), *settings], cwd=ROOT, capture_output=True, text=True, timeout=150,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_ba_05_a_batch_on_the_command_line(tmp_path):
    for name in ("models", "outputs", "logs"):
        (tmp_path / name).mkdir()
    shutil.copytree(FIXTURE, tmp_path / "models" / "tiny")
    source = tmp_path / "tasks.jsonl"
    source.write_bytes(lines(*(task(i, ignore_eos=True, seed=i, temperature=1.0) for i in range(12)), task(99, max_tokens=100_000)))
    first = run(tmp_path, source, "--model", "tiny", "--streams", 4)
    told, output = json.loads(first.stdout), tmp_path / "outputs" / "batch" / "tasks.results.jsonl"
    assert first.returncode == 1 and (told["done"], told["failed"], told["state"], told["resumed"]) == (13, 1, "done", 0), first.stderr
    by_id = {row["task_id"]: row for row in rows(output)}
    assert len(by_id) == 13 and by_id["t99"]["error"]["code"] == "context_too_long" and by_id["t3"]["usage"]["completion_tokens"] == 2
    assert Path(told["failures"]).read_bytes() == lines(task(99, max_tokens=100_000))
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:5])[:-9])         # as a kill may leave it
    again = run(tmp_path, source, "--model", "tiny", "--streams", 2)
    assert json.loads(again.stdout)["resumed"] == 4, again.stderr
    found = {row["task_id"]: row for row in rows(output)}
    assert {name: row["output"] for name, row in found.items()} == {name: row["output"] for name, row in by_id.items()}
    same = run(tmp_path, source, "--model", "tiny", "--output", source)
    assert same.returncode == 2 and "file of the tasks" in same.stderr and len(rows(source)) == 13
