"""Batches: what is read and what is refused, by line; each task's row exactly once, whatever happens in between."""

from __future__ import annotations

import io
import json
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from backends.base import (
    TEXT_TOKENS, BrokenFile, EngineDied, InvalidRequest, Message, ModelNotLoaded, NameTaken, Sampling, StepFailed)
from gainz_ui.services import batch as batches, batch_tasks
from gainz_ui.services.batch import Batch, Plan
from gainz_ui.services.batch_files import failures_of
from tests.api_fakes import INFO, FakeStudio

ROOT = Path(__file__).parents[1]
MANY = "héllo 世界 🦙\u2028\u2029\x85 end"


def parse(data: bytes) -> batch_tasks.Tasks:
    return batch_tasks.parse(io.BytesIO(data))


def lines(*tasks: dict) -> bytes:
    return b"".join(json.dumps(task, ensure_ascii=False).encode() + b"\n" for task in tasks)


def task(i, **more) -> dict:
    return {"task_id": f"t{i}", "prompt": f"p{i}", "max_tokens": 2, **more}


# ---------------------------------------------------------------------------------------------- reading
def test_both_kinds_of_lines_become_requests():
    own = task(1, temperature=0.5, stop="x", stop_ids=[3], logit_bias={"5": -1.0}, seed=7, draft="lookup", draft_length=4, time_limit=2.0)
    turns = {"task_id": 2, "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    openai = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {
        "model": "any", "messages": [{"role": "user", "content": "u"}], "max_completion_tokens": 9, "response_format": {"type": "json_object"}}}
    older = {"custom_id": "d", "method": "POST", "url": "/v1/completions", "body": {"prompt": [1, 2]}}
    one, two, three, four, five, six = parse(lines(own, turns, openai, older, {"task_id": 5, "prompt": "a"},
                                                   {"task_id": 6, "prompt": "a", "max_tokens": None})).sound()
    assert [t.request.sampling.max_tokens for t in (two, five, six)] == [None, TEXT_TOKENS, None]     # only a text has no end of its own
    assert one.request.sampling == Sampling(temperature=0.5, stop=("x",), stop_ids=(3,), logit_bias=((5, -1.0),), seed=7, max_tokens=2)
    assert (one.request.draft.name, one.request.draft.length, one.request.time_limit, one.line) == ("lookup", 4, 2.0, 1)
    assert two.id == "2" and two.request.prompt == (Message("system", "s"), Message("user", "u"))
    assert three.request.sampling == Sampling(temperature=1.0, max_tokens=9) and json.loads(three.request.schema) == {"type": "object"}
    assert four.request.prompt == (1, 2) and four.request.sampling.max_tokens == 16


def test_a_line_for_another_model_is_told_and_one_for_the_batchs_own_is_run():
    openai = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "x", "model": "big"}}
    found = batch_tasks.parse(io.BytesIO(lines(task(1, model="tiny"), task(2, model="big"), task(3, model=None), openai)), "tiny")
    assert [one.id for one in found.tasks] == ["t1", "t3"]
    assert [(one.line, "'big', and this batch runs 'tiny'" in one.what) for one in found.problems] == [(2, True), (4, True)]


