"""Drafts and log-probabilities in the engine: passes change, tokens never do, and the counts are right."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from backends.base import DraftJob, DraftSpec, Sampling
from backends.engine.course import LENGTHS
from backends.engine.drafters import ModelDrafter
from backends.engine.loop import Engine
from backends.errors import InvalidRequest, ModelNotLoaded, NotSupported
from tests.toys import EOS, ToyDecoder, ask, drain, forced, naive, toy_model

PROMPT = tuple(b"Once upon a time")


class Scripted:
    """Proposes k tokens of which the first few are right: the script says how many of each."""

    reads_states = False

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
    report = usage.speculation
    assert report.acceptance == pytest.approx(5 / 12) and report.tokens_per_pass == pytest.approx(39 / 34)
    assert report.positions == ((3, 2), (2, 1), (1, 1), (1, 1)) and report.lengths == ((0, 31), (4, 3))
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


class Strict:
    """A judge that lets so many ids be made, and so many be verified."""

    def __init__(self, made, worth):
        self.made, self.verified, self.seen = made, worth, []

    def more(self, sure):
        self.seen.append(list(sure))
        return len(sure) < self.made

    def worth(self, sure):
        return self.verified


def test_a_model_ends_its_draft_where_the_judge_does_and_tells_how_sure_it_was():
    model, text = toy_model(), list(PROMPT)
    plain = ModelDrafter(model.decoder).propose([DraftJob(text, 6, Sampling(), 0)])[0]
    assert len(plain) == 6 and plain.dropped == 0
    judge, other = Strict(4, 3), Strict(9, 0)
    drafts = ModelDrafter(model.decoder).propose([DraftJob(text, 6, Sampling(), 0, 1, judge=judge),
                                                  DraftJob(text, 6, Sampling(), 0, 2), DraftJob(text, 2, Sampling(), 0, 3, judge=other)])
    assert [list(draft) for draft in drafts] == [plain[:3], plain, []] and [draft.dropped for draft in drafts] == [1, 0, 2]
    assert [len(sure) for sure in judge.seen] == [1, 2, 3, 4] and len(other.seen) == 1, "the second was the last anyway"
    for place, sure in enumerate(judge.seen[-1]):
        row = log_softmax(model.decoder.logits(text + plain[:place]))
        assert sure == pytest.approx(float(np.exp(row[plain[place]])), rel=.1)


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
    engine, model, other = Engine(), toy_model(), toy_model(name="other")
    other.info = replace(other.info, capabilities=("logprobs",))
    engine.attach(model), engine.attach(other)
    with pytest.raises(InvalidRequest, match="one sequence at a time") as caught:
        ask(engine, model, PROMPT, draft=DraftSpec("other"))
    assert caught.value.field == "draft"
    with pytest.raises(ModelNotLoaded):
        ask(engine, model, PROMPT, draft=DraftSpec("absent"))
    with pytest.raises(NotSupported, match="cannot verify drafts"):
        ask(engine, other, PROMPT, draft=DraftSpec("toy"))


# ------------------------------------------------------------------------------------------- length by measurement
def auto(name, sampling, *others, target=None, prompts=(PROMPT,)):
    engine, model = Engine(), target or toy_model()
    engine.attach(model)
    for other in others:
        engine.attach(other)
    answers = [ask(engine, model, prompt, sampling, draft=DraftSpec(name)) for prompt in prompts]
    drain(engine)
    for prompt, got in zip(prompts, answers):
        assert got.check().ids() == naive(model.decoder, prompt, sampling, len(prompt) + sampling.max_tokens)
    assert not any(one.decoder.open_slots or one.decoder.reserved for one in (model, *others))
    return engine, [got.last.usage.speculation for got in answers]


def test_a_length_by_measurement_changes_no_token_and_measures_while_idle():
    sampling = Sampling(temperature=.7, seed=3, max_tokens=60, ignore_eos=True)
    engine, (report,) = auto("lookup+same", sampling, toy_model(name="same"))
    assert report.draft == "lookup+same" and report.length is None and dict(report.lengths)[0] >= 2
    assert sum(passes for _, passes in report.lengths) + sum(right for _, right in report.positions) == 59
    costs = engine._lanes[0].controller.costs
    assert all(costs.seen(rows) >= 3 for rows in (1, *(1 + k for k in LENGTHS))), "what the answer did not need was measured afterwards"
    assert not engine._lanes[0].controller.unknown(), "and what an id costs"
    assert not engine.step()


def test_a_drafts_cache_begins_again_with_the_text_when_it_may_read_the_whole():
    from backends.engine.drafters import Places
    places, text = Places(ToyDecoder(reuse=False), growing=True), list(range(40))
    feed = places.catch_up(1, text, 10, 2)
    assert feed == text[30:] and places.reserve(1, len(feed))
    places.extend([(1, feed)])
    assert places.catch_up(1, [*text, 99], 30, 2) == [99], "not the whole: it goes on"
    places.reserve(1, 1), places.extend([(1, [99])])
    assert places.catch_up(1, [*text, 99, 7], 42, 2) == [*text, 99, 7]
    places.reserve(1, 42), places.extend([(1, [*text, 99, 7])])
    assert places.catch_up(1, [*text, 99, 7, 8], 50, 2) == [8]
    places.close()


def test_a_request_stops_the_measuring_and_gets_its_room():
    model = toy_model(ToyDecoder(room=60))
    engine = Engine()
    engine.attach(model)
    first = ask(engine, model, PROMPT, Sampling(max_tokens=4, ignore_eos=True), draft=DraftSpec("lookup"))
    while not first.done:
        engine.step()
    assert engine.step() and model.decoder.reserved >= 32
    got = ask(engine, model, PROMPT, Sampling(max_tokens=40, ignore_eos=True))
    engine.step()
    assert model.decoder.reserved < 32 and not got.done
    drain(engine)
    assert got.check().finish() == "length" and not model.decoder.open_slots


def test_measuring_that_fails_is_nobodys_fault():
    model = toy_model()
    engine = Engine()
    engine.attach(model)
    got = ask(engine, model, PROMPT, Sampling(max_tokens=4, ignore_eos=True), draft=DraftSpec("lookup"))
    while not got.done:
        engine.step()
    model.decoder.fault = lambda steps: RuntimeError("kernel")
    drain(engine)
    assert not model.decoder.open_slots and not engine.stats()["errors"]


def test_choices_are_reported_together():
    sampling = Sampling(temperature=1, seed=3, max_tokens=20, ignore_eos=True, n=2)
    engine, model = Engine(), toy_model()
    engine.attach(model), engine.attach(toy_model(name="same"))
    got = ask(engine, model, PROMPT, sampling, draft=DraftSpec("same", 3))
    drain(engine)
    usage = got.check(2).last.usage
    report = usage.speculation
    assert report.acceptance == 1 and report.sources == (("model", usage.drafted, usage.accepted),)
    assert report.positions[0][0] == sum(passes for length, passes in report.lengths if length)


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
    sampling = Sampling(max_tokens=12, logprobs=2, ignore_eos=True)
    got = ask(engine, model, PROMPT, sampling, draft=DraftSpec("lookup", 4))
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
                assert told[place].id == prompt[place]
                assert told[place].logprob == pytest.approx(truth[prompt[place]], abs=1e-4)
