"""How far a draft goes by how sure it is: what its probabilities are worth is counted, and its ends maximise what it brings."""

from __future__ import annotations

import itertools
import random

import pytest

from backends.engine.sureness import EDGES, Calibration, Going


def learned(truth, times: int = 4000) -> Calibration:
    """Of a draft whose id of probability p is right with ``truth(p)``."""
    rng, calibration = random.Random(1), Calibration()
    for _ in range(times):
        probability = rng.random()
        calibration.saw(probability, rng.random() < truth(probability))
    return calibration


def test_at_first_a_draft_is_believed_and_then_what_was_counted():
    fresh = Calibration()
    middles = [(low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0))]
    assert [fresh.rate(middle) for middle in middles] == pytest.approx(middles)
    boaster = learned(lambda probability: probability / 2)
    assert all(abs(boaster.rate(middle) - middle / 2) < .12 for middle in middles)
    turned = learned(lambda probability: 0.9)
    for _ in range(1500):
        turned.saw(0.55, False)
    assert turned.rate(0.55) < 0.05 and turned.rate(0.95) > 0.8, "the past fades, of one band alone"


def test_the_length_verified_is_the_one_that_brings_the_most():
    calibration, rng = Calibration(), random.Random(2)
    for _ in range(200):
        sure = [rng.random() for _ in range(rng.randint(1, 6))]
        rows = list(itertools.accumulate(rng.random() * .4 for _ in sure))
        through = list(itertools.accumulate((calibration.rate(one) for one in sure), lambda a, b: a * b))
        gains = [0.0, *(sum(through[:length]) - rows[length - 1] for length in range(1, len(sure) + 1))]
        found = Going(calibration, rows, .1, [.5] * len(sure)).worth(sure)
        assert gains[found] == pytest.approx(max(gains))


def test_a_further_id_is_made_where_its_chance_is_worth_its_price():
    going = Going(Calibration(), [.02, .05, .12], .1, [.4, .5, .6])
    assert going.more([.95]) and not going.more([.25])          # .5 of what the first is worth, against .1 + .03
    assert going.more([.95, .95]) and not going.more([.95, .25])  # .6 of both, against .1 + .07
    assert not going.more([.99, .99, .99]), "no place is left"
