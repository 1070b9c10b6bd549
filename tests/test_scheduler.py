"""Who runs when: budgets, fairness, admission, preemption, and that every page comes back."""

from __future__ import annotations

import random

from backends.base import Cancel, DraftSpec, Sampling
from backends.engine.loop import Engine
from backends.engine.sequence import Sequence
from tests.toys import ToyDecoder, ask, drain, naive, toy_model

LONG = Sampling(max_tokens=30, ignore_eos=True)


def setup(engine: Engine | None = None, streams: int = 8, **decoder):
    model = toy_model(ToyDecoder(**decoder), streams=streams)
    engine = engine or Engine()
    engine.attach(model)
    return engine, model, engine._lanes[0].scheduler


def prompt(rng: random.Random, size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(256) for _ in range(size))


def test_a_step_never_exceeds_its_budget():
    engine, model, _ = setup(Engine(budget=7, mixed=7))
    rng = random.Random(0)
    for size in (1, 20, 9, 33):
        ask(engine, model, prompt(rng, size), LONG, draft=DraftSpec("lookup", 4))
    drain(engine)
    assert 0 < model.decoder.largest <= 7


def test_decoding_goes_on_while_a_long_prompt_is_read():
    engine, model, _ = setup(Engine(budget=64, mixed=8))
    rng = random.Random(1)
    first = ask(engine, model, prompt(rng, 4), LONG)
    engine.step()
    second = ask(engine, model, prompt(rng, 80), LONG)
    for count in range(2, 11):
        engine.step()
        assert len(first.ids()) == count            # a token each step, in spite of the prompt
    assert not second.ids() and model.decoder.largest <= 9
    engine.step()
    assert len(second.ids()) == 1                   # 80 tokens, 8 a step


def test_a_budget_smaller_than_the_streams_goes_round():
    engine, model, _ = setup(Engine(budget=2, mixed=2))
    answers = [ask(engine, model, (65 + i,), LONG) for i in range(5)]
    drain(engine, 200)
    for i, got in enumerate(answers):
        assert got.check().ids() == naive(model.decoder, (65 + i,), LONG, 31)
    for _ in range(5):
        answers.append(ask(engine, model, (65,), LONG))
    apart = []
    while not any(got.done for got in answers[5:]):
        engine.step()
        counts = [len(got.ids()) for got in answers[5:]]
        apart.append(max(counts) - min(counts))
    assert max(apart) <= 4 and max(apart[10:]) == min(apart[10:]) + 1      # an early start stays, and never grows
    drain(engine)


def test_first_come_first_served():
    engine, model, scheduler = setup(streams=2)
    answers = [ask(engine, model, (65, i), Sampling(max_tokens=4, ignore_eos=True)) for i in range(6)]
    order = []
    while engine.step():
        order += [i for i, got in enumerate(answers) if got.ids() and i not in order]
        assert len(scheduler.running) <= 2
    assert order == list(range(6))


def test_admission_waits_for_room_for_the_whole_prompt():
    engine, model, scheduler = setup(room=40)
    first = ask(engine, model, (65,) * 20, Sampling(max_tokens=4, ignore_eos=True))
    second = ask(engine, model, (66,) * 30, LONG)
    engine.step()
    assert len(scheduler.running) == 1 and len(scheduler.waiting) == 1
    drain(engine)
    assert len(first.check().ids()) == 4 and not scheduler.preemptions
    assert second.check().ids() == naive(model.decoder, (66,) * 30, LONG, 41)      # grown as far as it can


def test_the_youngest_gives_way_and_loses_nothing():
    engine, model, scheduler = setup(room=60)
    rng = random.Random(2)
    prompts = [prompt(rng, 12) for _ in range(4)]
    answers = [ask(engine, model, one, LONG) for one in prompts]
    oldest = []
    while engine.step():
        if scheduler.running:
            oldest.append(answers.index(next(got for got in answers if not got.done)))
    assert scheduler.preemptions > 0
    for one, got in zip(prompts, answers):
        assert got.check().ids() == naive(model.decoder, one, LONG, 42)
    assert [got.finish() for got in answers] == ["length"] * 4 and oldest == sorted(oldest)


def test_prefilling_sequences_are_preempted_before_they_block_older_ones():
    engine, model, scheduler = setup(Engine(budget=4, mixed=4), room=70)
    rng = random.Random(3)
    prompts = [prompt(rng, size) for size in (10, 25, 25, 5)]
    answers = [ask(engine, model, one, LONG) for one in prompts]
    drain(engine, 1000)
    for one, got in zip(prompts, answers):
        assert got.check().ids() == naive(model.decoder, one, LONG, len(one) + 30)


