"""The engine process and its proxy, with an engine and a backend of a few lines in the child: what is under test is life,
death and the pipe. The real engine behind the same pipe: test_memory.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from backends.base import (
    Cancel, Cancelled, EngineDied, EngineStopping, InvalidRequest, LoadError, ModelNotLoaded, OutOfMemory, Request, Sampling,
    StepFailed)
from backends.host import EngineHost

FAKES = Path(__file__).parent / "fakes"
sys.path.insert(0, str(FAKES))
from toy_backends.toy import ToyOptions  # noqa: E402

posix = pytest.mark.skipif(os.name != "posix", reason="signals")


@pytest.fixture
def host(tmp_path):
    made = EngineHost(logs=tmp_path / "logs", package="toy_backends", engine="toy_engine:ToyEngine", pace=0.002)
    yield made
    made.close()


@pytest.fixture
def toy(host, tmp_path):
    """load(name, **options) → model"""
    def load(name: str, cancel: Cancel | None = None, progress=lambda _: None, **options):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "toy.json").write_text("{}")
        return host.load(name, folder, "toy", ToyOptions(**options), progress, cancel or Cancel())
    return load


def ask(tokens: int = 5, prompt: str = "hi", n: int = 1) -> Request:
    return Request(prompt, Sampling(max_tokens=tokens, n=n))


def text(events) -> str:
    return "".join(event.text for event in events)


def failure(model, request: Request):
    """The error that an answer ends with, be it before its first event or in its last."""
    try:
        return list(model.generate(request, Cancel()))[-1].error
    except EngineDied as error:
        return error


def pid(host) -> int:
    return host._link.pid


def test_an_answer_comes_event_by_event_and_ends_once(toy):
    events = list(toy("a").generate(ask(5), Cancel()))
    assert text(events) == "a:0 a:1 a:2 a:3 a:4 "
    assert [event.last for event in events] == [False] * 5 + [True]
    assert events[4].finish == "length" and events[-1].usage.completion_tokens == 5


def test_no_process_before_the_first_model_and_none_after_the_last(host, toy):
    assert host.state == "idle" and host.stats()["memory"] == 0
    toy("a"), toy("b")
    child = psutil.Process(pid(host))
    assert host.state == "ready" and set(host.models()) == {"a", "b"} and host.stats()["memory"] > 1 << 20
    host.unload("a")
    assert child.is_running() and host.state == "ready"
    host.unload("b")
    assert not child.is_running() and host.state == "idle" and host.models() == {}


def test_two_models_interleave_and_keep_their_own_text(toy):
    models = [toy("a"), toy("b")]
    answers = [models[i % 2].generate(ask(30), Cancel()) for i in range(8)]
    collected = [""] * 8
    threads = [threading.Thread(target=lambda i=i: collected.__setitem__(i, text(answers[i]))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, whole in enumerate(collected):
        assert whole == "".join(f"{'ab'[i % 2]}:{j} " for j in range(30))


def test_info_says_how_it_was_loaded(toy):
    info = toy("a", streams=3, megabytes=50, load_ms=50).info
    assert info.name == "a" and dict(info.options)["streams"] == 3
    assert 45 << 20 < info.peak_bytes < 200 << 20 and info.load_seconds >= 0.05


@posix
def test_killed_in_mid_answer_it_ends_with_a_typed_error_and_the_next_request_works(host, toy):
    changes = []
    host.on_change = lambda: changes.append(host.state)
    model, other = toy("a"), toy("b")
    answer = model.generate(ask(10_000, n=2), Cancel())
    seen = [next(answer) for _ in range(3)]
    os.kill(pid(host), signal.SIGKILL)
    rest = list(answer)
    assert [event.finish for event in rest[-3:]] == ["error", "error", None]
    error = rest[-1].error
    assert isinstance(error, EngineDied) and error.evidence == {"exit_code": -9, "signal": "SIGKILL"} and "memory" in str(error)
    assert rest[-1].last and rest[-1].usage.completion_tokens == len(seen) + len(rest) - 3
    assert host.state == "dead" and "memory" in host.reason and set(host.models()) == {"a", "b"}
    again = list(model.generate(ask(3), Cancel()))
    assert text(again) == "a:0 a:1 a:2 " and again[0].progress is not None and again[-1].error is None
    assert host.state == "ready" and host.reason == "" and changes == ["dead", "ready"]
    assert text(other.generate(ask(2), Cancel())) == "b:0 b:1 "


@posix
def test_tokenizing_after_a_death_brings_the_model_back(host, toy):
    model = toy("a")
    os.kill(pid(host), signal.SIGKILL)
    while host.state != "dead":
        time.sleep(0.01)
    assert model.tokenize("hé") == (104, 195, 169) and model.detokenize((104, 105)) == "hi"


def test_an_abort_in_native_code_is_named(host, toy):
    error = failure(toy("a"), ask(5, "abort"))
    assert isinstance(error, EngineDied) and error.evidence["signal"] == "SIGABRT"
    assert "Fatal Python error: Aborted" in (Path(host._settings.logs) / "engine-crash.log").read_text()


def test_a_loop_that_raises_ends_visibly_with_its_reason(host, toy):
    model = toy("a")
    error = failure(model, ask(5, "loop"))
    assert isinstance(error, EngineDied) and "RuntimeError: the loop is broken" in error.evidence["reason"]
    assert host.state == "dead" and "the loop is broken" in host.reason
    assert "the loop is broken" in (Path(host._settings.logs) / "engine.log").read_text()
    assert text(model.generate(ask(1), Cancel())) == "a:0 "


def test_a_loop_that_hangs_is_seen_and_does_not_hold_up_the_counters(host, toy):
    answer = toy("a").generate(ask(5, "hang"), Cancel())
    time.sleep(0.8)
    began = time.monotonic()
    stats = host.stats()
    assert time.monotonic() - began < 2 and stats["running"] == 1 and stats["step_age"] > 0.5
    host.kill()
    assert isinstance(list(answer)[-1].error, EngineDied)


@posix
def test_a_frozen_process_is_seen_by_its_silence(host, toy):
    answer = toy("a").generate(ask(10_000), Cancel())
    time.sleep(0.7)
    os.kill(pid(host), signal.SIGSTOP)
    time.sleep(1.5)
    assert host.stats()["step_age"] > 1.2
    host.kill()
    assert isinstance(list(answer)[-1].error, EngineDied)


@posix
def test_a_death_during_a_load_fails_that_load_and_leaves_nothing(host, toy):
    with pytest.raises(EngineDied) as caught:
        toy("a", fault="die")
    assert caught.value.evidence["exit_code"] == -9 and host.models() == {} and host.state == "idle"
    assert text(toy("b").generate(ask(1), Cancel())) == "b:0 "


@posix
def test_a_death_during_a_load_takes_the_others_answers_and_they_come_back(host, toy):
    model = toy("a")
    answer = model.generate(ask(10_000), Cancel())
    with pytest.raises(EngineDied):
        toy("b", fault="die")
    assert isinstance(list(answer)[-1].error, EngineDied) and set(host.models()) == {"a"}
    assert text(model.generate(ask(1), Cancel())) == "a:0 "


@posix
def test_a_reload_that_dies_ends_the_answer_with_the_error(host, toy, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "died").write_text("so that the first load lives")
    model = toy("a", fault="die-once")
    (tmp_path / "a" / "died").unlink()
    os.kill(pid(host), signal.SIGKILL)
    while host.state != "dead":
        time.sleep(0.01)
    events = list(model.generate(ask(1), Cancel()))
    assert events[-2].finish == "error" and isinstance(events[-1].error, EngineDied)
    assert text(model.generate(ask(1), Cancel())) == "a:0 "


def test_errors_of_the_child_keep_their_class(host, toy):
    model = toy("a")
    with pytest.raises(InvalidRequest) as caught:
        model.generate(ask(1, "refuse"), Cancel())
    assert caught.value.field == "prompt" and caught.value.cause == "This prompt is refused."
    with pytest.raises(OutOfMemory) as caught:
        toy("b", fault="memory")
    assert caught.value.evidence == {"needed": "2", "free": "1"}


def test_an_unforeseen_exception_is_typed_and_logged(host, toy):
    model = toy("a")
    with pytest.raises(StepFailed) as caught:
        model.generate(ask(1, "bug"), Cancel())
    assert "KeyError" in caught.value.evidence["exception"]
    with pytest.raises(LoadError) as caught:
        toy("b", fault="raise")
    assert "KeyError" in caught.value.evidence["exception"]
    log = (Path(host._settings.logs) / "engine.log").read_text()
    assert log.count("Traceback") == 2 and "no such key" in log
    assert text(model.generate(ask(1), Cancel())) == "a:0 "


def test_cancel_ends_within_two_steps(host, toy):
    model, cancel = toy("a"), Cancel()
    answer = model.generate(ask(100_000), cancel)
    for _ in range(5):
        next(answer)
    before = host.stats()["steps"]
    cancel.set()
    rest = list(answer)
    assert rest[-2].finish == "cancelled" and rest[-1].error is None
    assert rest[-2].ids[0] - before <= 2 + 1                # one may have been under way while we asked for the count


def test_closing_the_iterator_stops_the_work(host, toy):
    answer = toy("a").generate(ask(100_000), Cancel())
    next(answer)
    answer.close()
    assert list(answer) == []
    assert host.beat().running == 0
    time.sleep(0.1)
    assert host.stats()["active"] == 0


def test_an_iterator_that_is_let_go_stops_the_work(host, toy):
    answer = toy("a").generate(ask(100_000), Cancel())
    next(answer)
    del answer
    assert host.beat().running == 0
    time.sleep(0.1)
    assert host.stats()["active"] == 0


def test_an_answer_counts_from_its_first_event_to_its_last_without_a_heartbeat(host, toy):
    answer = toy("a").generate(ask(3), Cancel())
    next(answer)
    assert host.beat().running == 1
    assert list(answer)[-1].last and host.beat().running == 0


def test_closing_wakes_a_thread_that_waits(toy):
    answer, seen = toy("a").generate(ask(5, "hang"), Cancel()), []
    waiter = threading.Thread(target=lambda: seen.extend(answer))
    waiter.start()
    time.sleep(0.1)
    answer.close()
    waiter.join(1)
    assert not waiter.is_alive() and seen == []


def test_a_load_reports_and_can_be_cancelled(host, toy):
    cancel, seen = Cancel(), []

    def progress(report):
        seen.append(report)
        if report.stage == "read" and report.done > 3:
            cancel.set()

    began = time.monotonic()
    with pytest.raises(Cancelled):
        toy("a", cancel, progress, load_ms=20_000)
    assert time.monotonic() - began < 10 and host.models() == {} and host.state == "idle"
    assert [report.stage for report in seen][:2] == ["start", "read"]


def test_a_cancel_before_the_start_of_the_process_is_heard(host, toy):
    cancel = Cancel()
    cancel.set()
    with pytest.raises(Cancelled):
        toy("a", cancel)
    assert host.state == "idle"


def test_decoding_goes_on_during_a_load(toy):
    model = toy("a")
    loader = threading.Thread(target=lambda: toy("b", load_ms=1000))
    loader.start()
    assert text(model.generate(ask(20), Cancel())).endswith("a:19 ")
    assert loader.is_alive(), "the answer did not wait for it"
    loader.join()


def test_unload_ends_running_answers_as_cancelled(host, toy):
    model, _ = toy("a"), toy("b")
    answer = model.generate(ask(100_000), Cancel())
    next(answer)
    host.unload("a")
    rest = list(answer)
    assert rest[-2].finish == "cancelled" and rest[-1].last
    with pytest.raises(ModelNotLoaded):
        model.generate(ask(1), Cancel())


def test_unknown_and_doubled_names(host, toy):
    with pytest.raises(ModelNotLoaded):
        host.unload("nothing")
    assert host.model("nothing") is None
    toy("a")
    with pytest.raises(InvalidRequest):
        toy("a")


def test_close_lets_answers_end_and_refuses_new_ones(host, toy):
    model = toy("a")
    answer = model.generate(ask(30), Cancel())
    closer = threading.Thread(target=host.close, args=(5,))
    closer.start()
    time.sleep(0.02)
    with pytest.raises(EngineStopping):
        model.generate(ask(1), Cancel())
    assert text(answer).endswith("a:29 ")
    closer.join(5)
    assert not closer.is_alive() and host.state == "idle"


def test_close_cancels_what_will_not_end(host, toy):
    answer = toy("a").generate(ask(1_000_000), Cancel())
    child = psutil.Process(pid(host))
    reader = threading.Thread(target=lambda: list(answer))
    reader.start()
    began = time.monotonic()
    host.close(0.1)
    assert time.monotonic() - began < 4 and not child.is_running()
    reader.join(2)
    assert not reader.is_alive()


PARENT = """
import sys, time
sys.path.insert(0, {fakes!r})
from backends.base import *
from backends.host import EngineHost
from toy_backends.toy import ToyOptions
if __name__ == "__main__":
    host = EngineHost(package="toy_backends", engine="toy_engine:ToyEngine")
    model = host.load("a", {folder!r}, "toy", ToyOptions(), lambda _: None, Cancel())
    answer = model.generate(Request("hi", Sampling(max_tokens=10**6)), Cancel())
    next(answer)
    print(host._link.pid, "torch" in sys.modules, flush=True)
    for event in answer: pass
"""


@posix
def test_the_child_dies_with_its_parent_and_ignores_ctrl_c(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "toy.json").write_text("{}")
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(fakes=str(FAKES), folder=str(tmp_path / "a")))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env)
    number, torch = parent.stdout.readline().split()
    child = psutil.Process(int(number))
    try:
        assert torch == "False"
        child.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert child.is_running() and child.status() != psutil.STATUS_ZOMBIE
        if sys.platform.startswith("linux"):
            assert int(Path(f"/proc/{child.pid}/oom_score_adj").read_text()) >= 500
        parent.kill()
        parent.wait()
        psutil.wait_procs([child], timeout=3)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    finally:
        parent.kill()
        parent.stdout.close()
