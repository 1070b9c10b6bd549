"""What a pass costs by its rows, what drafting costs, and how often drafts are right: measured, never assumed for long.

Pure bookkeeping over numbers that others give: no clock, no decoder, no text. `controller.py` decides by it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping

WARM = 3                    # first measurements of a number of rows, of which the fastest counts: kernels are still set up
# How fast (the costs of all numbers of rows, that of the measured one alone) follow a measurement. One number of rows time after time
# tells how fast the machine is at present; the first `FRESH` of it behind another number tell how the two compare, and `EACH`
# pass that it was away the more, up to `FARTHEST`: what a row more costs changes with what else the processor has to do. Of what makes plain passes
# look slower only so large a part (an exponent) is taken in.
SAME, OTHER, UPWARDS = (0.1, 0.03), (0.03, 0.15), 0.4
FRESH, EACH, FARTHEST = 2, 0.01, 0.4
CLIP = 1.25                 # a measurement beyond this factor is taken for it: somebody else had the processor
FIRST_WAIT, LAST_WAIT = 6, 192      # passes between two trials of what does not pay
LATELY, OFTEN = 8, 3        # passes of a number of rows that are as good as measuring it while nobody waits; rows for which that is done again
LONG = 2000                 # passes after which it is done again for the others
HOPE, SPREAD = 1.5, 0.3     # standard errors; variance of a drafted pass's gain, as it is believed at first, in plain passes
ENOUGH = 24                 # drafted passes by which one may say that drafts pay
SLOPE = 0.1                 # first guess: what a row more costs, as a part of one row's pass


class PassCosts:
    """Seconds of a verifier's pass by its rows. All of them move with each measurement, since texts grow longer and machines warmer for
    all rows alike."""

    def __init__(self) -> None:
        self._value: dict[int, float] = {}      # in units of ``_unit`` seconds
        self._unit = 1.0
        self._seen: dict[int, int] = {}
        self._rows: list[int] = []              # the known numbers of rows, rising
        self._plain = 1                         # rows of a pass without a draft
        self._last = self._run = self._away = 0         # rows measured last, how often in a row, and how long not before that
        self._count, self._when = 0, {}         # measurements, and the last one of each number of rows
        self._lately: dict[int, int] = {}       # measurements of each since `outdated`

    def saw(self, rows: int, seconds: float, plain: bool = False) -> None:
        """``plain``: without a draft. Such passes are few where drafts are made, and those behind a drafted one find their code out of
        the caches: what makes plain decoding look slow is believed more slowly."""
        seen = self._seen.get(rows, 0) + 1
        self._seen[rows] = seen
        self._count += 1
        if rows != self._last:
            self._last, self._run, self._away = rows, 0, self._count - self._when.get(rows, 0)
        self._run += 1
        self._when[rows] = self._count
        self._lately[rows] = self._lately.get(rows, 0) + 1
        if seen <= WARM:
            self._set(rows, min(self._value.get(rows, math.inf) * self._unit, seconds))
            if seen == WARM:
                self._in_order(rows)
            return
        ratio = min(max(seconds / (self._value[rows] * self._unit), 1 / CLIP), CLIP)
        if plain and ratio > 1:
            ratio **= UPWARDS
        unit, own = SAME if self._run > FRESH else (OTHER[0], min(FARTHEST, OTHER[1] + EACH * self._away))
        self._unit *= ratio ** unit
        self._plain = rows if plain else self._plain
        self._move(rows, ratio ** own)
        self._in_order(rows)

    def _move(self, rows: int, by: float) -> None:
        """The cost of ``rows`` alone. With that of a plain pass moves what has not been measured lately: it stays so many times as dear."""
        if rows != self._plain:
            self._value[rows] *= by
            return
        self._unit *= by
        for other in self._lately:
            if other != rows:
                self._value[other] /= by

    def _in_order(self, rows: int) -> None:
        """Fewer rows never cost more than many. Where two costs say so, that of ``rows``, which was measured last, is believed: the other
        is of a time when the machine had more or less to do besides."""
        for other in (self._plain, *self._value):           # a plain pass moves others as well
            own, value = self._value[rows], self._value.get(other)
            if value is not None and (value < own if other > rows else value > own):
                self._move(other, own / value)

    def _set(self, rows: int, seconds: float) -> None:
        self._value[rows] = seconds / self._unit
        self._rows = sorted(self._value)

    def learn(self, rows: int, seconds: float) -> None:
        """From outside, as good as several measurements."""
        self._set(rows, seconds)
        self._seen[rows] = max(self._seen.get(rows, 0), WARM + 1)
        self._lately[rows], self._when[rows] = LATELY, self._count
        self._in_order(rows)

    def vague(self, rows: int) -> bool:
        """Has it never been measured, or not for long, or is it of few rows, as most drafts are, and hardly measured since `outdated`?"""
        return self._seen.get(rows, 0) <= WARM or self._count - self._when.get(rows, 0) > LONG \
            or rows <= OFTEN and self._lately.get(rows, 0) < LATELY

    def outdated(self) -> None:
        """From now on the machine may be another one."""
        self._lately.clear()

    def seen(self, rows: int) -> int:
        return self._seen.get(rows, 0)

    def expected(self, rows: int) -> float | None:
        """None before the first measurement of any. Between two known numbers on the line, above them on its prolongation."""
        return self._at(rows, self._slope())

    def most(self, rows: int) -> float | None:
        """What it can cost at worst: rows beyond the known ones cost no more than passes of their own."""
        return self._at(rows, min(self._value.values(), default=0.0))

    def _at(self, rows: int, slope: float) -> float | None:
        """``slope``: of each row above the known ones, in units."""
        if not self._value:
            return None
        place = bisect_left(self._rows, rows)
        above = self._rows[place] if place < len(self._rows) else None
        if above == rows or place == 0:
            return self._value[above] * self._unit
        below = self._rows[place - 1]
        if above is None:
            return (self._value[below] + (rows - below) * slope) * self._unit
        share = (rows - below) / (above - below)
        return (self._value[below] * (1 - share) + self._value[above] * share) * self._unit

    def _slope(self) -> float:
        if not self._rows:
            return 0.0
        low, high = self._rows[0], self._rows[-1]
        if low == high:
            return SLOPE * self._value[low]
        return max(0.0, self._value[high] - self._value[low]) / (high - low)

    def table(self) -> Mapping[int, float]:
        return {rows: self._value[rows] * self._unit for rows in self._rows}


class DraftCosts:
    """Seconds that drafting takes: for the first id proposed, for each further one, and for each token that has to be read
    before. ``ratio``: the draft's size beside the target's, the first guess for everything."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self._id = self._more = self._read = None
        self.seen = 0                           # calls that read nothing first: an id's cost is known from these alone
        self._lately = 0                        # of them since `outdated`

    def saw(self, seconds: float, ids: int, behind: int) -> None:
        """One call: ``ids`` proposed, ``behind`` tokens read first (0: so few that they were read along with the first id)."""
        if behind:
            rest = max(seconds - self.draft(ids, 0.0), 0.3 * seconds)
            self._read = _follow(self._read, rest / behind)
            return
        self.seen += 1
        self._lately += 1
        if ids > 1 and self._id is not None:
            each = min(max((seconds - self._id) / (ids - 1), 0.1 * self._id), self._id)
            self._more = _follow(self._more, each)
            return
        each = seconds / max(1, ids)
        self._id = min(self._id or each, each) if self.seen <= WARM else _follow(self._id, each)

    @property
    def vague(self) -> bool:
        return self.seen <= WARM or self._lately < LATELY

    def outdated(self) -> None:
        """See `PassCosts.outdated`."""
        self._lately = 0

    def id(self, plain: float) -> float:
        """Seconds of a draft's first id; ``plain``: those of the target's pass of one row."""
        return self.ratio * plain if self._id is None else self._id

    def draft(self, ids: int, plain: float) -> float:
        """Seconds of a draft: the first id brings the draft's weights back into the caches, the others find them there."""
        first = self.id(plain)
        return 0.0 if not ids else first + (ids - 1) * (first if self._more is None else self._more)

    def read(self, plain: float, target: float | None) -> float:
        """Seconds a token read; ``target``: those of the target itself, where known."""
        if self._read is not None:
            return self._read
        return min(self.ratio * (target or plain), self.id(plain))


