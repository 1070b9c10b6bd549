"""Where sequences stand in a draft that reads its verifier's hidden states: EAGLE (Li et al. 2024), on a draft with a cache.

At place t such a draft reads the token there and the verifier's residual stream at t - 1. What it guesses itself it reads with
its own stream instead; when the verifier has spoken, those places are read again with the verifier's. Knows one draft decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.base import Decoder, Slot, Step
from backends.engine import sampler
from backends.engine.drafters import CATCH_UP, Places
from backends.engine.kept import Kept
from backends.kernels import Ahead, Guesses


@dataclass(eq=False)
class _Trail:
    """A sequence's slot in the draft's decoder: the text from its token ``start`` on, the first ``sure`` places as the verifier
    had them. ``states``: what goes with the ids that are fed next, [n, H], the first ``known`` of them the verifier's."""

    slot: Slot
    start: int
    sure: int = 0
    known: int = 0
    states: Tensor | None = None

    @property
    def next(self) -> int:
        return self.start + self.sure


class StatePlaces(Places):
    """See `Places`: the same questions, for texts that only grow. Where nothing was kept of a text (it is nobody's, and timed only)
    the states are zeros."""

    reads_states = True

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder, narrow=True, growing=True)
        self._known: dict[int, _Trail] = {}

    def catch_up(self, sequence: int, ids: Sequence[int], read: int | None, ahead: int, kept: Kept | None = None) -> list[int]:
        last = len(ids) - 1
        if last < 1 or kept is not None and not kept.first < last <= kept.end:
            return []
        first = 1 if kept is None else kept.first + 1                 # the first place whose states are known
        trail = self._known.get(sequence)
        if trail is None or not self._goes_on(trail, first, len(ids), read, ahead):
            trail = self._begin(sequence, first, ids, read, ahead)
        self.decoder.truncate(trail.slot, trail.sure)
        feed = list(ids[trail.next:])
        trail.states, trail.known = self._states(kept, trail.next - 1, last), len(feed)
        if len(feed) <= CATCH_UP:
            return feed
        if self.reserve(sequence, CATCH_UP):
            self.decoder.follow([Step(trail.slot, feed[:CATCH_UP], 0)], trail.states[:CATCH_UP])
            trail.sure += CATCH_UP
        return []

    def _goes_on(self, trail: _Trail, first: int, size: int, read: int | None, ahead: int) -> bool:
        if trail.next < first or size - trail.start + ahead > self.decoder.context:
            return False
        if read is None:
            return True
        if trail.start > first and read >= size - first:
            return False                                    # its beginning was left out, and may be read by now
        return size - trail.next <= max(read, ahead + 2)

    def _begin(self, sequence: int, first: int, ids: Sequence[int], read: int | None, ahead: int) -> _Trail:
        self.forget(sequence)
        start = self.beginning(first, len(ids), ahead)
        if read is not None:
            start = max(start, len(ids) - max(1, read))
        trail = self._known[sequence] = _Trail(self.decoder.open(ids[start:], reuse=False), start)
        return trail

    def _states(self, kept: Kept | None, begin: int, end: int) -> Tensor:
        if kept is not None:
            return kept.rows(begin, end)
        return torch.zeros(end - begin, self.decoder.arch.hidden, device=self.decoder.device)

    def extend(self, feeds: Sequence[tuple[int, list[int]]]) -> list:
        trails = [self._known[sequence] for sequence, _ in feeds]
        states = torch.cat([trail.states for trail in trails])
        rows, stream = self.decoder.follow([Step(trail.slot, ids, 1) for trail, (_, ids) in zip(trails, feeds)], states)
        for place, trail in enumerate(trails):
            trail.sure, trail.known = trail.sure + trail.known, 0
            trail.states = stream[place:place + 1]          # good until this decoder's next pass
        return [sampler.rows(row)[0] for row in rows]

    def ahead(self, sequence: int, feed: list[int], want: Ahead) -> Guesses | None:
        trail = self._known[sequence]
        guesses = self.decoder.ahead(trail.slot, feed, trail.states, want)
        if guesses is not None:
            trail.sure, trail.known = trail.sure + trail.known, 0
        return guesses
