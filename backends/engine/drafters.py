"""Drafters: who guesses the next tokens of a sequence, for the target to confirm.

Each proposes ids of the target's vocabulary and may keep what it knows of a sequence under its number. A guess costs time
only: the target's own sample decides, so nothing here can change a text. How long a draft pays is not decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from backends.base import Decoder, Drafter, DraftJob, Slot, Step
from backends.engine import sampler

LONGEST_MATCH, SHORTEST_MATCH = 4, 2    # tokens at the end of a text that have to occur earlier in it
CATCH_UP = 512                          # tokens a drafter computes at once when it has fallen behind


# ------------------------------------------------------------------------------------------- lookup
class _Index:
    """Where each n-gram of a text last went on, kept up with the text: O(new tokens) a call."""

    def __init__(self) -> None:
        self.seen = 0
        self.after: list[dict[tuple[int, ...], int]] = [{} for _ in range(LONGEST_MATCH + 1)]
        self.last: tuple[int, ...] = ()

    def follow(self, tokens: Sequence[int]) -> None:
        """Index all n-grams that end before the last token, so that a text's own end is not its own model."""
        if self.seen > len(tokens) or tuple(tokens[max(0, self.seen - LONGEST_MATCH):self.seen]) != self.last:
            self.__init__()
        for end in range(self.seen + 1, len(tokens)):
            for n in range(SHORTEST_MATCH, min(LONGEST_MATCH, end) + 1):
                self.after[n][tuple(tokens[end - n:end])] = end
        self.seen = max(self.seen, len(tokens) - 1)
        self.last = tuple(tokens[max(0, self.seen - LONGEST_MATCH):self.seen])

    def find(self, tokens: Sequence[int]) -> int | None:
        for n in range(min(LONGEST_MATCH, len(tokens)), SHORTEST_MATCH - 1, -1):
            place = self.after[n].get(tuple(tokens[-n:]))
            if place is not None:
                return place
        return None


class LookupDrafter:
    """Proposes what followed the last few tokens where they stood before in prompt or answer."""

    def __init__(self) -> None:
        self._known: dict[int, _Index] = {}

    def propose(self, batch: Sequence[DraftJob]) -> list[list[int]]:
        return [self._one(job) for job in batch]

    def _one(self, job: DraftJob) -> list[int]:
        index = self._known.setdefault(job.sequence, _Index())
        index.follow(job.tokens)
        draft: list[int] = []
        place = index.find(job.tokens)
        while place is not None and len(draft) < job.k:       # a match close to the end repeats what it has drafted itself
            draft.append(job.tokens[place] if place < len(job.tokens) else draft[place - len(job.tokens)])
            place += 1
        return draft

    def forget(self, sequence: int) -> None:
        self._known.pop(sequence, None)

    def shed(self, decoder: Decoder) -> bool:
        return False

    def close(self) -> None:
        self._known.clear()


# ------------------------------------------------------------------------------------------- a model
@dataclass(eq=False)
class _Place:
    """A sequence's slot in the draft decoder, and the tokens it holds."""

    slot: Slot
    held: list[int]


class ModelDrafter:
    """A smaller model with the same vocabulary. It samples with the noise of the place, as the target will: where the two
    agree on the distribution they agree on the token. All sequences advance together, one `extend` for each token."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._places: dict[int, _Place] = {}

    def propose(self, batch: Sequence[DraftJob]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in batch]
        feeds = [self._catch_up(job) for job in batch]
        while True:
            active = [i for i, job in enumerate(batch)
                      if feeds[i] and len(drafts[i]) < job.k and self._reserve(job, feeds[i])]
            if not active:
                return drafts
            places = [self._places[batch[i].sequence] for i in active]
            rows = self.decoder.extend([Step(place.slot, feeds[i], 1) for i, place in zip(active, places)])
            for i, place, row in zip(active, places, rows):
                place.held += feeds[i]
                drafts[i].append(self._sample(batch[i], row, len(drafts[i])))
                feeds[i] = drafts[i][-1:]

    def _catch_up(self, job: DraftJob) -> list[int]:
        """Bring the slot to what the text has become; the tokens to feed first, or [] while it is still far behind."""
        place = self._places.get(job.sequence)
        if place is None:
            slot = self.decoder.open(job.tokens)
            place = self._places[job.sequence] = _Place(slot, list(job.tokens[:slot.length]))
        keep = min(_common(place.held, job.tokens), len(job.tokens) - 1)
        if keep < len(place.held):
            self.decoder.truncate(place.slot, keep)
            del place.held[keep:]
        feed = list(job.tokens[keep:])
        if len(feed) <= CATCH_UP:
            return feed
        if self._reserve(job, feed[:CATCH_UP]):
            self.decoder.extend([Step(place.slot, feed[:CATCH_UP], 0)])
            place.held += feed[:CATCH_UP]
        return []

    def _reserve(self, job: DraftJob, feed: Sequence[int]) -> bool:
        slot = self._places[job.sequence].slot
        return slot.length + len(feed) <= self.decoder.context and self.decoder.reserve(slot, len(feed))

    def _sample(self, job: DraftJob, row, ahead: int) -> int:
        logits = sampler.rows(row)[0]
        sampling = replace(job.sampling, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
        return sampler.choose(logits, sampling, job.seed, len(job.tokens) + ahead)

    def forget(self, sequence: int) -> None:
        place = self._places.pop(sequence, None)
        if place is not None:
            self.decoder.release(place.slot)

    def shed(self, decoder: Decoder) -> bool:
        if decoder is not self.decoder or not self._places:
            return False
        self.close()
        return True

    def close(self) -> None:
        for sequence in list(self._places):
            self.forget(sequence)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix. The texts agree almost to the end, so whole slices are compared first."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    for place in range(size):
        if one[place] != other[place]:
            return place
    return size


# ------------------------------------------------------------------------------------------- both
class FirstOf:
    """The first drafter's proposal, and the second's for those sequences for which the first has none."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first, self.second = first, second

    def propose(self, batch: Sequence[DraftJob]) -> list[list[int]]:
        drafts = self.first.propose(batch)
        left = [i for i, draft in enumerate(drafts) if not draft]
        if left:
            for i, draft in zip(left, self.second.propose([batch[i] for i in left]), strict=True):
                drafts[i] = draft
        return drafts

    def forget(self, sequence: int) -> None:
        self.first.forget(sequence)
        self.second.forget(sequence)

    def shed(self, decoder: Decoder) -> bool:
        return any([self.first.shed(decoder), self.second.shed(decoder)])

    def close(self) -> None:
        self.first.close()
        self.second.close()
