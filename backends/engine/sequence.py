"""One choice of an answer, and the answer: tokens, draft, place in the cache, what is due to the client, how it ended.

State and its bookkeeping only. Does not choose tokens (`sampler.py`), does not decide who runs (`scheduler.py`), and never
touches a decoder.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from backends.base import (Cancel, Drafter, Event, FinishReason, GainzError, Progress, Request, Sampling, Slot, Timing,
                           TokenLogprob, Usage)
from backends.engine.course import Course
from backends.engine.detokenize import Detokenizer
from backends.engine.grammar import Constraint
from backends.engine.sampler import History, is_plain
from backends.engine.stops import StopFinder

_numbers = itertools.count(1)          # names sequences for drafters; never used up, never given back


@dataclass(eq=False)
class Sequence:
    """``tokens``: prompt and answer; the cache always holds the first ``slot.length`` of them, at least one less than all.

    ``limit``: most tokens in all; ``ends``: ids that end the answer; ``leader``: the choice whose prompt this one reuses.
    """

    answer: Answer
    index: int
    tokens: list[int]
    limit: int
    seed: int
    ends: frozenset[int]
    detokenizer: Detokenizer
    drafter: Drafter | None = None
    course: Course | None = None       # how long its drafts are, and what became of them
    leader: Sequence | None = None
    constraint: Constraint | None = None
    slot: Slot | None = None
    draft: list[int] = field(default_factory=list)
    source: str = ""                   # what the draft was made from
    finish: FinishReason | None = None
    matched: str | int | None = None
    turn: int = 0                      # when it was last moved: who waited longest goes first

    def __post_init__(self) -> None:
        sampling = self.answer.request.sampling
        self.number = next(_numbers)
        self.sampling: Sampling = sampling
        self.prompt_length = len(self.tokens)
        self.history = History.of(sampling, self.tokens)
        self.stops = StopFinder(sampling.stop)
        self.banned = tuple(sorted(self.ends)) if sampling.min_tokens else ()
        self.plain = self.constraint is None and is_plain(sampling, self.history, self.banned)
        # log-probabilities of the prompt's tokens as far as known; the first has none
        self.scores: list[TokenLogprob | None] = [None] if self.index == 0 and sampling.prompt_logprobs is not None else []
        self._text: list[str] = []
        self._ids: list[int] = []
        self._drafted: list[bool] = []
        self._logprobs: list[TokenLogprob] = []

    # --------------------------------------------------------------------------------------- where it stands
    @property
    def produced(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def goal(self) -> int:
        """Tokens to hold in the cache before something is sampled; an answer of no tokens needs no row after the prompt."""
        return len(self.tokens) if self.limit > self.prompt_length else self.prompt_length - 1

    @property
    def behind(self) -> int:
        """Tokens still to be computed: 1 while decoding."""
        return self.goal - (self.slot.length if self.slot is not None else 0)

    @property
    def decoding(self) -> bool:
        return self.behind == 1 and self.produced > 0

    @property
    def scoring(self) -> bool:
        """Whether rows of the prompt are wanted too; then no cached prefix may stand in for them."""
        return 0 < len(self.scores) < self.prompt_length

    @property
    def ready(self) -> bool:
        """A further choice waits until the first has put the prompt into the cache."""
        return self.leader is None or self.leader.produced > 0 or self.leader.finish is not None

    # --------------------------------------------------------------------------------------- what happens to it
    def accept(self, token: int, drafted: bool, logprob: TokenLogprob | None) -> None:
        """One more token of the answer; sets ``finish`` when it is the last."""
        enough = self.produced >= self.sampling.min_tokens
        self.tokens.append(token)
        self._ids.append(token)
        self._drafted.append(drafted)
        if logprob is not None:
            self._logprobs.append(logprob)
        if self.history is not None:
            self.history.add(token)
        if self.banned and self.produced >= self.sampling.min_tokens:
            self.banned = ()
            self.plain = self.constraint is None and is_plain(self.sampling, self.history, ())
        if token in self.ends:
            self.end("stop", token)
            return
        self._text.append(self.stops.push(self.detokenizer.push(token), enough))
        if self.stops.matched is not None:
            self.finish, self.matched = "stop", self.stops.matched
        elif self._completes(token):
            self.end("stop")
        elif len(self.tokens) >= self.limit:
            self.end("length")

    def _completes(self, token: int) -> bool:
        """Tell the grammar; whether nothing may follow any more."""
        if self.constraint is None:
            return False
        self.constraint.accept(token)
        return self.constraint.complete

    def propose(self, draft: list[int]) -> None:
        """Take a draft, as far as the grammar can take it."""
        self.source = getattr(draft, "source", "")
        draft = list(draft)
        self.draft = draft if self.constraint is None else draft[:self.constraint.possible(draft)]

    def end(self, finish: FinishReason, matched: str | int | None = None) -> None:
        """No further token: what was held back is certain now, unless a stop string begins in it. Where the answer did not end
        by itself, a character that it had only begun is left out."""
        self.finish, self.matched = finish, matched
        text = self.stops.push(self.detokenizer.flush(cut=finish != "stop"), self.produced > self.sampling.min_tokens)
        if self.stops.matched is not None and finish != "error":
            self.finish, self.matched = "stop", self.stops.matched
        else:
            text += self.stops.flush()
        self._text.append(text)

    def _parts(self) -> tuple[str, ...]:
        """Each token left one text; what its end made certain belongs to the last."""
        if not any(self._drafted):
            return ()
        last = len(self._ids) - 1
        return (*self._text[:last], "".join(self._text[last:]))

    def take_event(self) -> Event | None:
        """What became certain since the last call; None if nothing."""
        if not self._ids and self.finish is None:
            return None
        scores = tuple(self.scores) if self.scores and not self.scoring else None
        event = Event(self.index, "".join(self._text), tuple(self._ids), tuple(self._logprobs), tuple(self._drafted),
                      self.finish, self.matched, prompt_logprobs=scores, parts=self._parts())
        self._text, self._ids, self._drafted, self._logprobs = [], [], [], []
        if scores is not None:
            self.scores = []
        return event


@dataclass(eq=False)
class Answer:
    """One request on its way: its choices, who listens, and the clock (seconds of `time.monotonic`)."""

    request: Request
    cancel: Cancel
    sink: Callable[[Event], None]
    prompt_tokens: int
    seed: int
    submitted: float = field(default_factory=time.monotonic)
    sequences: list[Sequence] = field(default_factory=list)
    admitted: float | None = None
    first: float | None = None         # first and last token
    last: float | None = None
    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    error: GainzError | None = None

    @property
    def open(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish is None]

    @property
    def deadline(self) -> float | None:
        return None if self.request.time_limit is None else self.submitted + self.request.time_limit

    def progress(self, sequence: Sequence) -> None:
        """Tell how far the prompt is."""
        self.sink(Event(sequence.index, progress=Progress("prefill", sequence.slot.length, len(sequence.tokens))))

    def usage(self) -> Usage:
        produced = sum(sequence.produced for sequence in self.sequences)
        courses = [sequence.course for sequence in self.sequences if sequence.course is not None]
        speculation = courses[0].report(courses[1:]) if courses else None
        return Usage(self.prompt_tokens, produced, self.cached, self.drafted, self.accepted, self.passes, speculation)

    def timing(self, now: float) -> Timing:
        queue = (now if self.admitted is None else self.admitted) - self.submitted
        if self.first is None or self.admitted is None:
            return Timing(queue_seconds=queue, total_seconds=now - self.submitted)
        prefill, decode = self.first - self.admitted, self.last - self.first
        produced = sum(sequence.produced for sequence in self.sequences)
        return Timing(queue, self.first - self.submitted, prefill, decode if produced > 1 else None, now - self.submitted,
                      (self.prompt_tokens - self.cached) / prefill if prefill > 0 else None,
                      (produced - 1) / decode if produced > 1 and decode > 0 else None)

    def last_event(self) -> Event:
        now = time.monotonic()
        return Event(-1, usage=self.usage(), timing=self.timing(now), error=self.error, seed=self.seed)
