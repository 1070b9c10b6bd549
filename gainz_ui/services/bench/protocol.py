"""How two sides are measured against each other: pair by pair, each under the same conditions, in an order that chance decides.

A pair is the same prompt, seed, prompt tokens and output tokens on both sides, back to back. In cold mode every prompt begins
with digits that never came before, so that nothing of it can be in a cache, and a cached token ends the run; where a side is
remote, both get bare text, since that side's template would put words of its own before the digits. A pair measured in
noise is measured again, at most `AGAIN` times, without a look at what it said; once noise has outlasted that, a pair is measured
again only after a calm one: repeating does not help against noise that stays. With several streams each half of a pair is that many
answers at once, and its speed is what all of them gave together. Knows sides only as something that answers.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal, Protocol

from backends.base import Cancel, Cancelled, DraftSpec, Progress, ProgressFn, Request, Sampling
from backends.errors import NotMeasurable
from gainz_ui.services.bench.asking import Nonces, Run, Side, Stopped, answered, found_again, prepared, remote
from gainz_ui.services.bench.calm import Weather
from gainz_ui.services.bench.workloads import Workload
from gainz_ui.services.stats import LEVEL, LOOK_LEVELS, LOOKS, SAME, UNKNOWN, Estimate, Verdict, clustered, estimate, verdict

Mode = Literal["cold", "warm"]
Arm = Literal["a", "b"]
ARMS: tuple[Arm, Arm] = ("a", "b")
AGAIN = 3                       # times a pair is measured once more because of noise
STEADY, WARM_MOST = 0.02, 10    # warm-up: three runs within 2 %, ten at most


class Gauge(Protocol):
    def read(self) -> Weather: ...
    def complaint(self, weather: Weather) -> str: ...


@dataclass(frozen=True)
class Design:
    """``pairs`` None: looks after 8, 16 and 32 pairs at their corrected levels, over as soon as one tells. ``seed``: of the order.
    ``block``: pairs whose halves lie together, where memory does not hold both sides; 1 = back to back.
    ``streams``: answers at once. ``same``: what counts as no difference."""

    workload: Workload
    drafts: tuple[DraftSpec | None, DraftSpec | None] = (None, None)
    pairs: int | None = None
    mode: Mode = "cold"
    seed: int = 0
    block: int = 1
    streams: int = 1
    same: float = SAME


@dataclass(frozen=True)
class Pair:
    """``first``: the side that answered first. ``noise``: what was wrong with the conditions in spite of repeating."""

    prompt: int
    first: Arm
    a: Run
    b: Run
    weather: Weather | None = None
    noise: str = ""

    def log_ratio(self, of: Callable[[Run], float | None]) -> float | None:
        """Of B to A; None where either cannot be known."""
        one, other = of(self.a), of(self.b)
        return math.log(other / one) if one and other else None


@dataclass
class Outcome:
    """What was measured, complete or not. ``repeated``: pairs measured again because of noise. ``warmups``: decode speeds of the
    runs that came before, by side. ``level``: that of the look which ended the measurement."""

    pairs: list[Pair] = field(default_factory=list)
    repeated: int = 0
    warmups: dict[str, list[float]] = field(default_factory=dict)
    level: float = LEVEL
    cancelled: bool = False
    same: float = SAME

    def estimate(self, of: Callable[[Run], float | None] = lambda run: run.speed) -> Estimate | None:
        """Of the ratio B to A; each prompt is one unit. None: cannot be known."""
        found = [(pair.prompt, value) for pair in self.pairs if (value := pair.log_ratio(of)) is not None]
        if not found:
            return None
        return estimate(clustered([value for _, value in found], [prompt for prompt, _ in found]), self.level)

    def verdict(self) -> Verdict:
        found = self.estimate()
        return Verdict(UNKNOWN) if found is None else verdict(found, self.same)


class Measurement:
    """One comparison under way. ``sides``: both, ready to answer. ``clock``: seconds, monotonic. ``alone``: entered for each pair, so
    that nothing else runs meanwhile. ``joules``: a counter, where there is one."""

    def __init__(self, design: Design, sides: Sequence[Side], gauge: Gauge, progress: ProgressFn = lambda _: None,
                 cancel: Cancel | None = None, clock: Callable[[], float] = time.perf_counter,
                 changed: Callable[[Outcome], None] = lambda _: None,
                 alone: Callable[[], AbstractContextManager[Any]] = nullcontext,
                 joules: Callable[[], float | None] = lambda: None) -> None:
        self.design, self.sides, self.gauge = design, dict(zip(ARMS, sides, strict=True)), gauge
        self.progress, self.cancel, self.clock, self.changed = progress, cancel or Cancel(), clock, changed
        self.alone, self.joules = alone, joules
        self.outcome = Outcome(same=design.same)
        self._again = AGAIN
        self._bare = design.mode == "cold" and any(remote(side) for side in sides)
        self._chance = random.Random(design.seed)
        self._nonces = Nonces(random.SystemRandom())       # never those of another run: a loaded model remembers its prompts
        self._drafts = dict(zip(ARMS, design.drafts, strict=True))

    def run(self) -> Outcome:
        """Cancelled: what is done by then is kept and says so."""
        try:
            for arm in ARMS[:1] if self.sides["a"] is self.sides["b"] else ARMS:       # one that meets itself is warm the second time
                with self.alone():
                    self._warm_up(arm)
            for pairs, level in self._looks():
                while len(self.outcome.pairs) < pairs:
                    self._block(pairs)
                self.outcome.level = level
                if self.outcome.verdict().word != UNKNOWN:
                    break
        except (Stopped, Cancelled):
            self.outcome.cancelled = True
        return self.outcome

    def _looks(self) -> Sequence[tuple[int, float]]:
        wanted = self.design.pairs
        return tuple(zip(LOOKS, LOOK_LEVELS)) if wanted is None else ((wanted, LEVEL),)

    def _warm_up(self, arm: Arm) -> None:
        """Runs of the full shape until three agree; none of them counts."""
        speeds = self.outcome.warmups[arm] = []
        while len(speeds) < WARM_MOST and not _steady(speeds):
            self.progress(Progress("warm-up", len(speeds), WARM_MOST, arm.upper()))
            speeds.append(self._ask(arm, 0).speed or 0.0)

    def _block(self, target: int) -> None:
        """One more pair (or block of them), measured again while the machine was not calm."""
        done = len(self.outcome.pairs)
        numbers = range(done, min(done + self.design.block, target))
        prompts = [number % len(self.design.workload.prompts) for number in numbers]
        order = ARMS if self._chance.random() < 0.5 else ARMS[::-1]
        for attempt in range(self._again + 1):
            self.progress(Progress("measure", done, target, f"pair {done + 1} of {target}"))
            with self.alone():
                before = self.gauge.complaint(self.gauge.read())
                runs = {arm: [self._ask(arm, prompt) for prompt in prompts] for arm in order}
                weather = self.gauge.read()
            noise = before or self.gauge.complaint(weather)
            if not noise or attempt == self._again:
                break
            self.outcome.repeated += len(prompts)
        self._again = 0 if noise else AGAIN
        for prompt, a, b in zip(prompts, runs["a"], runs["b"]):
            self.outcome.pairs.append(Pair(prompt, order[0], a, b, weather, noise))
            self.changed(self.outcome)

    def _ask(self, arm: Arm, prompt: int) -> Run:
        if self.cancel.is_set():
            raise Stopped
        side, spent = self.sides[arm], self.joules()
        run = answered(side, [self._request(arm, prompt + number) for number in range(self.design.streams)], self.cancel, self.clock)
        after = self.joules()
        run = run if spent is None or after is None else replace(run, joules=after - spent)
        self._check(arm, run)
        return run

    def _request(self, arm: Arm, number: int) -> Request:
        workload = self.design.workload
        prompt = number % len(workload.prompts)
        asked = prepared(self.sides[arm], workload.prompts[prompt], self._nonces if self.design.mode == "cold" else None, self._bare)
        return Request(asked, Sampling(max_tokens=workload.tokens, ignore_eos=True, seed=prompt), draft=self._drafts[arm])

    def _check(self, arm: Arm, run: Run) -> None:
        wanted = self.design.workload.tokens * self.design.streams
        if run.tokens != wanted:
            raise NotMeasurable(f"Side {arm.upper()} gave {run.tokens} tokens where {wanted} were asked for.",
                                remedy="Choose a server that honours ignore_eos, or shorter answers.")
        if self.design.mode == "cold" and (cached := found_again(self.sides[arm], run)):
            raise NotMeasurable(f"Side {arm.upper()} had {cached} tokens of the prompt in its cache, in a measurement without one.",
                                remedy="Measure in warm mode, or switch the prefix cache of that side off.")


def _steady(speeds: Sequence[float]) -> bool:
    last = speeds[-3:]
    return len(last) == 3 and min(last) > 0 and (max(last) - min(last)) / median(last) <= STEADY