@pytest.mark.parametrize("line,words", [
    (b'{"prompt": "a"}', "no task_id"), (b'{"task_id": ""}', "no task_id"), (b'{"task_id": true, "prompt": "a"}', "no task_id"),
    (b"{", "no JSON"), (b"[1]", "no JSON object"), (b'{"task_id": "a", "prompt": "\xff"}', "byte 28 is no UTF-8"), (b"[" * 100_000, "nested too deeply"),
    (b'{"task_id": "a"}', "either prompt or messages"), (b'{"task_id": "a", "prompt": "x", "messages": []}', "either prompt or messages"),
    (b'{"task_id": "a", "prompt": "x", "max_token": 3}', "unknown field 'max_token'; max_tokens was probably meant"), (b'{"task_id": "a", "prompt": 5}', "prompt must be"),
    (b'{"task_id": "a", "prompt": "\\ud83d"}', "half of a surrogate pair"),
    (b'{"task_id": "a", "messages": [{"role": "user", "content": "\\udc00"}]}', "half of a surrogate pair"),
    (b'{"task_id": "\\udc00", "prompt": "x"}', "task_id holds half"), (b'{"task_id": "a", "prompt": "x", "\\udc00": 1}', "half of a surrogate pair"),
    (b'{"task_id": "a", "prompt": "x", "stop": ["\\udc00"]}', "stop.0 holds half"), (b'"\\udc00"', "it holds half"),
    (b'{"task_id": "a", "prompt": "x", "n": 2}', "unknown field 'n'"), (b'{"task_id": "a", "prompt": "x", "temperature": "hot"}', "temperature"),
    (b'{"task_id": "a", "prompt": "x", "temperature": NaN}', "temperature"), (b'{"task_id": "a", "prompt": "x", "stop_ids": 4}', "stop_ids"),
    (b'{"task_id": "a", "prompt": "x", "logit_bias": {"x": 1}}', "logit_bias"), (b'{"task_id": "a", "messages": [{"role": "u"}]}', "role"),
    (b'{"task_id": "a", "messages": ["x"]}', "a message is"), (b'{"task_id": "a", "prompt": "x", "draft_length": 4}', "draft_length"),
    (b'{"task_id": "a", "prompt": "x", "model": 3}', "model is a text"),
    (b'{"task_id": "a", "prompt": "x", "time_limit": 0}', "time_limit"), (b'{"custom_id": "a", "url": "/v1/images", "body": {}}', "url"),
    (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "n": 2}}', "n other than 1"),
    (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "tools": []}}', "unknown field 'tools'")])
def test_ba_02_a_bad_line_is_named_before_any_work(line, words):
    found = parse(lines(task(1)) + b"\n" + line + b"\n" + lines(task(2)))
    assert [one.id for one in found.tasks] == ["t1", "t2"]
    (problem,) = found.problems
    assert problem.line == 3 and words in problem.what
    with pytest.raises(InvalidRequest, match="line 3"):
        found.sound()


def test_ba_02_an_id_that_comes_twice_names_both_lines():
    with pytest.raises(InvalidRequest, match="line 3: task_id 't1' stands on line 1"):
        parse(lines(task(1), task(2), task(1))).sound()
    with pytest.raises(InvalidRequest, match="no tasks"):
        parse(b"\n\n").sound()


@pytest.mark.parametrize("count", [1, 4, 6])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_ba_04_any_utf8_any_line_end(count, bom, end, last):
    rows = [json.dumps(task(i, prompt=MANY + str(i)), ensure_ascii=False).encode() for i in range(count)]
    found = parse(bom + end.join(rows) + (end if last else b"")).sound()
    assert [one.id for one in found] == [f"t{i}" for i in range(count)]
    assert [one.request.prompt for one in found] == [MANY + str(i) for i in range(count)]


texts = st.text(max_size=20).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text))
values = st.fixed_dictionaries({"prompt": texts}, optional={"max_tokens": st.integers(0, 10), "temperature": st.floats(0, 2),
                                                            "seed": st.integers(0, 2**63), "stop": st.lists(texts.filter(bool), max_size=2)})


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(texts.filter(bool), values, max_size=8), st.booleans(), st.booleans(), st.data())
def test_what_was_written_is_what_is_read(tasks, bom, ascii, data):
    out = [b"\xef\xbb\xbf" if bom else b""]
    for name, value in tasks.items():
        blank = data.draw(st.sampled_from([b"", b"\n", b" \r\n"]))
        out += [blank if len(out) > 1 or not bom else b"", json.dumps({"task_id": name, **value}, ensure_ascii=ascii).encode(),
                data.draw(st.sampled_from([b"\n", b"\r\n"]))]
    found = parse(b"".join(out))
    assert not found.problems and [one.id for one in found.tasks] == list(tasks)
    for one, value in zip(found.tasks, tasks.values(), strict=True):
        assert one.request.prompt == value["prompt"] and one.request.sampling.seed == value.get("seed")
        assert one.request.sampling.stop == tuple(value.get("stop", ()))


json_like = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from(["task_id", "custom_id", "method", "url", "body", "prompt", "messages", "role", "content", "stop", "logit_bias", "draft", "n"]), inner,
    max_size=4), max_leaves=12)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=30) | json_like.map(lambda value: json.dumps(value).encode()), max_size=6))
