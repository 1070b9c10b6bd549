"""One answer of one side, timed; or several at once. Prompts with digits before them that never came before.

Knows a request and a clock; nothing of pairs, sides or verdicts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median, mode
from typing import Protocol

from backends.base import Cancel, Event, GainzError, Message, ModelInfo, Request
from backends.errors import NotMeasurable
from gainz_ui.services.bench.timeline import Figures, Piece, figures

DIGITS, DRAWS = 8, 64           # of a nonce; tries to find one of equal length in tokens
AT_MOST = DIGITS + 1            # tokens that a server which remembers token by token may find again: the one that begins every text,
                                # and digits that agree by chance; nothing of what is asked


class Side(Protocol):
    info: ModelInfo

    def tokenize(self, prompt: str | tuple[Message, ...], *, special: bool = True) -> tuple[int, ...]: ...
    def generate(self, request: Request, cancel: Cancel) -> Iterator[Event]: ...


@dataclass(frozen=True)
class Answered:
    """One of several answers at once. Seconds; ``queue``: until its turn came, by the engine's clock."""

    ttft: float | None
    tpot: float | None
    queue: float | None
    total: float


@dataclass(frozen=True)
class Run:
    """One answer, or several at once (``answers``). Speeds in tokens a second: ``decode`` and ``prefill`` by the engine's clock where
    there is one, else by ours; ``seen`` by ours; ``throughput`` of several together. ``passes``: of the model for these tokens.
    ``joules``: that machine or GPU took meanwhile."""

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
    joules: float | None = None
    throughput: float | None = None
    answers: tuple[Answered, ...] = ()

    @property
    def speed(self) -> float | None:
        """What the verdict is about."""
        return self.decode if self.throughput is None else self.throughput


class Stopped(Exception):
    """Cancelled between two answers or within one."""


def remote(side: Side) -> bool:
    return side.info.path == "remote"


def prepared(side: Side, turns: tuple[Message, ...], nonces: Nonces | None, bare: bool = False) -> tuple[int, ...] | tuple[Message, ...] | str:
    """The prompt as a side takes it: token ids with the nonce before them; a remote one's template is its own. ``bare``: text without a
    template on either side, so that the nonce comes first with a remote one, too, and both read the same tokens."""
    text = "\n\n".join(turn.content for turn in turns)
    if remote(side):
        return turns if nonces is None else f"{nonces.text()} {text}"
    ids = side.tokenize(turns if side.info.chat_template and not bare else text)
    return ids if nonces is None else (*nonces.ids(side), *ids)


def found_again(side: Side, run: Run) -> int:
    """Tokens of what was asked that came out of a cache, as far as the side tells."""
    cached = run.cached or 0
    return 0 if remote(side) and cached <= AT_MOST * max(len(run.answers), 1) else cached


def answered(side: Side, requests: Sequence[Request], cancel: Cancel, clock: Callable[[], float]) -> Run:
    """All of them at once."""
    if len(requests) == 1:
        return timed(side, requests[0], cancel, clock)
    began = clock()
    with ThreadPoolExecutor(len(requests)) as hands:
        runs = list(hands.map(lambda request: timed(side, request, cancel, clock), requests))
    return together(runs, clock() - began)


def timed(side: Side, request: Request, cancel: Cancel, clock: Callable[[], float]) -> Run:
    """Ask, and read the clock at every piece."""
    pieces: list[Piece] = []
    last: Event | None = None
    finish: str | None = None
    sent = clock()
    for event in side.generate(request, cancel):
        finish = event.finish or finish
        if event.ids or event.text:
            pieces.append(Piece(clock() - sent, len(event.ids) if event.ids else None, event.text))
        last = event
    end = clock() - sent
    if cancel.is_set():
        raise Stopped
    if last is None or last.error is not None:
        raise last.error if last is not None and last.error else GainzError("The answer ended without a word.")
    if finish == "cancelled":
        raise NotMeasurable("An answer was broken off while it was measured: its model was unloaded, or somebody stopped it.",
                            remedy="Leave both models loaded until the benchmark is over, and start it again.")
    return _run(last, figures(pieces, end, last.usage.completion_tokens if last.usage else None))


def together(runs: Sequence[Run], seconds: float) -> Run:
    """Several answers that ran at once, within ``seconds``: counts add up, figures of one answer are medians."""
    middle = lambda values: median(known) if (known := [value for value in values if value is not None]) else None  # noqa: E731
    tokens, cached = sum(run.tokens for run in runs), [run.cached for run in runs if run.cached is not None]
    seen = Figures(middle(run.seen.ttft for run in runs), middle(run.seen.tpot for run in runs), tokens / seconds, None, seconds, tokens,
                   tuple(gap for run in runs for gap in run.seen.gaps))
    return Run(middle(run.decode for run in runs), middle(run.prefill for run in runs), middle(run.ttft for run in runs), seen,
               sum(run.prompt_tokens for run in runs), tokens, sum(cached) if cached else None, sum(run.passes for run in runs),
               sum(run.drafted for run in runs), sum(run.accepted for run in runs), throughput=tokens / seconds,
               answers=tuple(answer for run in runs for answer in run.answers))


def _run(last: Event, seen: Figures) -> Run:
    usage, timing = last.usage, last.timing
    return Run(timing.decode_tokens_per_second if timing else seen.rate, timing.prefill_tokens_per_second if timing else None,
               timing.ttft_seconds if timing else seen.ttft, seen, usage.prompt_tokens if usage else 0,
               usage.completion_tokens if usage else seen.tokens, usage.cached_tokens if usage else None,
               usage.passes if usage else 0, usage.drafted if usage else 0, usage.accepted if usage else 0,
               answers=(Answered(timing.ttft_seconds if timing else seen.ttft, seen.tpot, timing.queue_seconds if timing else None,
                                 seen.total),))


class Nonces:
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
        length = self._length(side)
        for _ in range(DRAWS):
            if len(ids := self._drawn(side)) == length:
                return ids
        raise NotMeasurable("This tokenizer gives numbers of eight digits ever different lengths.",
                            remedy="Measure in warm mode.")

    def _length(self, side: Side) -> int:
        """The commonest of a sample: one that only few numbers have would not be met again."""
        vocabulary = side.info.vocab_fingerprint
        if vocabulary not in self._lengths:
            self._lengths[vocabulary] = mode(len(self._drawn(side)) for _ in range(DRAWS // 4))
        return self._lengths[vocabulary]

    def _drawn(self, side: Side) -> tuple[int, ...]:
        return tuple(side.tokenize(self.text(), special=False))
