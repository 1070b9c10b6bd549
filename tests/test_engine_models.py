"""The engine over real decoders: the tiny fixtures, through the same `load` as a user's model."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backends.base import Cancel, DraftSpec, Sampling, Step
from backends.engine.loop import Engine
from backends.registry import load_model
from tests.toys import Got, ask, drain

FIXTURES = Path(__file__).parent / "fixtures"
TEXT = "In the beginning the small model read a long line of text, and it wrote another one, and another one after it."
PAGE = 16


def load(name: str, **options):
    return load_model(FIXTURES / name, kernels="ref", dtype="float32", threads=1, **options)


@pytest.fixture(scope="module", params=["llama-fp16", "qwen2-fp16"])
def model(request):
    loaded = load(request.param)
    yield loaded
    loaded.close()


@pytest.fixture
def engine(model):
    made = Engine()
    made.attach(model)
    yield made
    made.detach(model)
    assert model.decoder.stats()["pages_used"] == 0


def prompts(model, sizes) -> list[tuple[int, ...]]:
    ids = model.tokenize(TEXT * 9)
    return [tuple(ids[place * 7:place * 7 + size]) for place, size in enumerate(sizes)]


def solo(engine, model, prompt, sampling) -> list[int]:
    got = ask(engine, model, prompt, sampling)
    drain(engine)
    return got.check(sampling.n).ids()


def greedy(model, prompt, count) -> list[int]:
    """By the plainest loop: the prompt in one pass, then one token a pass; no engine, nothing reused."""
    tokens, slot = list(prompt), model.decoder.open(prompt, reuse=False)
    while len(tokens) < len(prompt) + count:
        feed = tokens[slot.length:]
        assert model.decoder.reserve(slot, len(feed))
        row, = model.decoder.extend([Step(slot, feed, 1)])
        tokens.append(int(row[0].argmax()))
    model.decoder.release(slot)
    return tokens[len(prompt):]


def test_batched_equals_alone_equals_the_naive_loop(engine, model):  # GE-14
    asked = prompts(model, (3, 9, 20, 1))
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    together = [ask(engine, model, prompt, sampling) for prompt in asked]
    drain(engine)
    for prompt, got in zip(asked, together):
        assert got.check().ids() == solo(engine, model, prompt, sampling) == greedy(model, prompt, 12)


def test_a_seeded_answer_is_its_own_in_any_company(engine, model):  # GE-13
    prompt, = prompts(model, (9,))
    sampling = Sampling(temperature=.8, seed=42, max_tokens=16, ignore_eos=True)
    alone = solo(engine, model, prompt, sampling)
    for seeds in ([42, None], [None, 42], [7, 42], [42, 7], [None, 42, 7]):
        answers = [ask(engine, model, prompt, replace(sampling, seed=seed)) for seed in seeds]
        drain(engine)
        assert answers[seeds.index(42)].ids() == alone


@pytest.mark.parametrize("size", [PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_the_third_time_says_the_same_from_the_cache(engine, model, size):  # KV-02
    prompt, = prompts(model, (size,))
    answers = []
    for _ in range(3):
        answers.append(ask(engine, model, prompt, Sampling(max_tokens=PAGE + 2, ignore_eos=True)))
        drain(engine)
    assert answers[0].ids() == answers[1].ids() == answers[2].ids()
    assert answers[2].check().last.usage.cached_tokens == (size - 1) // PAGE * PAGE


def test_prompt_logprobs_are_the_same_with_and_without_a_cache(engine, model):  # KV-03
    stem, = prompts(model, (40,))
    pair = [(*stem, 70, 71), (*stem, 80)]
    sampling = Sampling(max_tokens=1, prompt_logprobs=1, ignore_eos=True)

    def told(prompt):
        got = ask(engine, model, prompt, sampling)
        drain(engine)
        return [entry.logprob for entry in got.check().of()[-1].prompt_logprobs[1:]]

    for order in (pair, pair[::-1]):
        for prompt in order:
            slot = model.decoder.open(prompt, reuse=False)
            assert model.decoder.reserve(slot, len(prompt))
            rows, = model.decoder.extend([Step(slot, prompt, len(prompt))])
            model.decoder.release(slot)
            truth = torch.log_softmax(rows.double(), -1)[torch.arange(len(prompt) - 1), list(prompt[1:])]
            assert told(prompt) == pytest.approx(truth.tolist(), abs=1e-4)


@pytest.mark.parametrize("k", [1, 4, 8])
def test_drafts_of_any_quality_leave_the_text_alone(engine, model, k):  # SP-05
    class Off:
        reads_states = False

        """Wrong on purpose, or at random."""
        def __init__(self, rng):
            self.rng = rng

        def propose(self, batch):
            return [[self.rng.randrange(500) for _ in range(job.k)] for job in batch]

        def forget(self, sequence):
            pass

        shed = close = lambda self, *_: False

    rng, lane = random.Random(k), engine._lanes[0]
    engine._drafters[lane, "lookup"] = Off(rng)
    for prompt in prompts(model, [rng.randrange(1, 60) for _ in range(3)]):
        for temperature in (0, .9):
            sampling = Sampling(temperature=temperature, seed=5, max_tokens=13, ignore_eos=True)
            plain = solo(engine, model, prompt, sampling)
            answers = [ask(engine, model, prompt, sampling, draft=DraftSpec(name, k))
                       for name in ("lookup", model.info.name)]
            drain(engine)
            assert answers[0].check().ids() == answers[1].check().ids() == plain
            own = answers[1].last.usage
            assert own.accepted == own.drafted and own.passes == 1 + -(-12 // (k + 1))


def test_the_cache_after_drafts_equals_a_fresh_one(engine, model):  # SP-06
    prompt, = prompts(model, (21,))
    truth = [*prompt, *solo(engine, model, prompt, Sampling(max_tokens=24, ignore_eos=True))]

    class Scripted:
        reads_states = False

        script = [0, 3, 4, 2, 0, 4]

        def propose(self, batch):
            job, = batch
            right, place = self.script.pop(0) if self.script else 0, len(job.tokens)
            return [[token if i < right else (token + 1) % 500 for i, token in enumerate(truth[place:place + job.k])]]

        def forget(self, sequence):
            pass

        shed = close = lambda self, *_: False

    lane, cache = engine._lanes[0], model.decoder.kv.layers
    addresses = [layer.k.data_ptr() for layer in cache]
    engine._drafters[lane, "lookup"] = Scripted()
    got = ask(engine, model, prompt, Sampling(max_tokens=24, ignore_eos=True), draft=DraftSpec("lookup", 4))

    def contents(slot):
        place = torch.arange(slot.length)
        pages = torch.tensor(list(slot.pages))[place // PAGE]
        return [part[pages, :, place % PAGE].clone() for layer in cache for part in (layer.k, layer.v)]

    while engine.step():
        for sequence in lane.scheduler.running:
            assert sequence.slot.length == len(sequence.tokens) - 1
            mine = contents(sequence.slot)
            fresh = model.decoder.open(sequence.tokens, reuse=False)
            assert model.decoder.reserve(fresh, sequence.slot.length)
            model.decoder.extend([Step(fresh, sequence.tokens[:-1], 0)])
            for a, b in zip(mine, contents(fresh)):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
            model.decoder.release(fresh)
    assert got.check().ids() == truth[len(prompt):] and got.last.usage.accepted >= 9
    assert addresses == [layer.k.data_ptr() for layer in cache]


def test_a_small_cache_preempts_and_loses_nothing(model):  # KV-09, KV-10, KV-11
    small = load(model.info.name, context=128, streams=1)
    engine = Engine(budget=24, mixed=9)
    engine.attach(small)
    lane = engine._lanes[0]
    lane.scheduler.streams = 6                              # more than there is room for: 128 tokens in all
    rng = random.Random(1)
    asked = [(prompt, Cancel()) for prompt in prompts(small, [rng.randrange(1, 40) for _ in range(10)])]
    answers: list[Got] = []
    for prompt, cancel in asked:
        answers.append(ask(engine, small, prompt, Sampling(max_tokens=30, ignore_eos=True), cancel,
                           draft=rng.choice([None, DraftSpec("lookup", 3)])))
        for _ in range(rng.randrange(5)):
            engine.step()
        if rng.random() < .2:
            rng.choice(asked)[1].set()
    drain(engine)
    assert lane.scheduler.preemptions > 0
    for (prompt, cancel), got in zip(asked, answers):
        expected = greedy(small, prompt, 30)
        assert got.check().ids() == (expected[:len(got.ids())] if cancel.is_set() else expected)
    stats = small.decoder.stats()
    assert stats["pages_used"] == 0 and stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    engine.detach(small)
    small.close()


def test_choices_share_the_prompts_pages(engine, model):
    prompt, = prompts(model, (50,))
    before = model.decoder.stats()["rows"]
    model.decoder.pool.clear()
    got = ask(engine, model, prompt, Sampling(n=3, temperature=1, seed=9, max_tokens=5, ignore_eos=True))
    drain(engine)
    got.check(3)
    computed = model.decoder.stats()["rows"] - before
    assert computed <= 50 + 2 * (50 - 48) + 3 * 5
    for index in range(3):
        assert len(got.ids(index)) == 5


def test_unloading_leaves_nothing_behind():  # ME-01
    import gc
    import weakref
    engine = Engine()
    keep = load("qwen2-fp16")
    engine.attach(keep)
    for _ in range(3):
        loaded = load("llama-fp16")
        engine.attach(loaded)
        got = ask(engine, loaded, "Hello", Sampling(max_tokens=3), draft=DraftSpec("llama-fp16", 2))
        drain(engine)
        got.check()
        engine.detach(loaded)
        loaded.close()
        gone = weakref.ref(loaded), weakref.ref(loaded.decoder)
        del loaded, got
        gc.collect()
        assert [ref() for ref in gone] == [None, None]
    engine.detach(keep)
    keep.close()