def test_whatever_a_file_holds_each_line_is_a_task_or_a_problem(raw):
    data = b"\n".join(raw)
    found = parse(data)
    kept = [number for number, line in enumerate(data.split(b"\n"), 1) if line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").removesuffix(b"\r").strip()]
    assert sorted([one.line for one in found.tasks] + [one.line for one in found.problems]) == kept


# ---------------------------------------------------------------------------------------------- running
class Studio(FakeStudio):
    """``faults``: id of the prompt → errors for its attempts, in turn."""

    def __init__(self):
        super().__init__()
        self.faults, self.seen, self.most = {}, [], 0

    def submit(self, request, model=None, cancel=None):
        self.seen.append(request.prompt)
        self.most = max(self.most, self.running + 1)
        if self.faults.get(request.prompt):
            raise self.faults[request.prompt].pop(0)
        return super().submit(request, model, cancel)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "PAUSE_SECONDS", 0.001)
    return tmp_path


def plan(place, *tasks, **more) -> Plan:
    source = place / "tasks.jsonl"
    source.write_bytes(lines(*tasks))
    return Plan(batch_tasks.read(source).sound(), source, place / "out.jsonl", "tiny", **more)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def test_every_task_has_its_row(place):
    studio = Studio()
    made = Batch(studio, plan(place, *(task(i, prompt=MANY + str(i)) for i in range(20)))).start()
    assert made.wait(20)
    found = rows(place / "out.jsonl")
    assert sorted(row["task_id"] for row in found) == sorted(f"t{i}" for i in range(20))
    assert all((row["status"], row["output"], row["attempts"], row["error"], row["model"]) == ("ok", "w0 w1 ", 1, None, "tiny") for row in found)
    assert found[0]["usage"]["completion_tokens"] == 2 and found[0]["cost_ms"] >= 0
    assert set(found[0]) >= {"task_id", "status", "output", "usage", "cost_ms", "attempts", "error"}
    now = made.standing()
    assert (now.done, now.failed, now.total, now.state) == (20, 0, 20, "done") and now.rate > 0
    assert not failures_of(place / "out.jsonl").exists() and not list(place.glob("*.lock"))


def test_what_may_help_is_tried_again_and_what_cannot_is_not(place):
    studio = Studio()
    dead, bad = EngineDied("x"), InvalidRequest("no", field="prompt")
    studio.faults = {"p0": [dead, StepFailed("y")], "p1": [dead] * 9, "p2": [bad] * 9}
    made = Batch(studio, plan(place, *(task(i) for i in range(4)))).start()
    assert made.wait(20)
    by_id = {row["task_id"]: row for row in rows(place / "out.jsonl")}
    assert [(by_id[f"t{i}"]["status"], by_id[f"t{i}"]["attempts"]) for i in range(4)] == [("ok", 3), ("failed", 3), ("failed", 1), ("ok", 1)]
    assert by_id["t1"]["error"]["code"] == "engine_died" and by_id["t2"]["error"]["field"] == "prompt"
    again = batch_tasks.read(failures_of(place / "out.jsonl")).sound()
    assert sorted(one.id for one in again) == ["t1", "t2"] and made.standing().failed == 2


def test_a_task_that_takes_too_long_fails_with_its_partial_text(place):
    studio = Studio()
    studio._events = lambda request, cancel: iter(())
    made = Batch(studio, plan(place, task(0), time_limit=3.0))
    made._ask = lambda request: ("part", batches.Usage(), "time_limit" if request.time_limit == 3.0 else "stop", None)
    assert made.start().wait(10)
    (row,) = rows(place / "out.jsonl")
    assert (row["status"], row["output"], row["attempts"], row["error"]["field"]) == ("failed", "part", 1, "time_limit")


def test_the_streams_are_full(place):
    studio = Studio()
    studio.pace = 0.01
    studio.model = lambda name=None: type("M", (), {"info": replace(INFO, streams=6)})
    made = Batch(studio, plan(place, *(task(i) for i in range(30)))).start()
    assert made.wait(20) and 6 <= studio.most <= 6 + batches.SPARE


def test_ba_05_a_cancelled_batch_goes_on_where_it_stopped(place):
    studio = Studio()
    studio.pace = 0.005
    wanted = plan(place, *(task(i) for i in range(60)))
    made = Batch(studio, wanted).start()
    while made.standing().done < 20:
        time.sleep(0.005)
    made.pause()
    time.sleep(0.1)
    held = made.standing()
    assert held.state == "paused" and held.running == 0 and made.standing().done == held.done
    made.resume()
    while made.standing().done < held.done + 5:
        time.sleep(0.005)
    made.cancel.set()
    assert made.wait(10) and made.standing().state == "cancelled"
    first = rows(place / "out.jsonl")
    assert 25 <= len(first) < 60
    second = Batch(studio, wanted).start()
    assert second.wait(20) and second.resumed == len(first)
    found = rows(place / "out.jsonl")
    assert found[:len(first)] == first and sorted(row["task_id"] for row in found) == sorted(f"t{i}" for i in range(60))