def test_a_drafter_in_the_same_cache_gives_way_to_its_own_sequences():
    engine, model, scheduler = setup(room=100)
    rng = random.Random(4)
    prompts = [prompt(rng, 20) for _ in range(3)]
    answers = [ask(engine, model, one, LONG, draft=DraftSpec("toy", 4)) for one in prompts]
    drain(engine, 1000)
    for one, got in zip(prompts, answers):
        assert got.check().ids() == naive(model.decoder, one, LONG, 50) and got.last.error is None
    assert not model.decoder.reserved


def test_blocks_in_use_return_to_zero_after_aborts():  # KV-09
    for reuse in (False, True):
        engine, model, _ = setup(Engine(budget=16), streams=4, room=200, reuse=reuse)
        rng, cancels = random.Random(5), []
        answers = []
        for i in range(250):
            cancel = Cancel()
            sampling = Sampling(max_tokens=rng.randrange(1, 12), ignore_eos=True)
            answers.append(ask(engine, model, prompt(rng, rng.randrange(1, 30)), sampling, cancel))
            if i >= 200:
                cancels.append((rng.randrange(20), cancel))
            for _ in range(4):
                engine.step()
            cancels = [(left - 1, one) if left else one.set() for left, one in cancels]
            cancels = [entry for entry in cancels if entry]
        drain(engine)
        assert all(got.check().done for got in answers)
        assert {got.finish() for got in answers} == {"length", "cancelled"}
        assert model.decoder.reserved == 0 and not model.decoder.open_slots


def test_wider_and_narrower_batches_in_turn():  # KV-10
    engine, model, _ = setup()
    for width, size in ((4, 9), (2, 9), (4, 9), (1, 60)):
        prompts = [prompt(random.Random(i), size) for i in range(width)]
        answers = [ask(engine, model, one, Sampling(max_tokens=10, ignore_eos=True)) for one in prompts]
        drain(engine)
        for one, got in zip(prompts, answers):
            assert got.check().ids() == naive(model.decoder, one, Sampling(ignore_eos=True), size + 10)


def test_parallel_requests_admitted_at_random_equal_their_solo_runs():  # KV-11
    rng = random.Random(6)
    for _ in range(5):
        engine, model, _ = setup(Engine(budget=rng.choice([8, 32])), streams=rng.choice([3, 12]),
                                 room=rng.choice([10**9, 150]))
        asked = []
        for marker in range(12):
            one = (marker, *prompt(rng, rng.randrange(0, 40)))
            asked.append((one, ask(engine, model, one, Sampling(max_tokens=12, ignore_eos=True))))
            for _ in range(rng.randrange(4)):
                engine.step()
        drain(engine)
        for one, got in asked:
            assert got.check().ids() == naive(model.decoder, one, Sampling(ignore_eos=True), len(one) + 12)


def test_two_models_share_the_loop():
    engine, model, _ = setup()
    other = toy_model(ToyDecoder(), name="other")
    engine.attach(other)
    one, two = ask(engine, model, (65,), LONG), ask(engine, other, (66,), LONG)
    assert drain(engine) == 30                       # both advance in each round
    assert one.check().ids() == naive(model.decoder, (65,), LONG, 31)
    assert two.check().ids() == naive(other.decoder, (66,), LONG, 31)
    assert engine.stats()["models"]["other"]["tokens"] == 30 and engine.stats()["tokens"] == 60


def test_further_choices_wait_for_the_prompt_and_then_share_it():
    engine, model, scheduler = setup(Engine(budget=8, mixed=8))
    got = ask(engine, model, tuple(range(40)), Sampling(n=3, max_tokens=4, ignore_eos=True, temperature=1, seed=1))
    engine.step()
    assert [one.index for one in scheduler.running] == [0]
    rows = 0
    fed = model.decoder.extend
    def count(steps):
        nonlocal rows
        rows += sum(len(step.tokens) for step in steps)
        return fed(steps)
    model.decoder.extend = count
    drain(engine)
    got.check(3)
    assert rows <= 40 - 8 + 3 * 4                    # the prompt was computed once


def test_the_invariant_of_the_cache(monkeypatch):
    """After each step the cache is the text so far, and shorter than it."""
    engine, model, scheduler = setup(Engine(budget=9, mixed=5), room=150)
    rng = random.Random(7)
    for _ in range(6):
        ask(engine, model, prompt(rng, rng.randrange(1, 25)), LONG, draft=DraftSpec(rng.choice(["lookup", "toy"]), 3))
    while engine.step():
        for sequence in scheduler.running:
            assert isinstance(sequence, Sequence)
            assert sequence.slot.kv == sequence.tokens[:sequence.slot.length] and sequence.slot.length < len(sequence.tokens)
