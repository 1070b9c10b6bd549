"""Speculation through the whole engine: padded heads, the distribution of what is sampled, and many small requests of all kinds.

Short here; `make slow` runs the thousand sequences of each width of weights.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from backends.base import Draft, DraftSpec, Sampling
from backends.engine.loop import Engine
from backends.errors import MissingRequirement
from backends.registry import load_model
from tests import tiny
from tests.toys import SIZE, ToyDecoder, ask, drain, toy_model

FIXTURES = Path(__file__).parent / "fixtures"
REAL, TARGET_HEAD, DRAFT_HEAD = 200, 320, 256


# ------------------------------------------------------------------------------------------- heads of two widths
@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """The same weights under heads of 320 and of 256 rows, one tokenizer of 200 ids; what is padding would win every draw."""
    root = tmp_path_factory.mktemp("padded")
    made = {}
    for rows in (TARGET_HEAD, DRAFT_HEAD):
        tiny.FAMILIES[f"padded {rows}"] = "llama", {"vocab_size": rows}
        try:
            made[rows] = tiny.write(root / str(rows), f"padded {rows}")
        finally:
            del tiny.FAMILIES[f"padded {rows}"]
    wide, narrow = (load_file(made[rows] / "model.safetensors") for rows in (TARGET_HEAD, DRAFT_HEAD))
    for name in wide:
        narrow[name] = wide[name][:DRAFT_HEAD].clone() if wide[name].shape[0] == TARGET_HEAD else wide[name].clone()
    tokenizer = Tokenizer(models.WordLevel({f"t{n}": n for n in range(REAL)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for rows, weights in ((TARGET_HEAD, wide), (DRAFT_HEAD, narrow)):
        weights["lm_head.weight"][REAL:] = 40 * torch.randn(rows - REAL, weights["lm_head.weight"].shape[1],
                                                            generator=torch.Generator().manual_seed(rows))
        save_file(weights, made[rows] / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(made[rows] / "tokenizer.json"))
    loaded = {rows: load_model(made[rows], kernels="ref", dtype="float32", context=128, threads=1) for rows in made}
    yield loaded
    for model in loaded.values():
        model.close()


@pytest.mark.parametrize(("target", "draft"), [(TARGET_HEAD, DRAFT_HEAD), (DRAFT_HEAD, TARGET_HEAD)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_heads_padded_to_two_widths_draft_for_each_other(padded, target, draft, temperature):  # SP-01
    engine, (one, two) = Engine(), (padded[target], padded[draft])
    assert one.decoder.vocab.size == two.decoder.vocab.size == REAL
    engine.attach(one), engine.attach(two)
    sampling = Sampling(temperature=temperature, seed=3, max_tokens=41, ignore_eos=True)
    plain = ask(engine, one, (5, 6, 7), sampling)
    drain(engine)
    proposed = []
    propose = (drafter := engine._drafter(engine._lanes[0], DraftSpec(two.info.name))).propose
    drafter.propose = lambda batch: proposed.extend(found := propose(batch)) or found
    got = ask(engine, one, (5, 6, 7), sampling, draft=DraftSpec(two.info.name, 3))
    drain(engine)
    assert got.check().ids() == plain.check().ids() and max(plain.ids()) < REAL
    assert proposed and max(token for draft in proposed for token in draft) < REAL
    usage = got.last.usage
    assert usage.accepted == usage.drafted == 30 and usage.passes == 1 + 10, "the same weights are always right"
    engine.detach(one), engine.detach(two)


# ------------------------------------------------------------------------------------------- what comes out is p
P, Q = np.log([.5, .3, .2]), np.log([.2, .3, .5])
DRAWS, STREAMS = 20_000, 8


def three(logits: np.ndarray):
    """Always the same three tokens' logits, everything else out of reach."""
    row = np.full(SIZE, -1e9, np.float32)
    row[:3] = logits
    return lambda kv: row