@pytest.mark.parametrize("tail,kept", [(b'{"task_id": "t1", "sta', False), ('{"task_id": "t1", "output": "世'.encode()[:-1], False), (None, True)])
def test_ba_03_a_torn_last_row_is_done_again_and_a_whole_one_kept(place, tail, kept):
    studio = Studio()
    wanted = plan(place, task(0), task(1), task(2))
    assert Batch(studio, wanted).start().wait(10)
    whole = (place / "out.jsonl").read_bytes().split(b"\n")[:3]
    (place / "out.jsonl").write_bytes(whole[0] + b"\n" + (whole[1] if tail is None else tail))
    studio.seen.clear()
    assert Batch(studio, wanted).start().wait(10)
    found = rows(place / "out.jsonl")
    assert sorted(row["task_id"] for row in found) == ["t0", "t1", "t2"] and len(studio.seen) == (1 if kept else 2)
    assert found[0] == json.loads(whole[0]) and (not kept or found[1] == json.loads(whole[1]))


def test_the_same_file_and_anothers_results_are_refused(place):
    studio = Studio()
    made = plan(place, task(0))
    before = made.source.read_bytes()
    (place / "link.jsonl").hardlink_to(made.source)
    for output in (made.source, place / "link.jsonl", place / "x" / ".." / "tasks.jsonl"):
        with pytest.raises(InvalidRequest, match="file of the tasks"):
            replace(made, output=output)
    assert made.source.read_bytes() == before
    assert Batch(studio, made).start().wait(10)
    with pytest.raises(InvalidRequest, match="another batch"):
        Batch(studio, plan(place, task(5)))
    (place / "out.jsonl").write_bytes(b"not a result\n")
    with pytest.raises(BrokenFile):
        Batch(studio, made)
    (place / "out.jsonl").unlink()
    running = Batch(studio, made)
    with pytest.raises(NameTaken):
        Batch(studio, made)
    assert running.start().wait(10)


def test_a_model_that_goes_stops_the_batch_and_says_so(place):
    studio = Studio()
    studio.faults = {f"p{i}": [ModelNotLoaded("gone")] * 3 for i in range(50)}
    made = Batch(studio, plan(place, *(task(i) for i in range(50)))).start()
    assert made.wait(10)
    now = made.standing()
    assert now.state == "error" and now.error.code == "model_not_loaded" and now.done == 0 and len(studio.seen) < 10


def killed(place, tasks: int, kills: int, seed: int) -> None:
    """Kills at moments spread over the whole of the work: three in four, at least, must find some of it left."""
    rng, source, output, unfinished = random.Random(seed), place / "tasks.jsonl", place / "out.jsonl", 0
    source.write_bytes(lines(*(task(i, prompt=MANY) for i in range(tasks))))
    for left in range(kills, -1, -1):
        child = subprocess.Popen([sys.executable, "-m", "tests.batch_child", str(source), str(output)], cwd=ROOT, stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        if left:
            time.sleep(rng.uniform(0.0, 1.6 * 2.0 * tasks / 1000 / 3 / kills))
            child.send_signal(signal.SIGKILL)
        assert child.wait(120) in (0, -signal.SIGKILL)
        child.stdout.close()
        unfinished += bool(left) and (not output.exists() or output.read_bytes().count(b"\n") < tasks)
    assert unfinished >= 0.75 * kills, f"only {unfinished} of {kills} kills found work left"
    assert sorted(row["task_id"] for row in rows(output)) == sorted(f"t{i}" for i in range(tasks))


def test_after_kills_every_task_has_one_row(place):
    killed(place, 300, 3, 1)


@pytest.mark.slow
def test_after_twenty_kills_of_a_thousand_tasks_every_task_has_one_row(place):
    killed(place, 1000, 20, 2)


def test_rows_of_many_hands_do_not_mix(place):
    """Each row is one write under one lock."""
    studio = Studio()
    studio.words = ["x" * 5000] * 32
    studio.model = lambda name=None: type("M", (), {"info": replace(INFO, streams=16)})
    made = Batch(studio, plan(place, *(task(i) for i in range(80)))).start()
    assert made.wait(20) and len(rows(place / "out.jsonl")) == 80
    assert threading.active_count() < 60
