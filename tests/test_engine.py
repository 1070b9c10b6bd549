"""The engine against the naive loop, and the rules of an answer: stops, limits, drafts, cancels, faults, events."""

from __future__ import annotations

import random
import threading
import time
from functools import partial

import numpy as np
import pytest

from backends.base import Cancel, DraftSpec, Message, Request, Sampling
from backends.engine.loop import Engine
from backends.errors import (ContextTooLong, InvalidRequest, ModelNotLoaded, NoChatTemplate, OutOfMemory, QueueFull, StepFailed)
from tests.toys import EOS, SIZE, Got, ToyDecoder, ask, drain, forced, naive, random_logits, toy_model

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
        for prompt, sampling, got, cancel, at in asked:
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
                assert got.text(index) == target.text.decode(visible)
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
    ("ABCDEFGHIJ", "DEFGHIJ", "ABC", "stop"), ("ABCDEFX", "DEFGHIJ", "ABCDEFX", "stop"), ("ABCDEF", "DEFGHIJ", "ABCDEF", "stop"),
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
    ((-1,), Sampling(), "prompt"), ((SIZE,), Sampling(), "prompt"), ((True,), Sampling(), "prompt"), (("a",), Sampling(), "prompt"),
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
            answers = [ask(engine, model, PROMPT, Sampling(temperature=.8, seed=seed, max_tokens=16, ignore_eos=True)) for seed in seeds]
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
    rules = [Sampling(max_tokens=2), Sampling(max_tokens=12, logit_bias=((greedy[3], -100.0),)), *[Sampling(max_tokens=12)] * 4]
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


# ------------------------------------------------------------------------------------------- drafts
class Scripted:
    """Proposes k tokens of which the first few are right: the script says how many to propose, and how many of them right."""

    def __init__(self, truth, script):
        self.truth, self.script, self.asked = truth, list(script), []

    def propose(self, batch):
        job, = batch
        k, right = self.script.pop(0) if self.script else (0, 0)
        place = len(job.tokens)
        self.asked.append(job.k)
        draft = list(self.truth[place:place + min(k, job.k)])
        return [[token if i < right else (token + 1) % 256 for i, token in enumerate(draft)]]

    def forget(self, sequence):
        pass

    shed = close = lambda self, *_: False


