"""The engine against the naive loop, and the rules of an answer: stops, limits, seeds and choices."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from backends.base import Cancel, DraftSpec, Message, Sampling
from backends.engine.loop import Engine
from backends.errors import ContextTooLong, InvalidRequest, NoChatTemplate
from tests.toys import EOS, SIZE, Got, ToyDecoder, ask, drain, forced, naive, random_logits, toy_model, shown

PROMPT = tuple(b"Once upon a time")


def one(logits=random_logits, prompt=PROMPT, sampling=Sampling(max_tokens=32), engine=None, **decoder) -> Got:
    """The answer of a fresh toy to one request."""
    model = toy_model(ToyDecoder(logits, **decoder))
    engine = engine or Engine()
    engine.attach(model)
    got = ask(engine, model, prompt, sampling)
    drain(engine)
    assert not model.decoder.open_slots and not model.decoder.reserved
    return got.check(sampling.n)


def say(text: str, sampling: Sampling, prompt=PROMPT) -> Got:
    return one(forced(list(text.encode()), len(prompt)), prompt, sampling)


# ------------------------------------------------------------------------------------------- equality with the naive loop
def random_sampling(rng: random.Random) -> Sampling:
    return Sampling(temperature=rng.choice([0, .7, 1.2]), seed=rng.randrange(10**6), max_tokens=rng.randrange(1, 40),
                    top_k=rng.choice([0, 0, 5]), top_p=rng.choice([1, 1, .9]), repetition_penalty=rng.choice([1, 1, 1.3]),
                    frequency_penalty=rng.choice([0, 0, .5]), min_tokens=rng.choice([0, 0, 1]), ignore_eos=rng.random() < .2,
                    n=rng.choice([1, 1, 1, 2]))


@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_random_sequences_equal_the_naive_loop(seed):
    """Chunking, batching, preemption, prefix reuse, drafts of both kinds, cancels and penalties, mixed at random."""
    rng, seen = random.Random(seed), 0
    totals = {"preemptions": 0, "accepted": 0, "cached_tokens": 0, "cancelled": 0}
    while seen < 100:
        target = toy_model(ToyDecoder(room=rng.choice([10**9, 180, 120, 120]), context=200), streams=rng.choice([1, 4, 8]))
        near = partial(random_logits, noise_of="other", amount=rng.choice([0, .3]))
        draft = toy_model(ToyDecoder(near, context=rng.choice([200, 60]), room=rng.choice([10**9, 150])), name="draft")
        engine = Engine(budget=rng.choice([4, 16, 64]), mixed=rng.choice([3, 16]))
        engine.attach(target), engine.attach(draft)
        shared, asked = [rng.randrange(256) for _ in range(20)], []
        for _ in range(8):
            prompt = shared[:rng.randrange(1, 20)] + [rng.randrange(256) for _ in range(rng.randrange(1, 15))]
            prompt = tuple(prompt * 2 if rng.random() < .5 else prompt)
            name = rng.choice([None, "lookup", "draft", "lookup+draft", "toy"])
            spec = None if name is None else DraftSpec(name, rng.choice([1, 3, 5]))
            cancel, sampling = Cancel(), random_sampling(rng)
            got = ask(engine, target, prompt, sampling, cancel, draft=spec)
            asked.append((prompt, sampling, got, cancel, rng.randrange(20) if rng.random() < .2 else None))
            for _ in range(rng.choice([0, 0, 2])):
                engine.step()
        step = 0
        while engine.step():
            step += 1
            for *_, cancel, at in asked:
                if at == step:
                    cancel.set()
            assert step < 5000
        for prompt, sampling, got, cancel, _ in asked:
            got.check(sampling.n)
            for index in range(sampling.n):
                expected = naive(target.decoder, prompt, sampling, len(prompt) + sampling.max_tokens, index)
                ids = got.ids(index)
                if got.finish(index) == "cancelled":
                    assert cancel.is_set() and ids == expected[:len(ids)]
                    totals["cancelled"] += 1
                else:
                    assert ids == expected
                visible = ids[:-1] if got.finish(index) == "stop" else ids
                assert got.text(index) == shown(visible, cut=got.finish(index) != "stop")
                seen += 1
        for model in (target, draft):
            assert not model.decoder.open_slots and not model.decoder.reserved
        stats = engine.stats()
        for name in ("preemptions", "accepted", "cached_tokens"):
            totals[name] += stats[name]
        assert not stats["errors"] and not stats["queue"] and not stats["running"]
    assert all(totals.values()), totals      # each of these was really exercised


# ------------------------------------------------------------------------------------------- stop strings and end tokens
@pytest.mark.parametrize("said, stop, text, finish", [
    ("ABCDEFGHIJ", "DEFGHIJ", "ABC", "stop"), ("ABCDEFX", "DEFGHIJ", "ABCDEFX", "stop"),
    ("ABCDEF", "DEFGHIJ", "ABCDEF", "stop"),
    ("ababac", "abac", "ab", "stop"), ("世界", "界", "世", "stop")])
def test_stop_strings_across_token_edges(said, stop, text, finish):  # GE-01
    got = say(said, Sampling(stop=(stop,), max_tokens=40))
    assert got.text() == text and got.finish() == finish
    assert got.of()[-1].matched == (stop if stop in said else EOS)


def test_only_a_possible_stop_is_held_and_released_at_the_end():  # GE-02
    got = say("ordinary text", Sampling(stop=("x" * 40,), max_tokens=40))
    assert [event.text for event in got.of()][:-1] == [*"ordinary te", "", "xt"][:11] + ["", "xt"]
    held = say("tail xxx", Sampling(stop=("x" * 40,), max_tokens=40))
    assert held.text() == "tail xxx" and held.of()[-1].text == "xxx"
    cut = say("tail xxx and more", Sampling(stop=("x" * 40,), max_tokens=8))
    assert (cut.text(), cut.finish()) == ("tail xxx", "length")


def test_generation_ends_at_the_stop_string():
    model = toy_model(ToyDecoder(forced(list(b"ABCDEFGHIJ"), len(PROMPT))))
    engine = Engine()
    engine.attach(model)
    ask(engine, model, PROMPT, Sampling(stop=("CD",), max_tokens=40))
    assert drain(engine) == 4 and model.decoder.calls == 4


@pytest.mark.parametrize("token", [7, 9])
def test_any_end_token_stops_and_does_not_show(token):  # TK-09
    got = one(forced([65, token, 66], len(PROMPT)), eos=frozenset({5, 7, 9}))
    assert (got.text(), got.finish(), got.of()[-1].matched, got.ids()) == ("A", "stop", token, [65, token])


def test_ignore_eos_runs_to_the_limit():  # TK-10
    got = one(forced([65, EOS, 66], len(PROMPT)), sampling=Sampling(ignore_eos=True, max_tokens=32))
    assert len(got.ids()) == 32 and got.finish() == "length" and got.text() == "AB"


def test_stop_ids_and_min_tokens():
    got = one(forced([65, 66, 67], len(PROMPT)), sampling=Sampling(stop_ids=(66,), max_tokens=9))
    assert (got.text(), got.of()[-1].matched) == ("A", 66)
    flat = one(lambda kv: np.eye(1, SIZE, EOS, dtype=np.float32)[0], sampling=Sampling(min_tokens=5, max_tokens=9))
    assert len(flat.ids()) == 6 and EOS not in flat.ids()[:5] and flat.finish() == "stop"
    late = say("abab", Sampling(stop=("ab",), min_tokens=3, max_tokens=9))
    assert (late.text(), late.finish()) == ("abab", "stop") and late.of()[-1].matched == EOS
    assert say("ababab", Sampling(stop=("ab",), min_tokens=3, max_tokens=9)).text() == "abab"


def test_a_character_that_is_never_completed_shows_as_one_mark():
    got = one(forced([65, 0xE4, 0xB8], len(PROMPT)))
    assert got.text() == "A\ufffd"


# ------------------------------------------------------------------------------------------- lengths
def test_max_tokens_zero_one_and_none():  # GE-05
    zero = one(sampling=Sampling(max_tokens=0))
    assert (zero.ids(), zero.text(), zero.finish(), zero.last.usage.prompt_tokens) == ([], "", "length", len(PROMPT))
    scored = one(sampling=Sampling(max_tokens=0, prompt_logprobs=1))
    assert scored.finish() == "length" and len(scored.of()[-1].prompt_logprobs) == len(PROMPT) and not scored.ids()
    single = one(prompt=(65,), sampling=Sampling(max_tokens=0, prompt_logprobs=1))
    assert single.of()[-1].prompt_logprobs == (None,)
    assert len(one(sampling=Sampling(max_tokens=1, ignore_eos=True)).ids()) == 1


def test_the_context_rule():  # GE-07
    engine, model = Engine(), toy_model(ToyDecoder(context=64))
    engine.attach(model)
    with pytest.raises(ContextTooLong) as caught:
        ask(engine, model, (65,) * 70)
    assert {"70", "64"} <= set(str(caught.value).replace(".", " ").replace(";", " ").split())
    with pytest.raises(ContextTooLong):
        ask(engine, model, (65,) * 40, Sampling(max_tokens=30))
    with pytest.raises(ContextTooLong):
        ask(engine, model, (65,) * 64)
    got = ask(engine, model, (65,) * 40, Sampling(ignore_eos=True))
    drain(engine)
    assert len(got.ids()) == 24 and got.check().finish() == "length" and got.last.usage.prompt_tokens == 40


@pytest.mark.parametrize("prompt", ["", ()])
def test_an_empty_prompt_is_one_bos_or_refused(prompt):  # GE-06
    engine, model, bare = Engine(), toy_model(bos_id=1), toy_model(name="bare")
    engine.attach(model), engine.attach(bare)
    busy = ask(engine, model, PROMPT, Sampling(max_tokens=20, ignore_eos=True))
    engine.step()
    with pytest.raises(InvalidRequest):
        ask(engine, bare, prompt, Sampling(max_tokens=2))
    got = ask(engine, model, prompt, Sampling(max_tokens=2))
    drain(engine)
    assert got.check().last.usage.prompt_tokens == 1 and len(busy.check().ids()) == 20


@pytest.mark.parametrize("prompt, sampling, field", [
    ((-1,), Sampling(), "prompt"), ((SIZE,), Sampling(), "prompt"), ((True,), Sampling(), "prompt"),
    (("a",), Sampling(), "prompt"),
    (PROMPT, Sampling(logit_bias=((SIZE + 5, 1.0),)), "logit_bias"), (PROMPT, Sampling(stop_ids=(10**6,)), "stop_ids")])
def test_ids_outside_the_vocabulary_are_refused_and_touch_nobody(prompt, sampling, field):  # SV-08
    engine, model = Engine(), toy_model()
    engine.attach(model)
    neighbour = ask(engine, model, PROMPT, Sampling(max_tokens=8, ignore_eos=True))
    engine.step()
    with pytest.raises(InvalidRequest) as caught:
        ask(engine, model, prompt, sampling)
    assert caught.value.field == field
    drain(engine)
    assert neighbour.ids() == naive(model.decoder, PROMPT, Sampling(ignore_eos=True), len(PROMPT) + 8)


def test_a_chat_needs_a_template():
    engine, model, chatty = Engine(), toy_model(), toy_model(name="chatty", template="{{ messages[0].content }}!")
    engine.attach(model), engine.attach(chatty)
    with pytest.raises(NoChatTemplate):
        ask(engine, model, (Message("user", "hi"),))
    got = ask(engine, chatty, (Message("user", "hi"),), Sampling(max_tokens=3, ignore_eos=True))
    drain(engine)
    assert got.last.usage.prompt_tokens == 3 and got.ids() == naive(chatty.decoder, b"hi!", Sampling(ignore_eos=True), 6)


# ------------------------------------------------------------------------------------------- one place, one sample
def test_neighbours_do_not_move_a_seeded_answer():  # GE-13
    sampling = Sampling(temperature=.8, seed=42, max_tokens=16, ignore_eos=True)
    alone = one(sampling=sampling).ids()
    for neighbours in ([None], [7], [None, 7], [7, None]):
        for place in range(len(neighbours) + 1):
            engine, model = Engine(), toy_model()
            engine.attach(model)
            seeds = [*neighbours[:place], 42, *neighbours[place:]]
            answers = [ask(engine, model, PROMPT, replace(sampling, seed=seed)) for seed in seeds]
            drain(engine)
            assert answers[place].ids() == alone


def test_a_fresh_seed_is_told_and_gives_the_answer_again():
    first = one(sampling=Sampling(temperature=1, max_tokens=16, ignore_eos=True))
    other = one(sampling=Sampling(temperature=1, max_tokens=16, ignore_eos=True))
    assert first.last.seed != other.last.seed
    again = one(sampling=Sampling(temperature=1, max_tokens=16, ignore_eos=True, seed=first.last.seed))
    assert again.ids() == first.ids() and again.last.seed == first.last.seed


def test_rules_of_one_request_stay_its_own():  # GE-19
    engine, model = Engine(), toy_model()
    engine.attach(model)
    greedy = naive(model.decoder, PROMPT, Sampling(), len(PROMPT) + 12)
    plain = Sampling(max_tokens=12)
    rules = [Sampling(max_tokens=2), replace(plain, logit_bias=((greedy[3], -100.0),)), *[plain] * 4]
    answers = [ask(engine, model, PROMPT, sampling) for sampling in rules]
    drain(engine)
    for sampling, got in zip(rules, answers):
        assert got.check().ids() == naive(model.decoder, PROMPT, sampling, len(PROMPT) + sampling.max_tokens)
    assert answers[1].ids() != answers[2].ids()


def test_choices_differ_and_share_the_prompt():
    sampling = Sampling(temperature=1, seed=3, n=4, max_tokens=12, ignore_eos=True)
    model = toy_model()
    engine = Engine()
    engine.attach(model)
    got = ask(engine, model, PROMPT, sampling)
    drain(engine)
    got.check(4)
    assert [got.ids(i) for i in range(4)] == [naive(model.decoder, PROMPT, sampling, len(PROMPT) + 12, i) for i in range(4)]
    assert got.ids(0) == one(sampling=Sampling(temperature=1, seed=3, max_tokens=12, ignore_eos=True)).ids()
    assert len({tuple(got.ids(i)) for i in range(4)}) == 4
    assert got.last.usage.prompt_tokens == len(PROMPT) and got.last.usage.completion_tokens == 48
