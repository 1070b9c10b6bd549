"""Paired ratios: an estimate, its interval and a verdict, without assuming the shape of a distribution.

A unit is one log ratio; where several pairs share a prompt the unit is that prompt's median, since they are not independent.
Estimate: Hodges and Lehmann (1963), the median of the Walsh averages. Interval: the exact distribution of Wilcoxon's signed
ranks, inverted (Hollander and Wolfe, Nonparametric Statistical Methods, 3.3). Knows numbers only: nothing of models or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

FEWEST = 6                      # units: with five, no signed-rank interval of 95 % exists (2 / 2⁵ > 0.05)
LEVEL = 0.05
SAME = 0.02                     # a difference within ±2 % is none that a person would notice
SPIKE = 3.5                     # modified z-score beyond which a unit is flagged (Iglewicz and Hoaglin 1993)
LOOKS = (8, 16, 32)
# Levels at which the three looks spend 5 % in all: Pocock-like spending α ln(1 + (e − 1) t) at t = 1/4, 1/2, 1 (Lan and DeMets
# 1983), made nominal by the recursion of Armitage, McPherson and Rowe (1969).
LOOK_LEVELS = (0.01787, 0.01790, 0.02600)

FASTER, SLOWER, ALIKE, UNKNOWN = "FASTER", "SLOWER", "SAME", "CAN'T TELL"


@dataclass(frozen=True)
class Estimate:
    """Of a ratio B to A. ``interval`` (low, high) covers with 1 − ``level`` at least; None below `FEWEST` units.
    ``outliers``: indices of flagged units, which count like every other."""

    units: int
    ratio: float
    geometric_mean: float
    interval: tuple[float, float] | None
    level: float
    outliers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """``word``: one of the four. ``more``: with CAN'T TELL, how many more units would likely tell; None: nobody can say."""

    word: str
    more: int | None = None


def clustered(log_ratios: Sequence[float], clusters: Sequence[Hashable]) -> list[float]:
    """One unit for each cluster (prompt): the median of its log ratios, in the order of first sight."""
    if len(log_ratios) != len(clusters):
        raise ValueError("one cluster for each log ratio")
    groups: dict[Hashable, list[float]] = {}
    for cluster, value in zip(clusters, log_ratios):
        groups.setdefault(cluster, []).append(value)
    return [median(values) for values in groups.values()]


def estimate(units: Sequence[float], level: float = LEVEL) -> Estimate:
    """``units``: log ratios. ValueError where there is none, or where one is not a finite number."""
    if len(units) == 0 or not all(math.isfinite(unit) for unit in units):
        raise ValueError("log ratios must be finite numbers, one at least")
    walsh = _walsh(units)
    reach = _reach(len(units), level)
    interval = None if reach is None else (math.exp(walsh[reach - 1]), math.exp(walsh[-reach]))
    return Estimate(len(units), math.exp(median(walsh)), math.exp(math.fsum(units) / len(units)), interval, level,
                    outliers(units))


def verdict(estimate: Estimate, same: float = SAME) -> Verdict:
    """What the interval says. Where it lies inside ±``same`` the answer is SAME, even if it leaves 1 out."""
    if estimate.interval is None:
        return Verdict(UNKNOWN, FEWEST - estimate.units)
    low, high = estimate.interval
    if 1 / (1 + same) <= low and high <= 1 + same:
        return Verdict(ALIKE)
    if low > 1:
        return Verdict(FASTER)
    if high < 1:
        return Verdict(SLOWER)
    return Verdict(UNKNOWN, _more(estimate, same))


def outliers(units: Sequence[float]) -> tuple[int, ...]:
    """Indices whose distance from the median is beyond `SPIKE` scaled median deviations. Flags; discards nothing."""
    middle = median(units)
    spread = 1.4826 * median(abs(unit - middle) for unit in units)
    return tuple(index for index, unit in enumerate(units) if spread > 0 and abs(unit - middle) > SPIKE * spread)


def signed_rank_tail(count: int) -> np.ndarray:
    """P(T ≤ t) for t = 0 … count(count + 1)/2: T is the sum of the ranks with a positive sign, signs being fair coins."""
    chances = np.zeros(count * (count + 1) // 2 + 1)
    chances[0] = 1.0
    for rank in range(1, count + 1):
        moved = np.zeros_like(chances)
        moved[rank:] = chances[:-rank]
        chances = (chances + moved) / 2
    return np.cumsum(chances)


def _walsh(units: Sequence[float]) -> list[float]:
    """Means of all pairs, each value with itself too, in order."""
    values = np.asarray(units, dtype=float)
    left, right = np.triu_indices(len(values))
    return np.sort((values[left] + values[right]) / 2).tolist()


def _reach(count: int, level: float) -> int | None:
    """Which Walsh average, counted from either end, bounds the interval."""
    if count < FEWEST:
        return None
    reach = int(np.searchsorted(signed_rank_tail(count), level / 2 * (1 + 1e-12), side="right"))
    return reach or None


def _more(estimate: Estimate, same: float) -> int | None:
    """Units still missing if the spread stays as it is: half-widths shrink with the root of their number."""
    low, high = (math.log(bound) for bound in estimate.interval)
    half, middle = (high - low) / 2, abs(math.log(estimate.ratio))
    wanted = max(middle, math.log1p(same) - middle)          # to leave 1 out, or to lie inside the margin: whichever is nearer
    if wanted <= 0 or half <= 0:
        return None
    return max(math.ceil(estimate.units * ((half / wanted) ** 2 - 1)), 1)