def _follow(old: float | None, new: float) -> float:
    if old is None:
        return new
    return old * min(max(new / old, 0.5), CLIP) ** 0.3 if old > 0 else new


class Acceptance:
    """How probable it is that place 1, 2, … of a draft is right, given that those before it are: counts that fade.

    ``before``: what is believed while little has been counted: of place 1, the others following the place before them; or
    another `Acceptance`. It weighs as ``weight`` counted drafts."""

    def __init__(self, before: float | Acceptance, weight: float, keep: float) -> None:
        self._before, self._weight, self._keep = before, weight, keep
        self._tried: list[float] = []
        self._right: list[float] = []

    def saw(self, length: int, right: int) -> None:
        """A draft of ``length`` ids, the first ``right`` of which were."""
        for place in range(min(length, right + 1)):
            if place == len(self._tried):
                self._tried.append(0.0)
                self._right.append(0.0)
            self._tried[place] = self._tried[place] * self._keep + 1
            self._right[place] = self._right[place] * self._keep + (place < right)

    def rates(self, longest: int) -> list[float]:
        """Of the places 1, 2, … ``longest``."""
        before = self._before.rates(longest) if isinstance(self._before, Acceptance) else None
        out, counted, rate = [], len(self._tried), self._before
        for place in range(longest):
            belief = rate if before is None else before[place]
            tried, right = (self._tried[place], self._right[place]) if place < counted else (0.0, 0.0)
            rate = (right + self._weight * belief) / (tried + self._weight)
            out.append(rate)
        return out

    def gain(self, longest: int) -> list[float]:
        """Expected accepted ids of drafts of 0, 1, … ``longest`` ids."""
        out, through = [0.0], 1.0
        for rate in self.rates(longest):
            through *= rate
            out.append(out[-1] + through)
        return out


