"""Which tokens survive the filters, that draws follow the distribution, and that noise belongs to its place."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from backends.base import Sampling
from backends.engine import noise
from backends.engine.sampler import History, choose, is_plain, logprobs, probability, rows
from backends.errors import StepFailed

P, Q = np.log([.5, .3, .2]).astype(np.float32), np.log([.2, .3, .5]).astype(np.float32)


def draws(logits, count=400, **sampling) -> set[int]:
    return {choose(logits, Sampling(**sampling), 11, position) for position in range(count)}


def at(logits: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) / temperature)
    return weights / weights.sum()


# ------------------------------------------------------------------------------------------- noise
def test_bits_are_uniform_over_ids_positions_and_seeds():
    for sample in (noise.bits(noise.key(3, 5), np.arange(100_000)),
                   np.concatenate([noise.bits(noise.key(3, position), np.array([7])) for position in range(20_000)]),
                   np.concatenate([noise.bits(noise.key(seed, 5), np.array([7])) for seed in range(20_000)])):
        counts = np.bincount((sample >> np.uint64(26)).astype(int), minlength=64)
        expected = len(sample) / 64
        assert ((counts - expected) ** 2 / expected).sum() < 115           # chi², 63 degrees: p < 0.0001 above
        low = np.bincount((sample & np.uint64(63)).astype(int), minlength=64)
        assert ((low - expected) ** 2 / expected).sum() < 115
        steps = np.corrcoef(sample[:-1].astype(float), sample[1:].astype(float))[0, 1]
        assert abs(steps) < 4 / math.sqrt(len(sample))


def test_noise_is_a_function_of_seed_position_and_id_alone():
    ids = np.array([5, 900, 3])
    whole = noise.bits(noise.key(42, 9), np.arange(1000))
    assert (noise.bits(noise.key(42, 9), ids) == whole[ids]).all()
    assert not (noise.bits(noise.key(43, 9), ids) == whole[ids]).any()
    assert not (noise.bits(noise.key(42, 10), ids) == whole[ids]).any()
    assert noise.choice_seed(42, 0) == 42 and len({noise.choice_seed(42, i) for i in range(100)}) == 100
    assert noise.choice_seed(-1, 0) == 2**64 - 1


def test_gumbel_has_its_mean_and_its_ends():
    values = noise.gumbel(noise.bits(noise.key(0, 0), np.arange(200_000)))
    assert abs(values.mean() - np.euler_gamma) < .02 and abs(values.var() - math.pi ** 2 / 6) < .03
    ends = noise.gumbel(np.array([0, 2**32 - 1], np.uint64))
    assert ends == pytest.approx([noise.LOWEST, noise.HIGHEST])
    for level in (-2.0, 0.0, 3.0, 12.0, 30.0):
        edge = noise.bits_above(level)
        assert edge == 0 or noise.gumbel(np.array([edge - 1], np.uint64))[0] <= level


# ------------------------------------------------------------------------------------------- draws
@pytest.mark.parametrize("temperature", [.5, 1, 2])
def test_draws_follow_the_softmax(temperature):  # SP-03
    sampling = Sampling(temperature=temperature)
    counts = np.bincount([choose(P, sampling, 1, position) for position in range(20_000)], minlength=3) / 20_000
    assert abs(counts - at(P, temperature)).sum() / 2 < .02


def test_shared_noise_accepts_63_percent_and_independent_noise_29():  # SP-03, SP-04
    sampling = Sampling(temperature=1)
    target = [choose(P, sampling, 1, position) for position in range(20_000)]
    shared = [choose(Q, sampling, 1, position) for position in range(20_000)]
    apart = [choose(Q, sampling, 2, position) for position in range(20_000)]
    assert np.mean(np.equal(target, shared)) == pytest.approx(.63, abs=.02)
    assert np.mean(np.equal(target, apart)) == pytest.approx(.29, abs=.02)


def test_a_one_hot_draft_is_accepted_half_the_time_and_leaves_the_rest():  # SP-04
    target = np.array([choose(P, Sampling(temperature=1), 1, position) for position in range(20_000)])
    assert (target == 0).mean() == pytest.approx(.5, abs=.02)
    rejected = np.bincount(target[target != 0], minlength=3) / (target != 0).sum()
    assert rejected == pytest.approx([0, .6, .4], abs=.02)


@pytest.mark.parametrize("temperature", [.3, .7, 1, 2])
def test_pruning_the_whole_vocabulary_changes_no_draw(temperature):
    rng = np.random.default_rng(4)
    for position in range(60):
        logits = (rng.standard_normal(3000) * rng.choice([.5, 3, 8])).astype(np.float32)
        ids = np.arange(3000)
        scores = logits.astype(np.float64) / temperature + noise.gumbel(noise.bits(noise.key(9, position), ids))
        assert choose(logits, Sampling(temperature=temperature), 9, position) == scores.argmax()


@pytest.mark.parametrize("extra", [{"top_k": 40}, {"top_p": .9}, {"top_k": 300, "top_p": .8}, {"min_p": .02},
                                   {"top_k": 5, "top_p": .99, "min_p": .1}])
def test_filters_equal_a_full_sort(extra):
    rng = np.random.default_rng(5)
    for position in range(60):
        logits = (rng.standard_normal(2000) * rng.choice([.2, 3, 10])).astype(np.float32)
        sampling = Sampling(temperature=.8, **extra)
        order = np.argsort(-logits, kind="stable")[:sampling.top_k or None]
        mass = at(logits[order], .8)
        keep = min(len(order), int((mass.cumsum() < sampling.top_p - 1e-6).sum()) + 1) if sampling.top_p < 1 else len(order)
        order = order[:keep]
        order = order[mass[:keep] >= sampling.min_p * mass[0] * (1 - 1e-6)]
        scores = logits[order].astype(np.float64) / .8 + noise.gumbel(noise.bits(noise.key(9, position), order))
        assert choose(logits, sampling, 9, position) == order[scores.argmax()]


# ------------------------------------------------------------------------------------------- the filters' rules
@pytest.mark.parametrize("top_p", [0, 1e-8, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_tiny_top_p_is_the_argmax(top_p, dtype):  # GE-09
    logits = torch.randn(4096, generator=torch.Generator().manual_seed(2)).to(dtype).float()
    logits[777] = 30                                       # one best token in every type
    assert draws(rows(logits[None])[0], 20, temperature=1, top_p=top_p) == {777}


def test_flat_logits_keep_the_first_token_at_least():
    assert draws(np.zeros(4096, np.float32), 20, temperature=1, top_p=1e-8) == {0}


@pytest.mark.parametrize("sampling, expected", [
    ({"top_k": 1, "top_p": .8}, {0}), ({"top_p": 1.0}, {0, 1, 2}), ({"top_p": .5}, {0}), ({"top_p": .51}, {0, 1}),
    ({"top_k": 2, "top_p": .62}, {0}),     # of what top-k left, 0 has .625
    ({"top_k": 2, "top_p": .63}, {0, 1}), ({"min_p": .6}, {0, 1}), ({"min_p": .61}, {0}), ({"min_p": 1}, {0})])
def test_order_and_edges_of_the_filters(sampling, expected):  # GE-10
    assert draws(P, temperature=1, **sampling) == expected


@pytest.mark.parametrize("top_k, expected", [(0, {0, 1, 2}), (-1, {0, 1, 2}), (1, {0}), (2, {0, 1}), (3, {0, 1, 2}),
                                             (100_003, {0, 1, 2})])
def test_top_k_edges(top_k, expected):  # GE-11
    assert draws(P, temperature=1, top_k=top_k) == expected


def test_top_k_keeps_exactly_k_of_equals():
    assert draws(np.zeros(50, np.float32), 2000, temperature=1, top_k=3) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-9])
def test_no_or_next_to_no_temperature_is_greedy(temperature):
    assert draws(P, 50, temperature=temperature, top_p=.9) == {0}


# ------------------------------------------------------------------------------------------- bias, bans, penalties
def test_bias_and_bans():
    assert draws(P, temperature=1, logit_bias=((0, -100.0),)) == {1, 2}
    assert draws(P, temperature=0, logit_bias=((2, 5.0),)) == {2}
    assert choose(P, Sampling(), 0, 0, banned=[0]) == 1
    assert P[0] == np.log(np.float32(.5))                                  # the row itself is untouched


def test_repetition_counts_prompt_and_answer_the_others_the_answer():
    logits = np.array([2.0, 1.5, -1.0], np.float32)
    repeat = History.of(Sampling(repetition_penalty=2.0), [0])
    assert choose(logits, repeat.sampling, 0, 0, repeat) == 1              # 2/2 < 1.5
    repeat.add(1)
    assert choose(logits, repeat.sampling, 0, 0, repeat) == 0              # 2/2 > 1.5/2
    again = np.array([-1.0, -1.5, -4.0], np.float32)
    assert choose(again, repeat.sampling, 0, 0, History.of(repeat.sampling, [0])) == 1   # negative logits grow more so
    often = History.of(Sampling(frequency_penalty=.3), [0, 0, 0, 0])
    assert choose(logits, often.sampling, 0, 0, often) == 0
    often.add(0)
    assert choose(logits, often.sampling, 0, 0, often) == 0                # 2 - .3
    often.add(0)
    assert choose(logits, often.sampling, 0, 0, often) == 1                # 2 - .6
    once = History.of(Sampling(presence_penalty=.3), [])
    for _ in range(3):
        once.add(0)
    assert choose(logits, once.sampling, 0, 0, once) == 0                  # 2 - .3, however often
    assert History.of(Sampling(), [1]) is None


def test_plain_rows_are_recognised():
    assert is_plain(Sampling(), None, ()) and is_plain(Sampling(temperature=1, top_k=1), None, ())
    assert not is_plain(Sampling(logit_bias=((1, 1.0),)), None, ()) and not is_plain(Sampling(temperature=.1), None, ())
    assert not is_plain(Sampling(), None, [3])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(bad):
    logits = P.copy()
    logits[1] = bad
    for temperature in (0, 1):
        with pytest.raises(StepFailed):
            choose(logits, Sampling(temperature=temperature), 0, 0)
    with pytest.raises(StepFailed):
        choose(P, Sampling(), 0, 0, banned=[0, 1, 2])


# ------------------------------------------------------------------------------------------- log-probabilities
def test_logprobs_are_those_of_the_log_softmax():  # GE-15
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(3)) * 4
    expected = torch.log_softmax(logits.double(), 0)
    own, leaders = logprobs(logits.numpy(), 1234, 5)
    assert own == pytest.approx(float(expected[1234]), abs=1e-4)
    values, ids = expected.topk(5)
    assert [id for id, _ in leaders] == ids.tolist()
    assert [value for _, value in leaders] == pytest.approx(values.tolist(), abs=1e-4)
    assert sum(math.exp(value) for _, value in leaders) <= 1
    assert logprobs(logits.numpy(), 1, 0)[1] == []


@pytest.mark.parametrize("extra", [{}, {"top_k": 7}, {"top_p": .8}, {"min_p": .1}, {"temperature": 0}])
def test_logits_of_some_ids_alone_give_what_all_give_with_the_others_out_of_reach(extra):
    """A draft's head of few ids: the noise is that of the ids, not of the columns."""
    rng = np.random.default_rng(2)
    names = np.sort(rng.choice(2000, 150, replace=False))
    for position in range(80):
        few = (rng.standard_normal(150) * rng.choice([.3, 2, 6])).astype(np.float32)
        whole = np.full(2000, -np.inf, np.float32)
        whole[names] = few
        sampling = Sampling(**{"temperature": .9} | extra)
        assert choose(few, sampling, 5, position, names=names) == choose(whole, sampling, 5, position)


@pytest.mark.parametrize("temperature", [0.0, .5, 1.0, 1.5])
def test_the_probability_of_a_token_is_that_of_the_softmax_at_the_temperature(temperature):
    """Far tokens are left out: it is too high, by what they would have had."""
    for seed in range(4):
        logits = (3 * torch.randn(4000, generator=torch.Generator().manual_seed(seed))).numpy()
        exact = at(logits, temperature or 1.0)
        for column in (int(logits.argmax()), 17):
            found = probability(logits, column, Sampling(temperature=temperature))
            assert exact[column] <= found * (1 + 1e-5) and found <= 1.35 * exact[column]
