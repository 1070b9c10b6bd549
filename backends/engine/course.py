"""How long a draft pays in one sequence: chosen pass by pass from what was measured, within a budget of losses.

Length. A pass over r rows costs C(r); a draft of k ids adds k rows and k · d for making it, and is expected to bring g(k) tokens
more. The length that maximises (tokens expected) / (seconds expected) is taken, as in SmartSpec (Liu et al. 2024); where that is
0, drafting rests and is tried again after a while that doubles with each vain attempt. A model of the same vocabulary says how sure
it is of each id: its drafts end where that is too little (`sureness.py`), and are made as long as they have paid so far.

Budget. Each answer may lose `START` of the time that `HORIZON` plain tokens take (and of its prompt's time), `PROVEN` where drafts
of that name have paid of late, and `GROWTH` of each further token's; what drafts gain is added. A draft is only made when the
budget covers its worst case: every id wrong, and a number of rows that was never measured as dear as passes of their own. So an
answer of `HORIZON` tokens is at most 1.3 % slower than a plain one, whatever text and draft are, and 1.8 % where a text turns
against a draft that has paid; the rest up to 3 % is for what measuring itself costs and for its errors.

Knows numbers: no decoder, no ids, and no clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backends.base import DraftSpec, Speculation
from backends.engine.costs import WARM, Acceptance, Gain, Trials
from backends.engine.drafters import MODEL
from backends.engine.sureness import Going
from backends.engine.tally import Counts
from backends.speculative import parts

if TYPE_CHECKING:
    from backends.engine.controller import Controller

HORIZON = 256               # tokens over which the promise holds
START, PROVEN, GROWTH = 0.009, 0.014, 0.004
CAP = 16                    # plain passes: more than this is never saved up to be lost later
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 11, 15)      # ids of a draft, where its length is chosen here: each number of rows has to be set up
MARGIN = 1.05               # gain below which drafting is not worth its risk: what is measured here misses a hundredth or two of it
HOPELESS = 0.9              # times as fast: a model that has come to less over all answers is only tried; any other may begin in each, since texts differ
FAIR = 0.97                 # of what a plain pass takes between drafted ones, it would take among its like
SETTLE = 2                  # plain passes before anything is judged by them
SOON, REFRESH, AGAIN = 8, 48, 2      # drafted passes after which plain ones are measured again, at first and at most; in a row that this takes
KEPT = 8                    # passes for which a length, or what ids cost, is not looked for again, where nothing was drafted meanwhile
NAP, LONGEST_NAP = 6, 24    # passes for which a model that was declined is not asked, more each time: between two passes all code is slow
PATIENT, SELDOM = 12, 4     # vain looks in a text after which it is looked up every second pass, later every fourth; never more seldom
SURE = 7                    # most ids of a draft that ends by itself
TRIAL = 2                   # ids of a draft that is made to see whether drafting pays by now
READ = 0.5                  # of what may be lost, so much may be spent on reading: the rest is for drafts that come of it
AT_ONCE = 512               # tokens that a drafter reads in one call
NEAR = 8                    # tokens that a draft reads along with its first id at no cost worth counting
NOTHING = (0, 0)                        # drafted and accepted in a pass without a draft


@dataclass
class Rests:
    """Passes of one sequence without a draft that are not booked yet."""

    passes: int = 0
    tokens: int = 0
    measured: int = 0                   # of the passes; the others shared theirs with a prompt
    streams: int = 1
    seconds: float = 0.0                # of the measured ones
    vain: float = 0.0                   # that looking for a draft took, or making one that was not worth verifying


class Course:
    """One sequence's: how long its next draft may be, what its drafts became, what it may still lose."""

    def __init__(self, controller: Controller, spec: DraftSpec, prompt: int, room: int, ratio: float, greedy: bool) -> None:
        self.controller, self.spec, self.ratio, self.prompt = controller, spec, ratio, prompt
        self._calibration = controller.calibration(spec.name, greedy)
        self._going: Going | None = None                    # of the draft that is being made
        self._priced: tuple[int, ...] = ()                  # under which circumstances
        self._most, self._dearest = 0, 0.0                  # ids of that draft, and what is lost if all are wrong
        self._gain: Gain | None = None                      # of what a model drafts here
        self._sure: list[float] = []                        # of the draft that is being verified
        self.spent = False                                  # has a model made ids for this pass?
        self.looks, model = parts(spec.name)
        self.modelled = model is not None
        self._until = 0                                     # the pass before which the model is not asked
        self._look = self._vain = 0                         # the pass before which nothing is looked up; vain looks in a row
        self.horizon = min(HORIZON, room)
        self.balance: float | None = None                   # seconds that may be lost
        self.counts = Counts()
        self.read = 0                                       # tokens that the last call had to read first
        self._passes = self._plain = self._declined = 0     # _plain: passes since one without a draft
        self._refresh, self._refreshing = SOON, 0           # how many are enough; plain passes of the row that measures them then
        self._luck: dict[str, Acceptance] = {}
        self._trials = Trials()                             # of what is looked up: that depends on the text
        self._at = 0                                        # length of the text when a model last read it
        self._short = False                                 # it had to leave out the beginning
        self._text = self._k = self._base = 0
        self._others = 0.0                                  # tokens that the other sequences of a pass bring
        self._found: dict[str, tuple[tuple[int, ...], int]] = {}      # source → under which circumstances, the best length
        self._pending: tuple[int, int] | None = None        # drafted, accepted of a pass that is not yet measured
        self._before = NOTHING                              # the same of the last pass
        self._draft_seconds = 0.0
        self._rests = Rests()
        self._can_read = 0

    # --------------------------------------------------------------------------------------- before a pass
    def order(self, text: int, k: int, streams: int) -> dict[str, Any] | None:
        """Fields of a `DraftJob` for a text of so many tokens; None: no draft this time. ``streams``: decoding sequences."""
        self._text, self._draft_seconds, self.read, self.spent = text, 0.0, 0, False
        if self.spec.length is not None:
            self.read = text - self._at if self.modelled and text - self._at > NEAR else 0
            self._at = text
            return {"k": min(k, self.spec.length)}
        self._passes += 1
        self.controller.passes += 1
        asleep = not self.modelled or self._passes < self._until
        if self._plain >= self._refresh or self._refreshing or asleep and (not self.looks or self._passes < self._look):
            return None
        costs = self.controller.costs
        if costs.seen(streams) < SETTLE:
            return None
        self._rested()
        self._k = min(k, LENGTHS[-1])
        self._company(streams)
        plain = costs.expected(streams)
        if self.balance is None:
            share = PROVEN if self.controller.proven(self.spec.name) else START
            self.balance = share * (self.horizon * plain + self.prompt * (self.controller.reading or 0.0))
        if asleep:
            return {"k": self._k, "limit": self.limit, "judge": self}
        each, spare = self._reading(plain), self.balance - self._worst(1, MODEL, 0)
        self._can_read = max(NEAR, int(READ * spare / each)) if each > 0 else text
        return {"k": self._k, "limit": self.limit, "read": self._can_read, "judge": self}

    def _company(self, streams: int) -> None:
        """Rows and tokens of the others: as in the last pass."""
        before, rows, tokens = self.controller.last
        mine = self._before
        drafted = max(0, rows - before - mine[0]) if before == streams else 0
        self._base = streams + drafted
        self._others = streams - 1 + (max(0, tokens - before - mine[1]) if before == streams else 0)

    def _reading(self, plain: float) -> float:
        return self.controller.draft_costs(self.spec.name, MODEL, self.ratio).read(plain, self.controller.reading)

    def limit(self, source: str) -> int:
        """How many ids of a draft from ``source`` are worth verifying now."""
        if source == MODEL and self._as_before():
            return self._most
        modelled = not source.startswith("lookup")
        if modelled and self._passes < self._until:
            return 0
        best = self._longest(source)
        (trials, now), pays = self._patience(modelled), best > 0
        if pays:
            trials.pays(source)
        elif trials.due(source, now):
            best = min(TRIAL, self._k)
        again = modelled and self._short and self._can_read >= self._text       # what was gained allows the whole text
        behind = (self._text if again else self._text - self._at) if modelled else 0
        reading = min(behind, self._can_read) if behind > NEAR else 0
        while best and self._worst(best, source, reading) > self.balance:
            best = max((k for k in LENGTHS if k < best), default=0)
        if not best:
            self._declined += 1
            self._until = self._passes + min(LONGEST_NAP, NAP * self._declined) if modelled else self._until
            return 0
        self._declined = 0
        self.read = min(reading, AT_ONCE)
        if modelled:
            self._short = bool(reading) and reading < behind or self._short and not again
            self._at = 0 if again else self._at
            self._at = self._text if reading <= AT_ONCE else self._at + AT_ONCE
        if source == MODEL:
            self._going, self._most, self._dearest = self._goes(best), best, self._worst(best, MODEL, 0)
            self._priced = (self._base, self._k, self._passes // KEPT) if pays else ()
        return best

    def _longest(self, source: str) -> int:
        """How many ids would pay if there were enough to lose; 0: none."""
        if source == MODEL:                                 # the draft itself ends where it is not sure
            return min(SURE, self._k) if self._pays() else 0
        circumstances = self.controller.version, self._base, self._k, self._passes // KEPT
        known, best = self._found.get(source, (None, 0))
        if known != circumstances:
            best = self._best(source)
            self._found[source] = circumstances, best
        return best

    def _as_before(self) -> bool:
        """May a model's next draft be as long as its last one, at the same prices? Where nothing is to be read, and all can be lost."""
        if self._priced != (self._base, self._k, self._passes // KEPT) or self._text - self._at > NEAR or self._short \
                or self._dearest > self.balance:
            return False
        self._at = self._text
        return True

    def more(self, sure: Sequence[float]) -> bool:
        """See `backends.base.Judge`, as the next."""
        return self._going.more(sure)

    def ends(self) -> tuple[array, array, array]:
        return self._going.ends()

    def worth(self, sure: Sequence[float]) -> int:
        length = self._going.worth(sure)
        self._sure = list(sure[:length])
        return length

    def _goes(self, most: int) -> Going:
        """A draft of ``most`` ids at most: prices at what plain decoding, or the drafting so far, makes of the time."""
        costs, base = self.controller.costs, self._base
        plain = costs.expected(base)
        pace = (1 + self._others) / plain * max(1.0, self._gained().ratio)
        seconds = [costs.expected(base + k) for k in range(1, most + 1)]
        for place in reversed(range(most - 1)):             # what was measured long ago does not make a shorter draft the dearer one
            seconds[place] = min(seconds[place], seconds[place + 1])
        rows = [pace * (each - plain) for each in seconds]
        drafting = self._drafting(MODEL)
        return Going(self._calibration, rows, pace * (drafting(2) - drafting(1)), self._luck_of(MODEL).rates(most))

    def _pays(self) -> bool:
        gained = self._gained()
        return gained.hope > 1 and self.controller.gain(self.spec.name, True).ratio > HOPELESS

    def _gained(self) -> Gain:
        """What a model's drafts bring here: at first as fixed lengths would, by what is believed; then as in other answers."""
        if self._gain is None:
            costs, base = self.controller.costs, self._base
            plain, luck, drafting = costs.expected(base), self._luck_of(MODEL).gain(self._k), self._drafting(MODEL)
            of = {k: (luck[k], (costs.expected(base + k) + drafting(k)) / plain - 1) for k in LENGTHS if k <= self._k}
            likely = max(of.values(), key=lambda one: (1 + one[0]) / (1 + one[1]))
            self._gain = Gain(self.controller.gain(self.spec.name, True, likely), 12.0, 0.98)
        return self._gain

    def _best(self, source: str) -> int:
        """The length with the most tokens a second; 0 where a plain pass has them."""
        costs, base = self.controller.costs, self._base
        gain, drafting = self._luck_of(source).gain(self._k), self._drafting(source)
        rates = {k: (1 + self._others + gain[k]) / (costs.expected(base + k) + drafting(k))
                 for k in (0, *LENGTHS, self._k) if k <= self._k}
        best = max(rates, key=rates.__getitem__)
        return best if rates[best] > MARGIN * rates[0] else 0

    def _worst(self, k: int, source: str, reading: int) -> float:
        """Seconds lost if all of k ids are wrong."""
        costs, plain = self.controller.costs, self.controller.costs.expected(self._base)
        return costs.most(self._base + k) - plain + self._drafting(source)(k) + reading * self._reading(plain)

    def _drafting(self, source: str) -> Callable[[int], float]:
        """Seconds of drafts of so many ids."""
        drafts, plain = self.controller.draft_costs(self.spec.name, source, self.ratio), self.controller.costs.expected(1) or 0.0
        return lambda ids: drafts.draft(ids, plain)

    def _patience(self, modelled: bool) -> tuple[Trials, int]:
        """A model that does not pay here will hardly pay in the next answer: its trials, which cost the most, are counted over all."""
        controller = self.controller
        return (controller.trials(self.spec.name), controller.passes) if modelled else (self._trials, self._passes)

    def _luck_of(self, source: str) -> Acceptance:
        found = self._luck.get(source)
        if found is None:
            found = self._luck[source] = Acceptance(self.controller.luck(self.spec.name, source), 6.0, 0.95)
        return found

    # --------------------------------------------------------------------------------------- after it
    def proposed(self, seconds: float) -> None:
        self._draft_seconds = seconds
        self.counts.draft_seconds += seconds
        if self.looks:
            self._vain += 1                                 # until a draft of this call is verified
            self._look = self._passes + min(SELDOM, 1 + self._vain // PATIENT)

    def verified(self, source: str, length: int, right: int, made: int) -> None:
        """The pass brought ``made`` tokens; of ``length`` drafted ids the first ``right`` were right, and the next, unless the
        answer ended before it, was wrong."""
        if not length:                                      # by far the most passes of a text that does not pay: kept short
            self._pending = self._before = NOTHING
            if self._plain >= self._refresh or self._refreshing:
                self._refreshing = (self._refreshing + 1) % AGAIN
                self._refresh = self._refresh if self._refreshing else min(2 * self._refresh, REFRESH)
            self._plain = 0
            self._rests.tokens += made
            self._rests.passes += 1
            if self.spent:
                self._in_vain()
            return
        if right:
            self._vain = self._look = 0
        self._pending = self._before = length, right
        self._plain += 1
        self.counts.add(source, length, right, made)
        self.controller.version += 1
        tried = length if made > right else right           # an answer that ends inside a draft says nothing of the rest
        self._luck_of(source).saw(tried, right)
        self.controller.luck(self.spec.name, source).saw(tried, right)
        if source == MODEL:
            for place, sure in enumerate(self._sure[:min(tried, right + 1)]):
                self._calibration.saw(sure, place < right)
        trials, now = self._patience(not source.startswith("lookup"))
        trials.made(source, now, right)

    def _in_vain(self) -> None:
        """A model has drafted for this pass what was not worth verifying."""
        trials, now = self._patience(True)
        trials.made(MODEL, now, 0)
        plain = self.controller.costs.expected(self._base)
        if self.spec.length is None and plain:
            self._booked(True, 0, self._draft_seconds / plain)

    def _booked(self, modelled: bool, tokens: int, passes: float) -> None:
        self.controller.gain(self.spec.name, modelled).saw(tokens, passes)
        if modelled and self._gain is not None:
            self._gain.saw(tokens, passes)

    def settle(self, streams: int, rows: int, seconds: float) -> None:
        """The pass is measured: what it gained or lost goes to the balance."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending is NOTHING:
            self._rests.seconds += seconds
            self._rests.vain += self._draft_seconds
            self._rests.measured += 1
            self._rests.streams = streams
            return
        self._rested()
        length, right = pending
        costs = self.controller.costs
        self.counts.pace(1 + right, seconds + self._draft_seconds, costs.expected(streams) if costs.seen(streams) else None)
        if self.balance is None:
            return
        plain = FAIR * costs.expected(streams)
        whole = costs.expected(rows) if costs.seen(rows) > WARM else seconds         # what setting kernels up takes is paid too
        extra = whole - FAIR * costs.expected(rows - length) + self._draft_seconds
        self._booked(self.spent, right, extra / plain)
        grown = GROWTH * plain * (1 + right)
        self.balance = min(self.balance + grown + right * plain - extra, max(CAP * plain, self.balance + grown))

    def _rested(self) -> None:
        """Book the passes without a draft since the last time."""
        rests = self._rests
        if not rests.passes:
            return
        self._rests = Rests()
        self.counts.rested(rests.passes, rests.tokens, rests.seconds, rests.vain)
        if self.balance is not None and rests.measured:
            self.balance += rests.measured * GROWTH * self.controller.costs.expected(rests.streams) - rests.vain

    def forgot(self) -> None:
        """The drafter has lost what it had read of this text."""
        self._at, self._short = 0, False

    @property
    def resting(self) -> bool:
        return self.spec.length is None and self._declined > 0

    def report(self, others: list[Course]) -> Speculation:
        """Of this and the other choices of the same answer."""
        counts = Counts()
        for course in (self, *others):
            course._rested()
            counts.merge(course.counts)
        return counts.report(self.spec, all(course.resting for course in (self, *others)))
