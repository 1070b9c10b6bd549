"""Jobs: a real child process each time, driven by small programs that speak as our command line does, and by the command
line itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from backends import memory
from backends.base import Cancel, Cancelled, InvalidRequest, JobDied, ModelNotFound, OutOfMemory, Progress
from gainz_ui.services import jobs as module
from gainz_ui.services.jobs import Jobs

SAY = ("import json, os, signal, sys, time\n"
       "def tell(**what): print(json.dumps(what), file=sys.stderr, flush=True)\n")


def program(tmp_path: Path, body: str, **more) -> Jobs:
    file = tmp_path / "program.py"
    file.write_text(SAY + body)
    return Jobs(tmp_path / "models", (sys.executable, str(file)), **more)


def test_progress_and_result_arrive(tmp_path):
    jobs = program(tmp_path,
                   "tell(progress={'stage': 'work', 'done': 3, 'total': 9, 'note': 'n'})\n"
                    "print('a library speaks', file=sys.stderr)\n"
                             "print(json.dumps({'argv': sys.argv[1:], 'out': '中文'}, ensure_ascii=False))\n")
    seen = []
    found = jobs.run("quantize", ["--model", "x"], seen.append, Cancel())
    assert seen == [Progress("work", 3, 9, "n")]
    assert found == {"argv": ["quantize", "--model", "x", "--models", str(tmp_path / "models"), "--json"], "out": "中文"}


def test_an_error_of_the_child_is_the_same_error_here(tmp_path):
    jobs = program(tmp_path,
                   "tell(error={'code': 'invalid_request', 'cause': 'No.', 'remedy': 'Do.', 'field': 'group', "
                    "'evidence': {'group': '7'}})\n"
                             "sys.exit(2)\n")
    with pytest.raises(InvalidRequest) as caught:
        jobs.run("quantize", [], lambda p: None, Cancel())
    assert (caught.value.cause, caught.value.field, caught.value.evidence) == ("No.", "group", {"group": "7"})


@pytest.mark.parametrize(("body", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", "-9"),
                                            ("print('boom', file=sys.stderr); sys.exit(3)", "3")])
def test_a_child_that_dies_is_an_error_with_its_code(tmp_path, body, code):
    with pytest.raises(JobDied) as caught:
        program(tmp_path, body).run("quality", [], lambda p: None, Cancel())
    assert str(caught.value.evidence["code"]) == code and caught.value.evidence["job"] == "quality"


def test_a_result_that_is_no_json_is_an_error(tmp_path):
    with pytest.raises(JobDied, match="cannot be read"):
        program(tmp_path, "print('{half')").run("quality", [], lambda p: None, Cancel())


def cancelling(after: Progress, cancel: Cancel):
    return lambda seen: cancel.set() if seen == after else None


def test_cancel_is_a_signal_and_the_child_cleans_up(tmp_path):
    jobs = program(tmp_path,
                   "def stop(*a):\n    open(sys.argv[0] + '.clean', 'w').close(); sys.exit(1)\n"
                    "signal.signal(signal.SIGTERM, stop)\n"
                             "tell(progress={'stage': 'ready', 'done': 0, 'total': 0, 'note': ''})\ntime.sleep(60)\n")
    cancel = Cancel()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        jobs.run("quantize", [], cancelling(Progress("ready"), cancel), cancel)
    assert time.monotonic() - began < 20 and (tmp_path / "program.py.clean").exists()


def test_a_child_that_does_not_listen_is_ended_after_the_grace_time(tmp_path):
    jobs = program(tmp_path,
                   "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
                    "tell(progress={'stage': 'ready', 'done': 0, 'total': 0, 'note': ''})\n"
                             "time.sleep(60)\n", grace=0.5)
    cancel = Cancel()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        jobs.run("quantize", [], cancelling(Progress("ready"), cancel), cancel)
    assert time.monotonic() - began < 20


def test_memory_is_looked_at_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "machine_memory", lambda: (8 * 10**9, 2 * 10**9))
    jobs = program(tmp_path, "open(sys.argv[0] + '.ran', 'w').close()\nprint('{}')\n")
    with pytest.raises(OutOfMemory) as caught:
        jobs.run("quantize", [], lambda p: None, Cancel(), need=3 * 10**9)
    assert caught.value.evidence == {"need_bytes": 3 * 10**9, "free_bytes": 2 * 10**9} and "Unload" in caught.value.remedy
    assert not (tmp_path / "program.py.ran").exists()
    assert jobs.run("quantize", [], lambda p: None, Cancel(), need=10**9) == {}
    assert memory.machine_memory()[1] > 0


def test_one_job_at_a_time_and_the_waiting_one_says_so(tmp_path):
    jobs = program(tmp_path, "print('{}')\n")
    waiting, cancel = threading.Event(), Cancel()
    notes = []

    def report(seen: Progress) -> None:
        notes.append(seen)
        waiting.set()

    results = []
    with jobs.turn(lambda p: None, Cancel()):
        thread = threading.Thread(target=lambda: results.append(jobs.run("quality", [], report, cancel)))
        thread.start()
        assert waiting.wait(10) and results == []
        with pytest.raises(Cancelled):
            gone = Cancel()
            gone.set()
            jobs.run("quality", [], lambda p: None, gone)
    thread.join(30)
    assert results == [{}] and notes[0].stage == "wait"


# ---------------------------------------------------------------------------------------------- the real command line
def test_the_real_command_line_reports_its_errors(tmp_path):
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelNotFound, match="absent"):
        Jobs(tmp_path / "models").run("quantize", ["--model", "absent"], lambda p: None, Cancel())


def test_a_job_ends_when_the_page_that_started_it_is_gone(tmp_path):
    """The page's process is killed without a chance to say anything: the pipe it held closes."""
    body = ("import threading\nfrom gainz_ui.longwork import watched\n"
            "with watched(True) as (progress, cancel):\n"
            "    print('up', flush=True)\n    gone = threading.Event()\n    cancel.on_set(gone.set)\n"
            "    print(gone.wait(30), flush=True)\n")
    child = subprocess.Popen([sys.executable, "-c", body], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                             cwd=Path(__file__).parents[1], env={**os.environ, module.CHILD: "1"})
    try:
        assert child.stdout.readline() == "up\n"
        child.stdin.close()
        assert child.stdout.readline() == "True\n"
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
