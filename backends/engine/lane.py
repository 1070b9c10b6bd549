"""One attached model's share of the loop: its scheduler, and what happens to its sequences in a step.

Runs plan → extend → sample → events for one decoder. Does not know of other models, threads or queues (`loop.py`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from backends.base import Drafter, FinishReason, GainzError, Step, TokenLogprob
from backends.engine import sampler
from backends.engine.controller import Controller
from backends.engine.course import LENGTHS
from backends.engine.embed import EmbedQueue
from backends.engine.grammar import Grammars
from backends.engine.measure import measure, measure_draft, set_up
from backends.engine.process import typed
from backends.engine.scheduler import Limits, Scheduler
from backends.engine.sequence import Answer, Sequence
from backends.engine.text import TextCodec
from backends.engine.waiting import Queue
from backends.errors import StepFailed

log = logging.getLogger(__name__)
RECENT = 100      # answers whose speed the statistics remember


@dataclass
class Counters:
    """Since the model was attached."""

    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    errors: Counter = field(default_factory=Counter)                   # by code
    finished: Counter = field(default_factory=Counter)                 # by reason
    ttft: deque = field(default_factory=lambda: deque(maxlen=RECENT))  # seconds
    tpot: deque = field(default_factory=lambda: deque(maxlen=RECENT))  # seconds a token after the first


class Lane:
    def __init__(self, model: Any, limits: Limits, shed: Callable[[], bool]) -> None:
        """``model``: a LocalModel; only its decoder, text and info are used."""
        self.model, self.decoder = model, model.decoder
        self.text: TextCodec = model.text
        self.controller = Controller(time.perf_counter)
        self.scheduler = Scheduler(model.decoder, limits, model.info.streams, self.controller, shed=shed)
        self.answers: list[Answer] = []
        self.grammars = Grammars(model.text, model.decoder.vocab)
        self.embeds = EmbedQueue(model.decoder)
        self.queue = Queue(model.info.streams)
        self.counters = Counters()
        arch = getattr(model.decoder, "arch", None)
        read = getattr(arch, "pass_bytes", None)
        self.pass_bytes: int | None = read() if read else model.info.weights_bytes      # what a pass of one row reads
        self._measuring: Iterator[None] | None = None
        self._new = getattr(arch, "sets_up", False)         # few rows are to be set up still
        self._scan = getattr(getattr(arch, "ops", None), "scan", None)

    def take(self, answer: Answer) -> None:
        """Queue a new request's choices; the loop has entered it in ``answers``."""
        self.counters.requests += 1
        self.counters.prompt_tokens += answer.prompt_tokens
        for sequence in list(answer.sequences):
            if sequence.goal == 0 or (sequence.limit == sequence.prompt_length and not sequence.scoring):
                self._finish(sequence, "length")            # an answer of no tokens
            else:
                self.scheduler.waiting.append(sequence)

    # --------------------------------------------------------------------------------------- one step
    def sweep(self, now: float) -> None:
        """End what was cancelled or has run out of time."""
        for answer in list(self.answers):
            if answer.cancel.is_set():
                self.end(answer, "cancelled")
            elif answer.deadline is not None and now >= answer.deadline:
                self.end(answer, "time_limit")

    def step(self) -> bool:
        """Advance the running sequences by one forward pass, and a text to be embedded by a chunk. False: nothing to do."""
        limits = self.scheduler.limits
        embedded = self.embeds.step(limits.mixed if self.scheduler.running else limits.budget, not self.scheduler.running)
        if not self.scheduler.busy:
            return embedded
        self.hurry()
        began = self.controller.clock()
        work = self.scheduler.plan()
        for answer, late in list(self.queue.look(self.answers, time.monotonic())):
            self.fail(answer, late)
        failed, self.scheduler.failed = self.scheduler.failed, []
        for sequence, error in failed:
            self.fail(sequence.answer, error)
        if failed:
            work = [(sequence, step) for sequence, step in work if sequence.finish is None]
        if work:
            decoding = [sequence.decoding for sequence, _ in work]
            made = self.counters.tokens
            self._compute(work)
            seconds = self.controller.clock() - began - self.scheduler.drafting
            self._measured(work, decoding, self.counters.tokens - made, seconds)
        return True

    def _measured(self, work: list[tuple[Sequence, Step]], decoding: list[bool], made: int, seconds: float) -> None:
        """Tell the controller what the pass cost, where it was of one kind."""
        rows = sum(len(step.tokens) for _, step in work)
        if all(decoding):
            courses = [sequence.course for sequence, _ in work if sequence.course is not None]
            self.controller.passed(courses, len(work), rows, made, seconds)
        elif not any(decoding):
            self.controller.prompted(rows, seconds)

    def idle(self, drafters: Mapping[str, Drafter]) -> bool:
        """Nobody waits: set few rows up, or measure what drafting needs to know, one pass. False: nothing to do. ``drafters``: by what
        they are asked for as."""
        if not self._new and not (self.controller.wanted and "draft" in self.model.info.capabilities):
            return False
        if self._measuring is None:
            self._measuring = set_up(self.decoder) if self._new else self._measures(drafters)
        try:
            next(self._measuring)
            return True
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001  it was nobody's answer: go on without what it would have told
            log.warning("measuring passes failed: %r", error)
        self._measuring = None
        self.controller.wanted &= self._new
        self._new = False
        return True

    def _measures(self, drafters: Mapping[str, Drafter]) -> Iterator[None]:
        controller = self.controller
        yield from measure(self.decoder, controller.costs, tuple(1 + k for k in LENGTHS), controller.clock)
        for name, costs in controller.unknown():
            if name in drafters:
                yield from measure_draft(self.decoder, drafters[name], costs, controller.clock)

    def hurry(self) -> None:
        """Somebody waits again: give the measuring text's room back."""
        if self._measuring is not None:
            self._measuring.close()
            self._measuring = None

    def _compute(self, work: list[tuple[Sequence, Step]]) -> None:
        self.counters.steps += 1
        before = [sequence.slot.length for sequence, _ in work]
        try:
            rows = self.decoder.extend([step for _, step in work])
        except Exception as error:  # noqa: BLE001  whatever a kernel raises: one sequence at a time finds out whose it is
            log.warning("a step of %d sequences failed, trying each alone: %r", len(work), error)
            for (_, step), length in zip(work, before):
                self.decoder.truncate(step.slot, length)
            for sequence, step in work:
                if sequence.finish is None:                 # another choice of the same request may have failed
                    self._alone(sequence, step)
            return
        self._deliver(work, rows)

    def _alone(self, sequence: Sequence, step: Step) -> None:
        length = step.slot.length
        try:
            if not self.decoder.reserve(step.slot, len(step.tokens)):
                return                                      # its room went to another: it is planned again
            rows = self.decoder.extend([step])
        except Exception as error:  # noqa: BLE001  the fault is this sequence's alone, and ends only its request
            log.exception("request %s failed", sequence.answer.request.id or "without id")
            self.decoder.truncate(step.slot, length)
            self.fail(sequence.answer, typed(error, "computing this answer"))
            return
        self._deliver([(sequence, step)], rows)

    # --------------------------------------------------------------------------------------- from rows to events
    def _deliver(self, work: list[tuple[Sequence, Step]], rows: list[Tensor]) -> None:
        now = time.monotonic()
        for (sequence, step), logits in zip(work, rows):
            if sequence.finish is not None:                 # its request failed earlier in this loop
                continue
            try:
                self._advance(sequence, step, logits, now)
            except StepFailed as error:
                self.fail(sequence.answer, error)
                continue
            event = sequence.take_event()
            if event is not None:
                sequence.answer.sink(event)
            elif not sequence.produced:
                sequence.answer.progress(sequence)
            if sequence.finish is not None:
                self._ended(sequence)

    def _advance(self, sequence: Sequence, step: Step, logits: Tensor, now: float) -> None:
        """Use the rows of one sequence: prompt log-probabilities, then the draft while it is right, and one token more."""
        if not step.want:
            return
        rows = sampler.rows(logits)
        if sequence.scoring:
            self._score(sequence, rows, sequence.slot.length - len(step.tokens))
            if sequence.limit == sequence.prompt_length:
                if not sequence.scoring:
                    sequence.end("length")
                return
            if sequence.behind:
                return
            rows = rows[-1:]
        before = sequence.produced
        right = self._sample(sequence, rows)
        if sequence.slot.length > len(sequence.tokens) - 1:
            self.decoder.truncate(sequence.slot, len(sequence.tokens) - 1)
        answer = sequence.answer
        answer.first = answer.first or now
        answer.last = now
        answer.passes += 1
        answer.drafted += len(sequence.draft)
        answer.accepted += right
        if sequence.course is not None and before:
            sequence.course.verified(sequence.source, len(sequence.draft), right, sequence.produced - before)
        sequence.draft = []
        self.counters.tokens += sequence.produced - before

    def _sample(self, sequence: Sequence, rows: np.ndarray) -> int:
        """Accept tokens until the draft is wrong or the answer ends; the number of draft tokens that were right."""
        draft = sequence.draft
        best = rows.argmax(axis=1).tolist() if sequence.plain else None
        for i, row in enumerate(rows):
            if best is not None and math.isfinite(row[best[i]]):
                token = best[i]
            else:
                token = sampler.choose(row, sequence.sampling, sequence.seed, len(sequence.tokens), sequence.history,
                                       sequence.banned, sequence.constraint and sequence.constraint.allowed(), self._scan)
            drafted = i < len(draft) and draft[i] == token
            sequence.accept(token, drafted, self._logprob(row, token, sequence.sampling.logprobs))
            if sequence.finish is not None or not drafted:
                return i + drafted
        return len(draft)

    def _logprob(self, row: np.ndarray, token: int, best: int | None) -> TokenLogprob | None:
        if best is None:
            return None
        own, leaders = sampler.logprobs(row, token, best)
        name, raw = self.text.token_text, self.text.token_bytes
        return TokenLogprob(token, name(token), own, tuple((id, name(id), value) for id, value in leaders), raw(token),
                            tuple(raw(id) for id, _ in leaders))

    def _score(self, sequence: Sequence, rows: np.ndarray, start: int) -> None:
        """Row i says how probable prompt token start + i + 1 was; those known from before a preemption are passed over."""
        for i in range(len(sequence.scores) - 1 - start, len(rows)):
            place = start + i + 1
            if place < sequence.prompt_length:
                sequence.scores.append(self._logprob(rows[i], sequence.tokens[place], sequence.sampling.prompt_logprobs))

    # --------------------------------------------------------------------------------------- endings
    def _finish(self, sequence: Sequence, finish: FinishReason) -> None:
        """End one choice from outside, with what is certain so far."""
        sequence.end(finish)
        sequence.answer.sink(sequence.take_event())
        self._ended(sequence)

    def _ended(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.counters.finished[sequence.finish] += 1
        answer = sequence.answer
        if not answer.open and answer in self.answers:
            self.answers.remove(answer)
            self._account(answer)
            answer.sink(answer.last_event())

    def end(self, answer: Answer, finish: FinishReason) -> None:
        """End all choices that still run, and with them the request."""
        for sequence in answer.open:
            self._finish(sequence, finish)

    def fail(self, answer: Answer, error: GainzError) -> None:
        if answer.open:
            answer.error = error
            self.counters.errors[error.code] += 1
            self.end(answer, "error")

    def _account(self, answer: Answer) -> None:
        timing = answer.timing(time.monotonic())
        self.queue.served(timing.total_seconds - timing.queue_seconds)
        self.counters.cached_tokens += answer.cached
        self.counters.drafted += answer.drafted
        self.counters.accepted += answer.accepted
        if timing.ttft_seconds is not None:
            self.counters.ttft.append(timing.ttft_seconds)
        if timing.decode_tokens_per_second:
            self.counters.tpot.append(1 / timing.decode_tokens_per_second)

    # --------------------------------------------------------------------------------------- for people
    def stats(self) -> dict[str, Any]:
        counters, scheduler = self.counters, self.scheduler
        return {"queue": len(scheduler.waiting), "running": len(scheduler.running), "steps": counters.steps,
                "requests": counters.requests, "prompt_tokens": counters.prompt_tokens, "tokens": counters.tokens,
                "cached_tokens": counters.cached_tokens, "drafted": counters.drafted, "accepted": counters.accepted,
                "preemptions": scheduler.preemptions, "errors": dict(counters.errors), "finished": dict(counters.finished),
                "ttft_seconds": list(counters.ttft), "tpot_seconds": list(counters.tpot),
                "cache": dict(self.decoder.stats())}
