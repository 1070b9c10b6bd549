"""How answers end when something comes between: cancel, time, faults, unload; and what they say of themselves."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from backends.base import Cancel, DraftSpec, Request, Sampling
from backends.engine.loop import Engine
from backends.errors import InvalidRequest, ModelNotLoaded, OutOfMemory, QueueFull, StepFailed
from tests.toys import SIZE, Got, ToyDecoder, ask, drain, naive, random_logits, toy_model, shown

PROMPT = tuple(b"Once upon a time")


def test_a_cancel_ends_within_two_steps_also_in_the_prompt_and_in_the_queue():  # SV-01
    for steps in (0, 1, 3, 30):
        engine, model = Engine(budget=4), toy_model(streams=1)
        engine.attach(model)
        cancel, queued = Cancel(), Cancel()
        got = ask(engine, model, PROMPT * 3, Sampling(max_tokens=2000, ignore_eos=True), cancel)
        behind = ask(engine, model, PROMPT, Sampling(max_tokens=5), queued)
        for _ in range(steps):
            engine.step()
        cancel.set(), queued.set()
        assert drain(engine) <= 2
        assert got.check().finish() == behind.check().finish() == "cancelled"
        assert got.text() == shown(got.ids(), cut=True) and not model.decoder.open_slots


def test_a_time_limit_gives_what_there_is():
    engine, model = Engine(), toy_model()
    engine.attach(model)
    got = ask(engine, model, PROMPT, Sampling(max_tokens=2000, ignore_eos=True), time_limit=.05)
    for _ in range(5):
        engine.step()
    time.sleep(.06)
    assert drain(engine) <= 1 and got.check().finish() == "time_limit" and len(got.ids()) == 5


def test_only_the_sequence_that_fails_alone_errs():
    engine, model = Engine(), toy_model()
    engine.attach(model)
    bad = (*b"bad",)
    model.decoder.fault = lambda steps: RuntimeError("boom") if any(66 in step.tokens for step in steps) else None
    plain = [ask(engine, model, prompt, Sampling(max_tokens=10, logit_bias=((66, -100.0),))) for prompt in (PROMPT, b"other")
             for prompt in [tuple(prompt)]]
    failing = ask(engine, model, (*bad, 66), Sampling(max_tokens=10))
    drain(engine)
    for prompt, got in zip((PROMPT, b"other"), plain):
        assert got.check().ids() == naive(model.decoder, prompt, Sampling(logit_bias=((66, -100.0),)), len(prompt) + 10)
    assert failing.check().finish() == "error"
    assert isinstance(failing.last.error, StepFailed) and "boom" in str(failing.last.error)
    assert engine.stats()["errors"] == {"step_failed": 1} and not model.decoder.open_slots
    model.decoder.fault = lambda steps: None
    after = ask(engine, model, PROMPT, Sampling(max_tokens=10))
    drain(engine)
    assert after.check().ids() == naive(model.decoder, PROMPT, Sampling(), len(PROMPT) + 10)


def test_memory_that_runs_out_in_a_step_is_called_so():
    engine, model = Engine(), toy_model()
    engine.attach(model)
    model.decoder.fault = lambda steps: MemoryError()
    got = ask(engine, model, PROMPT, Sampling(n=2, max_tokens=3))
    drain(engine)
    assert isinstance(got.check(2).last.error, OutOfMemory) and got.finish(1) == "error"


def test_an_answer_that_outgrows_the_cache_alone_is_an_error_not_a_loop():
    engine, model = Engine(), toy_model(ToyDecoder(room=30))
    engine.attach(model)
    got = ask(engine, model, PROMPT, Sampling(max_tokens=100, ignore_eos=True), draft=DraftSpec("toy", 3))
    drain(engine, 500)
    assert isinstance(got.check().last.error, OutOfMemory) and len(got.ids()) == 30 - len(PROMPT) + 1


def test_logits_that_are_no_numbers_end_their_request():
    def logits(kv):
        row = random_logits(kv)
        if kv[0] == 66:
            row[:] = np.nan
        return row
    engine, model = Engine(), toy_model(ToyDecoder(logits))
    engine.attach(model)
    bad, good = ask(engine, model, (66, 1), Sampling(max_tokens=4)), ask(engine, model, PROMPT, Sampling(max_tokens=4))
    drain(engine)
    assert isinstance(bad.check().last.error, StepFailed) and len(good.check().ids()) == 4


def test_a_drafter_that_raises_ends_its_requests_only():
    engine, model, draft = Engine(), toy_model(), toy_model(name="draft")
    engine.attach(model), engine.attach(draft)
    draft.decoder.fault = lambda steps: RuntimeError("draft")
    bad = ask(engine, model, PROMPT, Sampling(max_tokens=9, ignore_eos=True), draft=DraftSpec("draft", 2))
    good = ask(engine, model, PROMPT, Sampling(max_tokens=9, ignore_eos=True))
    drain(engine)
    assert isinstance(bad.check().last.error, StepFailed) and len(good.check().ids()) == 9
    assert not draft.decoder.open_slots and not model.decoder.open_slots


def test_the_queue_has_an_end():
    engine, model = Engine(queue=3), toy_model(streams=1)
    engine.attach(model)
    first = [ask(engine, model, PROMPT, Sampling(max_tokens=3)) for _ in range(3)]
    with pytest.raises(QueueFull):
        ask(engine, model, PROMPT)
    engine.step()
    first.append(ask(engine, model, PROMPT, Sampling(max_tokens=3)))     # one of them runs now
    with pytest.raises(QueueFull) as caught:
        ask(engine, model, PROMPT)
    assert caught.value.evidence["waiting"] == 3
    drain(engine)
    assert all(got.check().done for got in first)


def test_unloading_ends_the_answers_of_that_model_only():
    engine, model, other = Engine(), toy_model(), toy_model(name="other")
    engine.attach(model), engine.attach(other)
    ended = ask(engine, model, PROMPT, Sampling(max_tokens=50, ignore_eos=True))
    goes_on = ask(engine, other, PROMPT, Sampling(max_tokens=8, ignore_eos=True), draft=DraftSpec("toy", 2))
    engine.step(), engine.step()
    unread = ask(engine, model, PROMPT)
    engine.detach(model)
    assert isinstance(ended.check().last.error, ModelNotLoaded) and isinstance(unread.check().last.error, ModelNotLoaded)
    drain(engine)
    assert len(goes_on.check().ids()) == 8 and not model.decoder.open_slots
    with pytest.raises(ModelNotLoaded):
        ask(engine, model, PROMPT)


# ------------------------------------------------------------------------------------------- usage, timing, threads
def test_cached_tokens_and_equal_answers_the_second_time():  # KV-02
    engine, model = Engine(), toy_model()
    engine.attach(model)
    for size in (15, 16, 17):
        prompt, answers = tuple(range(65, 65 + size)), []
        for _ in range(3):
            answers.append(ask(engine, model, prompt, Sampling(max_tokens=6)))
            drain(engine)
        assert len({tuple(got.check().ids()) for got in answers}) == 1
        assert answers[2].last.usage.cached_tokens == size - 1


def test_timing_is_of_the_answer_and_progress_of_the_prompt():
    engine, model = Engine(budget=5), toy_model()
    engine.attach(model)
    got = ask(engine, model, PROMPT, Sampling(max_tokens=4, ignore_eos=True))
    drain(engine)
    told = [(event.progress.done, event.progress.total) for event in got.events if event.progress]
    assert told == [(5, 16), (10, 16), (15, 16)]
    timing = got.check().last.timing
    assert timing.total_seconds >= timing.ttft_seconds + timing.decode_seconds - 1e-9
    assert timing.ttft_seconds == pytest.approx(timing.queue_seconds + timing.prefill_seconds)
    assert timing.decode_tokens_per_second == pytest.approx(3 / timing.decode_seconds)
    assert timing.prefill_tokens_per_second == pytest.approx(16 / timing.prefill_seconds)
    got = ask(engine, model, PROMPT, Sampling(max_tokens=1))
    drain(engine)
    single = got.check().last.timing
    assert single.decode_seconds is None and single.decode_tokens_per_second is None


def test_generate_runs_on_an_engine_of_its_own_and_a_dropped_stream_cancels():
    model = toy_model()
    stream = model.generate(Request(PROMPT, Sampling(max_tokens=8, ignore_eos=True)), Cancel())
    got = Got(list(stream)).check()
    assert got.ids() == naive(model.decoder, PROMPT, Sampling(ignore_eos=True), len(PROMPT) + 8)
    outer = Cancel()
    stream = model.generate(Request(PROMPT, Sampling(max_tokens=4000, ignore_eos=True)), outer)
    assert next(stream).ids
    stream.close()
    deadline = time.monotonic() + 5
    while model.engine.stats()["running"] and time.monotonic() < deadline:
        time.sleep(.005)
    assert not model.engine.stats()["running"] and not outer.is_set()
    with pytest.raises(InvalidRequest):
        model.generate(Request((SIZE,)), Cancel())
    model.close(), model.close()


def test_an_idle_loop_sleeps_and_a_request_wakes_it():
    engine, model, stop = Engine(), toy_model(), threading.Event()
    engine.attach(model)
    rounds = []
    step = engine.step
    engine.step = lambda: rounds.append(1) or step()
    thread = threading.Thread(target=engine.run, args=(stop,), daemon=True)
    thread.start()
    time.sleep(.3)
    assert len(rounds) <= 3
    began = time.monotonic()
    got = ask(engine, model, PROMPT, Sampling(max_tokens=2, ignore_eos=True))
    while not got.done and time.monotonic() < began + 5:
        time.sleep(.001)
    assert time.monotonic() - began < .4 and len(got.check().ids()) == 2
    other = toy_model(name="late")
    engine.attach(other), engine.detach(other)             # from another thread, while it runs
    stop.set(), engine.wake()
    thread.join(5)
    assert not thread.is_alive()


def test_the_bytes_of_the_tokens_are_the_text():  # GE-17
    engine, model = Engine(), toy_model()
    engine.attach(model)
    got = ask(engine, model, PROMPT, Sampling(max_tokens=40, ignore_eos=True, logprobs=2))
    drain(engine)
    found = [item for event in got.of() for item in event.logprobs]
    assert b"".join(item.raw for item in found) == bytes(id for id in got.ids() if id < 256)
    assert all(len(item.top_raw) == len(item.top) == 2 for item in found)
