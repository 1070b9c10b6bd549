"""How two sides are measured against each other: pair by pair, each under the same conditions, in an order that chance decides.

A pair is the same prompt, seed, prompt tokens and output tokens on both sides, back to back. In cold mode every prompt begins
with digits that never came before, so that nothing of it can be in a cache, and a cached token ends the run. A pair measured in
noise is measured again, at most `AGAIN` times, without a look at what it said. Knows sides only as something that answers.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal, Protocol

from backends.base import Cancel, DraftSpec, Event, GainzError, Message, ModelInfo, Progress, ProgressFn, Request, Sampling
from backends.errors import NotMeasurable
from gainz_ui.services.bench.calm import Weather
from gainz_ui.services.bench.timeline import Figures, Piece, figures
from gainz_ui.services.bench.workloads import Workload
from gainz_ui.services.stats import LEVEL, LOOK_LEVELS, LOOKS, UNKNOWN, Estimate, Verdict, clustered, estimate, verdict

Mode = Literal["cold", "warm"]
Arm = Literal["a", "b"]
ARMS: tuple[Arm, Arm] = ("a", "b")
AGAIN = 3                       # times a pair is measured once more because of noise
STEADY, WARM_MOST = 0.02, 10    # warm-up: three runs within 2 %, ten at most
DIGITS, DRAWS = 8, 64           # of a nonce; tries to find one of equal length in tokens


class Side(Protocol):
    info: ModelInfo

    def tokenize(self, prompt: str | tuple[Message, ...], *, special: bool = True) -> tuple[int, ...]: ...
    def generate(self, request: Request, cancel: Cancel) -> Iterator[Event]: ...


class Gauge(Protocol):
    def read(self) -> Weather: ...
    def complaint(self, weather: Weather) -> str: ...


@dataclass(frozen=True)
class Design:
    """``pairs`` None: looks after 8, 16 and 32 pairs at their corrected levels, over as soon as one tells. ``seed``: of the order
    and of the nonces. ``block``: pairs whose halves lie together, where memory does not hold both sides; 1 = back to back."""

    workload: Workload
    drafts: tuple[DraftSpec | None, DraftSpec | None] = (None, None)
    pairs: int | None = None
    mode: Mode = "cold"
    seed: int = 0
    block: int = 1


@dataclass(frozen=True)
class Run:
    """One answer. Speeds in tokens a second: ``decode`` and ``prefill`` by the engine's clock where there is one, else by ours;
    ``seen`` by ours. ``passes``: of the model for these tokens."""

    decode: float | None
    prefill: float | None
    ttft: float | None
    seen: Figures
    prompt_tokens: int
    tokens: int
    cached: int | None
    passes: int
    drafted: int = 0
    accepted: int = 0


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

    def estimate(self, of: Callable[[Run], float | None] = lambda run: run.decode) -> Estimate | None:
        """Of the ratio B to A; each prompt is one unit. None: cannot be known."""
        found = [(pair.prompt, value) for pair in self.pairs if (value := pair.log_ratio(of)) is not None]
        if not found:
            return None
        return estimate(clustered([value for _, value in found], [prompt for prompt, _ in found]), self.level)

    def verdict(self) -> Verdict:
        found = self.estimate()
        return Verdict(UNKNOWN) if found is None else verdict(found)


class Measurement:
    """One comparison under way. ``sides``: both, ready to answer. ``clock``: seconds, monotonic."""

    def __init__(self, design: Design, sides: Sequence[Side], gauge: Gauge, progress: ProgressFn = lambda _: None,
                 cancel: Cancel | None = None, clock: Callable[[], float] = time.perf_counter,
                 changed: Callable[[Outcome], None] = lambda _: None) -> None:
        self.design, self.sides, self.gauge = design, dict(zip(ARMS, sides, strict=True)), gauge
        self.progress, self.cancel, self.clock, self.changed = progress, cancel or Cancel(), clock, changed
        self.outcome = Outcome()
        self._chance = random.Random(design.seed)
        self._nonces = _Nonces(random.Random(design.seed + 1))
        self._drafts = dict(zip(ARMS, design.drafts, strict=True))

    def run(self) -> Outcome:
        """Cancelled: what is done by then is kept and says so."""
        try:
            for arm in ARMS:
                self._warm_up(arm)
            for pairs, level in self._looks():
                while len(self.outcome.pairs) < pairs:
                    self._block(pairs)
                self.outcome.level = level
                if self.outcome.verdict().word != UNKNOWN:
                    break
        except _Stopped:
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
            run = self._ask(arm, 0, self._nonces)
            speeds.append(run.decode or 0.0)

    def _block(self, target: int) -> None:
        """One more pair (or block of them), measured again while the machine was not calm."""
        done = len(self.outcome.pairs)
        numbers = range(done, min(done + self.design.block, target))
        prompts = [number % len(self.design.workload.prompts) for number in numbers]
        order = ARMS if self._chance.random() < 0.5 else ARMS[::-1]
        for attempt in range(AGAIN + 1):
            self.progress(Progress("measure", done, target, f"pair {done + 1} of {target}"))
            before = self.gauge.complaint(self.gauge.read())
            runs = {arm: [self._ask(arm, prompt, self._nonces) for prompt in prompts] for arm in order}
            weather = self.gauge.read()
            noise = before or self.gauge.complaint(weather)
            if not noise or attempt == AGAIN:
                break
            self.outcome.repeated += len(prompts)
        for prompt, a, b in zip(prompts, runs["a"], runs["b"]):
            self.outcome.pairs.append(Pair(prompt, order[0], a, b, weather, noise))
            self.changed(self.outcome)

    def _ask(self, arm: Arm, prompt: int, nonces: _Nonces) -> Run:
        if self.cancel.is_set():
            raise _Stopped
        side, workload = self.sides[arm], self.design.workload
        words = workload.prompts[prompt]
        asked = prepared(side, words, nonces if self.design.mode == "cold" else None)
        request = Request(asked, Sampling(max_tokens=workload.tokens, ignore_eos=True, seed=prompt), draft=self._drafts[arm])
        run = timed(side, request, self.cancel, self.clock)
        self._check(arm, run)
        return run

    def _check(self, arm: Arm, run: Run) -> None:
        if run.tokens != self.design.workload.tokens:
            raise NotMeasurable(f"Side {arm.upper()} gave {run.tokens} tokens where {self.design.workload.tokens} were asked for.",
                                remedy="Choose a server that honours ignore_eos, or shorter answers.")
        if self.design.mode == "cold" and run.cached:
            raise NotMeasurable(f"Side {arm.upper()} had {run.cached} tokens of the prompt in its cache, in a measurement without one.",
                                remedy="Measure in warm mode, or switch the prefix cache of that side off.")


class _Stopped(Exception):
    """Cancelled between two answers or within one."""


# ---------------------------------------------------------------------------------------------- one answer
def prepared(side: Side, turns: tuple[Message, ...], nonces: _Nonces | None) -> tuple[int, ...] | tuple[Message, ...]:
    """The prompt as a side takes it: token ids with the nonce before them; for a remote one, turns whose first begins with it."""
    if side.info.path == "remote":
        first = turns[0]
        return turns if nonces is None else (replace(first, content=f"{nonces.text()} {first.content}"), *turns[1:])
    ids = side.tokenize(turns if side.info.chat_template else "\n\n".join(turn.content for turn in turns))
    return ids if nonces is None else (*nonces.ids(side), *ids)


def timed(side: Side, request: Request, cancel: Cancel, clock: Callable[[], float]) -> Run:
    """Ask, and read the clock at every piece."""
    pieces: list[Piece] = []
    last: Event | None = None
    sent = clock()
    for event in side.generate(request, cancel):
        if event.ids or event.text:
            pieces.append(Piece(clock() - sent, len(event.ids) if event.ids else None, event.text))
        last = event
    end = clock() - sent
    if cancel.is_set():
        raise _Stopped
    if last is None or last.error is not None:
        raise last.error if last is not None and last.error else GainzError("The answer ended without a word.")
    return _run(last, figures(pieces, end, last.usage.completion_tokens if last.usage else None))


def _run(last: Event, seen: Figures) -> Run:
    usage, timing = last.usage, last.timing
    return Run(timing.decode_tokens_per_second if timing else seen.rate, timing.prefill_tokens_per_second if timing else None,
               timing.ttft_seconds if timing else seen.ttft, seen, usage.prompt_tokens if usage else 0,
               usage.completion_tokens if usage else seen.tokens, usage.cached_tokens if usage else None,
               usage.passes if usage else 0, usage.drafted if usage else 0, usage.accepted if usage else 0)


class _Nonces:
    """Digits that never came before, of the same number of tokens each time."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._used: set[str] = set()
        self._lengths: dict[str, int] = {}

    def text(self) -> str:
        while (made := "".join(str(self._chance.randrange(10)) for _ in range(DIGITS))) in self._used:
            pass
        self._used.add(made)
        return made

    def ids(self, side: Side) -> tuple[int, ...]:
        for _ in range(DRAWS):
            ids = tuple(side.tokenize(self.text(), special=False))
            if len(ids) == self._lengths.setdefault(side.info.vocab_fingerprint, len(ids)):
                return ids
        raise NotMeasurable("This tokenizer gives numbers of eight digits ever different lengths.",
                            remedy="Measure in warm mode.")


def _steady(speeds: Sequence[float]) -> bool:
    last = speeds[-3:]
    return len(last) == 3 and min(last) > 0 and (max(last) - min(last)) / median(last) <= STEADY
