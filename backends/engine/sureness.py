"""How far a draft goes, decided id by id by how sure the draft is of each: long where the text is plain to it, short where not.

The probability that a draft gives its own id tells how often the verifier takes it, once that has been counted (Li et al. 2024,
"EAGLE-2"; Huang et al. 2024, "SpecDec++"). Pure numbers: no decoder, no ids, no clock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf
from operator import mul

EDGES = (0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)     # between bands of probability
BETWEEN = array("d", EDGES)
WEIGHT, KEEP = 6.0, 0.995               # of what is believed of a band at first: that its probability is right


class Calibration:
    """How often ids are right that a draft gave this or that probability: counts that fade."""

    def __init__(self) -> None:
        bands = len(EDGES) + 1
        self.rates = array("d", ((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0))))       # of each band
        self._right = [WEIGHT * rate for rate in self.rates]
        self._tried = [WEIGHT] * bands

    def saw(self, probability: float, right: bool) -> None:
        band = bisect_right(EDGES, probability)
        self._tried[band] = self._tried[band] * KEEP + 1
        self._right[band] = self._right[band] * KEEP + right
        self.rates[band] = self._right[band] / self._tried[band]

    def rate(self, probability: float) -> float:
        return self.rates[bisect_right(EDGES, probability)]


class Going:
    """One draft's ends. ``rows``: what verifying 1, 2, … ids costs, in tokens at the present pace, as many as may be drafted;
    ``each``: the same of making one; ``rates``: how often place 1, 2, … is right once it is reached."""

    def __init__(self, calibration: Calibration, rows: Sequence[float], each: float, rates: Sequence[float]) -> None:
        self._calibration, self._rows = calibration, rows
        costs = (each + row - before for before, row in zip((0.0, *rows), rows))
        # by ids made: how probable these have to be, all together, for the next to bring more than it costs to make and to verify
        self._needs = array("d", (cost / rate if rate > 0 else inf for cost, rate in zip(costs, rates)))

    def more(self, sure: Sequence[float]) -> bool:
        """Does the next id bring more than it costs to make and to verify?"""
        place = len(sure)
        return place < len(self._rows) and self._through(sure)[-1] > self._needs[place]

    def ends(self) -> tuple[array, array, array]:
        """`more` in numbers, see `backends.kernels.Ahead`."""
        return BETWEEN, self._calibration.rates, self._needs

    def worth(self, sure: Sequence[float]) -> int:
        """The length that brings the most; making it is paid already."""
        brought = accumulate(self._through(sure))
        best, most = 0, 0.0
        for length, (tokens, cost) in enumerate(zip(brought, self._rows), 1):
            if tokens - cost > most:
                best, most = length, tokens - cost
        return best

    def _through(self, sure: Sequence[float]) -> list[float]:
        """That the first, the first two, … are all right."""
        return list(accumulate((self._calibration.rate(one) for one in sure), mul))
