"""Estimates and verdicts against printed tables, hand-worked values and simulated truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gainz_ui.services import stats
from gainz_ui.services.stats import ALIKE, FASTER, FEWEST, LOOK_LEVELS, LOOKS, SLOWER, UNKNOWN, clustered, estimate, verdict


def test_signed_ranks_as_printed():
    # Hollander and Wolfe, table A.4: P(T+ >= t), which is P(T+ <= n(n+1)/2 - t)
    for count, most, chance in ((8, 3, 0.020), (8, 5, 0.039), (10, 8, 0.024), (10, 10, 0.042), (15, 25, 0.024)):
        assert stats.signed_rank_tail(count)[most] == pytest.approx(chance, abs=5e-4)


def test_the_tail_counts_sign_patterns():
    count = 9
    sums = [sum(rank for rank in range(1, count + 1) if pattern >> (rank - 1) & 1) for pattern in range(2 ** count)]
    tail = stats.signed_rank_tail(count)
    assert [tail[t] for t in (0, 4, 11, 45)] == [sum(s <= t for s in sums) / 2 ** count for t in (0, 4, 11, 45)]


def test_a_worked_example():
    # Hollander and Wolfe, example 3.3 (depression scores, Salsburg 1970): nine pairs, estimate -0.46, 96 % interval (-0.786, -0.010)
    before = (1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30)
    after = (0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29)
    found = estimate([b - a for a, b in zip(before, after)], level=0.04)
    assert math.log(found.ratio) == pytest.approx(-0.46, abs=5e-4)
    assert [math.log(bound) for bound in found.interval] == pytest.approx([-0.786, -0.010], abs=5e-4)


def test_five_units_have_no_interval_and_six_have_their_range():
    assert estimate([0.1, 0.2, 0.3, 0.4, 0.5]).interval is None
    low, high = estimate([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]).interval
    assert (math.log(low), math.log(high)) == (pytest.approx(0.1), pytest.approx(0.6))


def test_pairs_of_one_prompt_are_one_unit():
    assert clustered([1.0, 5.0, 2.0, 3.0, 9.0], ["b", "a", "b", "b", "a"]) == [2.0, 7.0]
    assert verdict(estimate(clustered([0.3] * 40, ["only"] * 40))).word == UNKNOWN


def test_not_a_number_is_refused():
    for units in ([], [0.1, math.nan], [math.inf]):
        with pytest.raises(ValueError):
            estimate(units)


@pytest.mark.parametrize("spikes", [0.0, 0.1])
@pytest.mark.parametrize("count", LOOKS)
def test_coverage(count, spikes):
    """93 to 97 % of the intervals hold the truth, with a tenth of the units spoilt in either direction too."""
    rng = np.random.default_rng([count, int(10 * spikes)])
    runs, truth, held = 3000, math.log(1.2), 0
    reach = stats._reach(count, 0.05)
    left, right = np.triu_indices(count)
    for _ in range(runs):
        units = truth + 0.03 * rng.standard_normal(count)
        units += np.where(rng.random(count) < spikes, 0.5 * rng.choice([-1, 1], count), 0.0)
        walsh = np.sort((units[left] + units[right]) / 2)
        held += walsh[reach - 1] <= truth <= walsh[-reach]
    assert 0.93 <= held / runs <= 0.97


def test_three_looks_err_no_more_often_than_promised():
    rng = np.random.default_rng(7)
    runs, wrong = 3000, 0
    rules = [(count, stats._reach(count, level), np.triu_indices(count)) for count, level in zip(LOOKS, LOOK_LEVELS)]
    for _ in range(runs):
        units = 0.05 * rng.standard_normal(LOOKS[-1])
        for _, reach, (left, right) in rules:
            walsh = np.sort((units[left] + units[right]) / 2)
            if walsh[reach - 1] > 0 or walsh[-reach] < 0:
                wrong += 1
                break
    assert 0.03 <= wrong / runs <= 0.06           # exact ranks spend a little less than they may


def test_the_four_words():
    steady = [0.001 * step for step in (-4, -3, -1, 0, 0, 1, 2, 5)]
    for shift, word in ((0.0, ALIKE), (0.012, ALIKE), (0.3, FASTER), (-0.3, SLOWER)):
        assert verdict(estimate([shift + unit for unit in steady])).word == word
    noisy = [0.1 * step for step in (-4, -3, -1, 0, 0.5, 1, 2, 5)]
    found = verdict(estimate(noisy))
    assert found.word == UNKNOWN and found.more > 8


def test_more_units_that_are_asked_for_do_tell():
    rng = np.random.default_rng(3)
    few = [0.04 + 0.06 * value for value in rng.standard_normal(8)]
    asked = verdict(estimate(few))
    assert asked.word == UNKNOWN
    told = sum(verdict(estimate([0.04 + 0.06 * v for v in rng.standard_normal(8 + 2 * asked.more)])).word != UNKNOWN
               for _ in range(50))
    assert told > 25


def test_a_planted_slowdown_is_found():
    rng = np.random.default_rng(11)
    found = sum(verdict(estimate(math.log(0.95) + 0.02 * rng.standard_normal(32))).word == SLOWER for _ in range(100))
    early = sum(verdict(estimate(math.log(0.7) + 0.05 * rng.standard_normal(8), LOOK_LEVELS[0])).word == SLOWER for _ in range(100))
    assert found >= 95 and early >= 99


def test_outliers_are_flagged_and_still_counted():
    units = [0.0, 0.01, -0.01, 0.02, -0.02, 0.01, 0.9]
    found = estimate(units)
    assert found.outliers == (6,) and found.units == len(units)
    assert found.geometric_mean == pytest.approx(math.exp(sum(units) / 7))
    assert FEWEST == 6
