"""Who runs in the next step, with which tokens: catch-up scheduling of one decoder's sequences.

There is no prefill phase and no decode phase: each sequence moves towards ``tokens + draft`` by as many tokens as the step's
budget leaves it, decoding ones first. A sequence that finds no room takes it from the one admitted last, which goes back to
the head of the queue and is computed again from what the prefix cache still has. Does not sample, and never calls `extend`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from backends.base import Decoder, DraftJob, Drafter, GainzError, Step
from backends.engine.controller import Controller
from backends.engine.kept import Kept
from backends.engine.process import typed
from backends.engine.sequence import Sequence
from backends.errors import OutOfMemory

log = logging.getLogger(__name__)
SCORED_ROWS = 1 << 23      # logits kept at once for prompt log-probabilities: 32 MiB of float32


@dataclass(frozen=True)
class Limits:
    """``budget``: tokens a step; ``mixed``: prompt tokens a step while others decode, so that these do not stall."""

    budget: int = 256
    mixed: int = 64
    queue: int = 256


class Scheduler:
    """The sequences of one decoder, waiting and running (in order of admission)."""

    def __init__(self, decoder: Decoder, limits: Limits, streams: int, controller: Controller, *,
                 shed: Callable[[], bool] = lambda: False) -> None:
        """``shed``: gives up what drafters hold in this decoder; True if that was anything."""
        self.controller, self.drafting = controller, 0.0    # seconds that drafting took in the last plan
        self.decoder, self.limits, self.streams, self._shed = decoder, limits, max(1, streams), shed
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.failed: list[tuple[Sequence, GainzError]] = []
        self.preemptions = 0
        self._full = False                 # the head of the queue found no room, and nothing has left since
        self._turns = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def remove(self, sequence: Sequence) -> None:
        """Take an ended sequence out, wherever it is."""
        self._full = False
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._let_go(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self.decoder.release(sequence.slot)
            sequence.slot = None
        if sequence.drafter is not None:
            sequence.drafter.forget(sequence.number)
            sequence.course.forgot()

    # --------------------------------------------------------------------------------------- admission
    def admit(self) -> None:
        """Let waiting sequences in, first come first served, while there are streams and pages for their whole prompt."""
        while self.waiting and not self._full and len(self.running) < self.streams:
            sequence = next((waiting for waiting in self.waiting if waiting.ready), None)
            if sequence is None:
                return
            sequence.slot = slot = self.decoder.open(sequence.tokens, reuse=not sequence.scoring)
            room = min(len(sequence.tokens) + 1, self.decoder.context) - slot.length
            if not self.decoder.reserve(slot, room) and self.running:       # alone it may start, and grow as far as it can
                self.decoder.release(slot)
                sequence.slot, self._full = None, True
                return
            if sequence.drafter is not None and sequence.drafter.reads_states:
                slot.kept = Kept(slot.length)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            answer = sequence.answer
            if answer.admitted is None:
                answer.admitted, answer.cached = time.monotonic(), slot.length

    # --------------------------------------------------------------------------------------- one step
    def plan(self) -> list[tuple[Sequence, Step]]:
        """The next step's work; room for it is reserved. Sequences that cannot fit even alone are in ``failed``."""
        self.admit()
        decoding = [sequence for sequence in self.running if sequence.decoding]
        others = [sequence for sequence in self.running if not sequence.decoding]
        decoding.sort(key=lambda sequence: sequence.turn)
        left = self.limits.budget
        self._propose(decoding, left - len(decoding))
        work: list[tuple[Sequence, Step]] = []
        kept = 1 if others and left > 1 else 0                  # so that many streams cannot shut a new one out
        for sequence in decoding:
            left -= self._place(sequence, left - kept, work)
        if decoding:
            left = min(left, self.limits.mixed)
        for sequence in others:
            left -= self._place(sequence, left, work)
        return work

    def _propose(self, decoding: list[Sequence], spare: int) -> None:
        """Ask the drafters, all sequences of one at once; a draft never reaches beyond the answer's limit."""
        self.drafting = 0.0
        jobs: dict[Drafter, list[tuple[Sequence, DraftJob]]] = {}
        for sequence in decoding:
            sequence.draft = []
            room = min(sequence.limit - len(sequence.tokens) - 1, spare)
            if sequence.drafter is None or room <= 0:
                continue
            order = sequence.course.order(len(sequence.tokens), room, len(decoding))
            if order is not None:
                kept = sequence.slot.kept if sequence.drafter.reads_states else None
                job = DraftJob(sequence.tokens, sampling=sequence.sampling, seed=sequence.seed, sequence=sequence.number, kept=kept,
                               **order)
                jobs.setdefault(sequence.drafter, []).append((sequence, job))
                spare -= job.k
        for drafter, group in jobs.items():
            self._ask(drafter, group)

    def _ask(self, drafter: Drafter, group: list[tuple[Sequence, DraftJob]]) -> None:
        began = self.controller.clock()
        try:
            drafts = drafter.propose([job for _, job in group])
        except Exception as error:  # noqa: BLE001  a model computes in there: its requests end, typed; the loop goes on
            log.exception("drafting failed")
            self.failed += [(sequence, typed(error, "drafting for this answer")) for sequence, _ in group]
            return
        seconds = self.controller.clock() - began
        self.drafting += seconds
        self.controller.drafted([sequence.course for sequence, _ in group], drafts, seconds)
        for (sequence, job), draft in zip(group, drafts, strict=True):
            del draft[job.k:]
            sequence.propose(draft)

    def _place(self, sequence: Sequence, left: int, work: list[tuple[Sequence, Step]]) -> int:
        """Give the sequence its part of the step and return how many tokens that is: 0 if it has to wait."""
        if left <= 0 or sequence.slot is None:                 # the second: preempted by one before it
            sequence.draft = []
            return 0
        behind = sequence.behind
        n = min(behind + len(sequence.draft), left)
        if sequence.scoring:
            n = min(n, max(1, SCORED_ROWS // self.decoder.vocab.size))
        while n and not self.decoder.reserve(sequence.slot, n):
            if sequence.draft:
                sequence.draft, n = [], min(behind, left)
            elif not self._make_room(sequence, work):
                return 0
        start = sequence.slot.length
        tokens = (sequence.tokens[start:start + n] if n <= behind else sequence.tokens[start:] + sequence.draft[:n - behind])
        del sequence.draft[max(0, n - behind):]
        want = 1 + len(sequence.draft) if n >= behind and sequence.goal == len(sequence.tokens) else 0
        if sequence.scoring:
            want = n                                           # everything it has not yet seen
        work.append((sequence, Step(sequence.slot, tokens, want)))
        self._turns += 1
        sequence.turn = self._turns
        return n

    def _make_room(self, sequence: Sequence, work: list[tuple[Sequence, Step]]) -> bool:
        """Free some pages for ``sequence``. False: it was itself the one to go, or it can never fit."""
        planned = {placed for placed, _ in work}
        victim = next(one for one in reversed(self.running) if one not in planned)
        if victim is sequence and self._shed():
            return True
        if victim is not sequence or len(self.running) > 1:
            self._preempt(victim)
            return victim is not sequence
        self.failed.append((sequence, OutOfMemory(
            f"The answer has grown to {len(sequence.tokens)} tokens and the cache has no room for more.",
            remedy="Load the model with a larger context, or with int8 KV.", **self.decoder.stats())))
        return False

    def _preempt(self, victim: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(victim)
        self._let_go(victim)
        victim.draft = []
        self.waiting.appendleft(victim)
        self._full = False