@pytest.mark.parametrize("temperature", [.5, 1.0, 2.0])
def test_what_the_engine_samples_is_the_targets_distribution(temperature):  # SP-03
    """20,000 tokens, drafted by a model of another distribution in bfloat16, four at a time."""
    draft = torch.tensor(Q, dtype=torch.bfloat16).float().numpy()
    target, other = toy_model(ToyDecoder(three(P), reuse=False)), toy_model(ToyDecoder(three(draft), reuse=False), name="other")
    engine = Engine()
    engine.attach(target), engine.attach(other)
    answers = [ask(engine, target, (9, 9), Sampling(temperature=temperature, seed=seed, max_tokens=DRAWS // STREAMS, ignore_eos=True),
                   draft=DraftSpec("other", 4)) for seed in range(STREAMS)]
    drain(engine)
    counts = sum(np.bincount(got.check().ids(), minlength=3) for got in answers)
    wanted = np.exp(P / temperature) / np.exp(P / temperature).sum()
    assert counts.sum() == DRAWS and np.abs(counts / DRAWS - wanted).sum() / 2 < .02
    if temperature == 1:
        tried, right = (sum(got.last.usage.speculation.positions[0][i] for got in answers) for i in range(2))
        assert right / tried == pytest.approx(.63, abs=.02)


# ------------------------------------------------------------------------------------------- many small requests
def load(name: str, which: str, **options):
    try:
        return load_model(FIXTURES / name, threads=1, kernels=which, dtype="float32" if which == "ref" else "auto", **options)
    except MissingRequirement as error:
        pytest.skip(f"these kernels are not to be had here: {error}")


class Guess:
    """A drafter that knows the plain answers: right, wrong, or either at random."""

    def __init__(self, truths, kind: str) -> None:
        self.truths, self.kind, self.rng = truths, kind, random.Random(kind)

    def propose(self, batch):
        return [Draft(self._one(job), "lookup 2") for job in batch]

    def _one(self, job) -> list[int]:
        place = len(job.tokens)
        truth = next(text for text in self.truths if text[:place] == list(job.tokens))
        ahead = truth[place:place + job.most("lookup 2")]
        if self.kind == "random":
            return [token if self.rng.random() < .7 else self.rng.randrange(400) for token in ahead]
        return ahead if self.kind == "right" else [(token + 1) % 400 for token in ahead]

    reads_states = False

    def forget(self, sequence) -> None: ...

    shed = close = lambda self, *_: False


@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_fifty_prompts_with_drafts_of_each_quality(kind):  # SP-05
    """k of 1, 2, 4 and 8: right gives k + 1 tokens a pass and acceptance 1, wrong 1 and 0; ids are the plain ones each time."""
    model, engine, rng, tokens = load("llama-fp16", "cpu", context=128, streams=16), Engine(), random.Random(1), 9
    engine.attach(model)
    prompts = [tuple(rng.randrange(400) for _ in range(rng.randrange(2, 30))) for _ in range(50)]
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    plain = [ask(engine, model, prompt, sampling) for prompt in prompts]
    drain(engine)
    engine._drafters[engine._lanes[0], "lookup"] = Guess([[*p, *got.check().ids()] for p, got in zip(prompts, plain)], kind)
    for k in (1, 2, 4, 8):
        drafted = [ask(engine, model, prompt, sampling, draft=DraftSpec("lookup", k)) for prompt in prompts]
        drain(engine)
        assert [got.check().ids() for got in drafted] == [got.ids() for got in plain]
        for usage in (got.last.usage for got in drafted):
            if kind == "right":
                assert usage.accepted == usage.drafted and usage.passes == 1 + -(-(tokens - 1) // (k + 1))
            elif kind == "wrong":
                assert usage.accepted == 0 < usage.drafted and usage.passes == tokens
    engine.detach(model)
    model.close()


def many(name: str, which: str, count: int, seed: int) -> dict[str, int]:
    """Random requests on a real tiny model: chunked, preempted, drafted in every way, each equal to its plain answer alone."""
    model, draft = load(name, which, context=96, streams=1), load("llama-fp16", "cpu", context=80, streams=2)
    draft.info = replace(draft.info, name="draft")
    alone, rng = Engine(), random.Random(seed)
    totals = {"sequences": 0, "preemptions": 0, "accepted": 0, "cached_tokens": 0}
    phrase = [rng.randrange(400) for _ in range(24)]
    while totals["sequences"] < count:
        asked = []
        for _ in range(8):
            prompt = tuple((phrase[:rng.randrange(1, 25)] + [rng.randrange(400) for _ in range(rng.randrange(1, 9))]) * rng.choice([1, 1, 2]))
            asked.append((prompt, Sampling(temperature=rng.choice([0, .7, 1.2]), seed=rng.randrange(99), max_tokens=rng.randrange(1, 24),
                                           top_k=rng.choice([0, 0, 20]), top_p=rng.choice([1, .9]), ignore_eos=True,
                                           repetition_penalty=rng.choice([1, 1, 1.2]))))
        alone.attach(model)
        expected = []
        for prompt, sampling in asked:
            got = ask(alone, model, prompt, sampling)
            drain(alone)
            expected.append(got.check().ids())
        alone.detach(model)
        engine = Engine(budget=rng.choice([6, 20, 64]), mixed=rng.choice([3, 12]))
        engine.attach(model), engine.attach(draft)
        engine._lanes[0].scheduler.streams = rng.choice([2, 6])             # more than there is room for
        answers = []
        for prompt, sampling in asked:
            name_of = rng.choice([None, "lookup", "draft", "lookup+draft", model.info.name])
            spec = None if name_of is None else DraftSpec(name_of, rng.choice([None, 1, 2, 5]))
            answers.append(ask(engine, model, prompt, sampling, draft=spec))
            for _ in range(rng.choice([0, 0, 2])):
                engine.step()
        while not all(got.done for got in answers):         # and not what is measured afterwards
            engine.step()
        assert [got.check().ids() for got in answers] == expected
        stats = engine.stats()
        for key in ("preemptions", "accepted", "cached_tokens"):
            totals[key] += stats[key]
        totals["sequences"] += len(asked)
        engine.detach(model), engine.detach(draft)
        assert model.decoder.stats()["pages_used"] == draft.decoder.stats()["pages_used"] == 0
    model.close(), draft.close()
    return totals


WIDTHS = [("llama-fp16", "ref"), ("llama-fp16", "cpu"), ("llama-autogptq-8bit-g64", "cpu"), ("llama-autogptq-4bit-g128", "cpu")]


@pytest.mark.parametrize(("name", "which"), WIDTHS)
def test_random_sequences_equal_their_plain_answers(name, which):
    totals = many(name, which, 32, 3)
    assert all(totals.values()), totals


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), WIDTHS)
def test_a_thousand_random_sequences_equal_their_plain_answers(name, which):
    totals = many(name, which, 1000, 2)
    assert all(totals.values()), totals