class Trials:
    """When a source of drafts that does not pay is tried again: after a while, in passes, that doubles with each vain attempt."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}                     # source → the pass of its last draft
        self._wait: dict[str, int] = {}

    def due(self, source: str, now: int) -> bool:
        return source not in self._last or now - self._last[source] >= self._wait[source]

    def pays(self, source: str) -> None:
        self._wait[source] = FIRST_WAIT

    def made(self, source: str, now: int, right: int) -> None:
        waited = self._wait.get(source, FIRST_WAIT)
        self._wait[source] = FIRST_WAIT // 2 if right else min(LAST_WAIT, 2 * waited)
        self._last[source] = now


class Gain:
    """What drafting brings and costs in a pass, of late: tokens more, and plain passes more. ``before``: the two as they are believed
    while little has been counted, or another `Gain`; it weighs as ``weight`` counted passes."""

    def __init__(self, before: tuple[float, float] | Gain, weight: float, keep: float) -> None:
        self._before, self._weight, self._keep = before, weight, keep
        self._tokens = self._passes = self._squares = self._counted = 0.0
        self._seen = 0

    def saw(self, tokens: float, passes: float) -> None:
        self._seen += 1
        self._counted = self._counted * self._keep + 1
        self._tokens = self._tokens * self._keep + tokens
        self._passes = self._passes * self._keep + passes
        self._squares = self._squares * self._keep + (tokens - passes) ** 2

    def means(self) -> tuple[float, float]:
        before = self._before.means() if isinstance(self._before, Gain) else self._before
        whole = self._counted + self._weight
        return (self._tokens + self._weight * before[0]) / whole, (self._passes + self._weight * before[1]) / whole

    @property
    def ratio(self) -> float:
        """How many times as fast as plain decoding."""
        tokens, passes = self.means()
        return (1 + tokens) / max(1 + passes, 1e-9)

    @property
    def hope(self) -> float:
        """What the ratio may well be: `HOPE` standard errors more. Drafts that came out badly by chance are not given up for that; what
        is really lost to them is bounded elsewhere."""
        tokens, passes = self.means()
        spread = (self._squares + SPREAD * self._weight) / (self._counted + self._weight) - (tokens - passes) ** 2
        error = math.sqrt(max(spread, SPREAD / 4) / (self._counted + self._weight))
        return (1 + tokens + HOPE * error) / max(1 + passes, 1e-9)

    @property
    def proven(self) -> bool:
        return self._seen >= ENOUGH and self._tokens > self._passes