def scripted(script, sampling=Sampling(max_tokens=40, ignore_eos=True), length=4, context=4096):
    model = toy_model(ToyDecoder(context=context))
    engine = Engine()
    engine.attach(model)
    limit = len(PROMPT) + sampling.max_tokens if sampling.max_tokens else context
    expected = naive(model.decoder, PROMPT, sampling, limit)
    drafter = Scripted([*PROMPT, *expected], script)
    engine._drafters[engine._lanes[0], "lookup"] = drafter
    got = ask(engine, model, PROMPT, sampling, draft=DraftSpec("lookup", length))
    drain(engine)
    assert got.check().ids() == expected
    return got, model, drafter


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("right", ["all", "none", "random"])
def test_drafts_change_passes_never_tokens(k, right):  # SP-05
    rng = random.Random(k)
    script = [(k, {"all": k, "none": 0}.get(right, rng.randrange(k + 1))) for _ in range(100)]
    got, model, _ = scripted(script, length=k)
    usage = got.last.usage
    if right == "all":
        assert usage.accepted == usage.drafted and usage.passes == 1 + -(-39 // (k + 1))
    elif right == "none":
        assert usage.accepted == 0 and usage.passes == 40
    assert sum(got.drafted()) == usage.accepted
    assert model.decoder.calls == usage.passes


def test_the_count_of_proposed_and_accepted():  # SP-10
    got, *_ = scripted([(4, 4), (4, 1), (0, 0), (4, 0)])
    usage = got.last.usage
    assert (usage.drafted, usage.accepted) == (12, 5) and usage.accepted / usage.drafted == pytest.approx(.4167, abs=1e-4)
    # the prompt's pass yields a token too; then four rounds of 9 tokens, the one without a draft included; then one each
    assert usage.passes == 1 + 4 + (40 - 1 - 9)
    assert [len(event.ids) for event in got.of()][:5] == [1, 5, 2, 1, 1]
    assert got.drafted()[:11] == [False] + [True] * 4 + [False] + [True, False] + [False] * 3


@pytest.mark.parametrize("most", [1, 2, 6])
def test_a_draft_never_reaches_past_the_limit(most):  # SP-09
    got, _, drafter = scripted([(4, 4)] * 20, Sampling(max_tokens=most, ignore_eos=True))
    assert len(got.ids()) == most and got.finish() == "length"
    assert all(k <= most - 2 for k in drafter.asked)


def test_a_draft_never_reaches_past_the_context():  # SP-09
    got, *_ = scripted([(4, 4)] * 20, Sampling(ignore_eos=True), context=len(PROMPT) + 3)
    assert len(got.ids()) == 3 and got.finish() == "length"


def test_the_cache_holds_exactly_the_accepted_text_after_each_step():  # SP-06
    model = toy_model()
    engine = Engine()
    engine.attach(model)
    truth = [*PROMPT, *naive(model.decoder, PROMPT, Sampling(ignore_eos=True), len(PROMPT) + 30)]
    engine._drafters[engine._lanes[0], "lookup"] = Scripted(truth, [(4, 0), (4, 3), (4, 4), (4, 2)] * 3)
    got = ask(engine, model, PROMPT, Sampling(max_tokens=30, ignore_eos=True), draft=DraftSpec("lookup", 4))
    while engine.step():
        for slot in model.decoder.open_slots:
            assert slot.kv == truth[:len(PROMPT) + len(got.ids()) - 1]
    assert got.check().ids() == truth[len(PROMPT):]


def test_a_draft_of_the_model_itself_is_always_right_at_any_temperature():
    for temperature in (0, 1):
        target, same = toy_model(), toy_model(name="same")
        engine = Engine()
        engine.attach(target), engine.attach(same)
        got = ask(engine, target, PROMPT, Sampling(temperature=temperature, seed=1, max_tokens=31, ignore_eos=True),
                  draft=DraftSpec("same", 4))
        drain(engine)
        usage = got.check().last.usage
        assert usage.accepted == usage.drafted == 24 and usage.passes == 7


def test_an_end_inside_a_draft_ends_there():
    model = toy_model(ToyDecoder(forced(list(b"abc"), len(PROMPT))))
    engine = Engine()
    engine.attach(model)
    engine._drafters[engine._lanes[0], "lookup"] = Scripted([*PROMPT, *b"abc", EOS, 1, 2], [(4, 4)] * 9)
    got = ask(engine, model, PROMPT, Sampling(max_tokens=30), draft=DraftSpec("lookup", 4))
    drain(engine)
    assert (got.check().text(), got.finish(), got.ids()) == ("abc", "stop", [*b"abc", EOS])
    assert got.last.usage.accepted == 3


def test_a_draft_that_does_not_fit_is_refused():
    engine, model = Engine(), toy_model()
    other = toy_model(ToyDecoder(fingerprint="another"), name="other")
    engine.attach(model), engine.attach(other)
    with pytest.raises(InvalidRequest) as caught:
        ask(engine, model, PROMPT, draft=DraftSpec("other"))
    assert caught.value.field == "draft"
    with pytest.raises(ModelNotLoaded):
        ask(engine, model, PROMPT, draft=DraftSpec("absent"))


# ------------------------------------------------------------------------------------------- log-probabilities
def log_softmax(row):
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


@pytest.mark.parametrize("budget", [5, 256])
def test_logprobs_are_each_tokens_own(budget):  # GE-17
    model = toy_model()
    engine = Engine(budget=budget)
    engine.attach(model)
    engine._drafters[engine._lanes[0], "lookup"] = Scripted(
        [*PROMPT, *naive(model.decoder, PROMPT, Sampling(), len(PROMPT) + 12)], [(4, 3)] * 9)
    got = ask(engine, model, PROMPT, Sampling(max_tokens=12, logprobs=2, ignore_eos=True, temperature=0), draft=DraftSpec("lookup", 4))
    drain(engine)
    entries = [entry for event in got.check().of() for entry in event.logprobs]
    assert [entry.id for entry in entries] == got.ids()
    for place, entry in enumerate(entries):
        truth = log_softmax(model.decoder.logits([*PROMPT, *got.ids()[:place]]))
        assert entry.logprob == pytest.approx(truth[entry.id], abs=1e-4)
        assert [id for id, _, _ in entry.top] == np.argsort(-truth)[:2].tolist()
    assert max(len(event.logprobs) for event in got.of()) > 1


def test_prompt_logprobs_use_no_cached_prefix():  # KV-03
    prompts = [(*PROMPT, *b" there was"), (*PROMPT, *b" she went")]
    for order in (prompts, prompts[::-1]):
        engine, model = Engine(budget=7), toy_model()
        engine.attach(model)
        for prompt in order * 2:
            got = ask(engine, model, prompt, Sampling(max_tokens=2, prompt_logprobs=1, ignore_eos=True))
            drain(engine)
            told, = [event.prompt_logprobs for event in got.check().of() if event.prompt_logprobs is not None]
            assert got.last.usage.cached_tokens == 0 and told[0] is None and len(told) == len(prompt)
            for place in range(1, len(prompt)):
                truth = log_softmax(model.decoder.logits(prompt[:place]))
                assert told[place].id == prompt[place] and told[place].logprob == pytest.approx(truth[prompt[place]], abs=1e-4)


# ------------------------------------------------------------------------------------------- cancel, time, faults
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
        assert got.text() == model.text.decode(got.ids()) and not model.decoder.open_slots


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
    assert failing.check().finish() == "error" and isinstance(failing.last.error, StepFailed) and "boom" in str(failing.last.error)
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
    single = one(sampling=Sampling(max_tokens=1)).last.timing
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
