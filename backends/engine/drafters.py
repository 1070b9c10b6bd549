"""Drafters: who guesses the next tokens of a sequence, for the target to confirm.

Each proposes ids of the target's vocabulary and may keep what it knows of a sequence under its number. A guess costs time
only: the target's own sample decides, so nothing here can change a text. How long a draft pays is not decided here
(`controller.py`). Beside these: `lookup.py` without a model, `bridge.py` with a model of another tokenizer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from backends.base import Decoder, Draft, Drafter, DraftJob, Sampling, Slot, Step
from backends.engine import noise, sampler
from backends.engine.kept import Kept
from backends.kernels import Ahead, Guesses

CATCH_UP = 512                          # tokens a drafter computes at once when it has fallen behind
MODEL = "model"


# ------------------------------------------------------------------------------------------- places in a draft's cache
@dataclass(eq=False)
class _Place:
    """A sequence's slot in the draft's decoder; it holds ``held``, the text from its token ``start`` on."""

    slot: Slot
    start: int
    held: list[int]
    agreed: int = 0                     # so many of them were the text's own when it was last looked at


class Places:
    """Where the sequences stand in one draft decoder, brought to what their texts have become.

    ``narrow``: rows are of ``columns`` only, rising ids, where the decoder's head has no others (None: it has all). ``growing``:
    what was a text's own stays so, and is not compared again. ``scan``: the decoder's own `sampler.Scan`."""

    reads_states = False                # of the verifier

    def __init__(self, decoder: Decoder, *, narrow: bool = False, growing: bool = False) -> None:
        self.decoder, self._growing = decoder, growing
        self.columns: np.ndarray | None = getattr(decoder, "columns", None) if narrow else None
        self.scan = getattr(getattr(getattr(decoder, "arch", None), "ops", None), "scan", None)
        self._narrow = {} if self.columns is None else {"narrow": True}
        self.at_once = getattr(decoder, "chains", False)    # may a whole draft be one call?
        self._known: dict[int, _Place] = {}

    def catch_up(self, sequence: int, ids: Sequence[int], read: int | None, ahead: int, kept: Kept | None = None) -> list[int]:
        """The ids to feed first, or [] while the slot is still far behind, or where there is no room.

        ``read``: the most ids to read before; of a longer text only the end is read. ``ahead``: ids that are to follow.
        ``kept``: of the verifier, for who reads it."""
        place = self._known.get(sequence)
        if place is None or not self._near(place, ids, read, ahead):
            place = self._fresh(sequence, ids, read, ahead)
        keep = min(self._agreed(place, ids), len(ids) - 1 - place.start)
        if keep < len(place.held):
            self.decoder.truncate(place.slot, keep)
            del place.held[keep:]
        place.agreed = keep
        feed = list(ids[place.start + keep:])
        if len(feed) <= CATCH_UP:
            return feed
        if self.reserve(sequence, CATCH_UP):
            self.decoder.extend([Step(place.slot, feed[:CATCH_UP], 0)])
            place.held += feed[:CATCH_UP]
        return []

    def _near(self, place: _Place, ids: Sequence[int], read: int | None, ahead: int) -> bool:
        """Can the slot go on: is it long enough, and not too far behind?"""
        if len(ids) <= place.start or len(ids) - place.start + ahead > self.decoder.context:
            return False
        if place.start and read is not None and read >= len(ids):
            return False                                    # its beginning was left out, and may be read by now
        return read is None or len(ids) - place.start - self._agreed(place, ids) <= max(read, ahead + 2)

    def _agreed(self, place: _Place, ids: Sequence[int]) -> int:
        """How many of the held ids are the text's."""
        if not self._growing:
            place.agreed = 0
        place.agreed += common(place.held[place.agreed:], ids[place.start + place.agreed:])
        return place.agreed

    def _fresh(self, sequence: int, ids: Sequence[int], read: int | None, ahead: int) -> _Place:
        """A new slot: of the whole text where cache and ``read`` allow it, else of its end."""
        self.forget(sequence)
        start = self.beginning(0, len(ids), ahead)
        slot = self.decoder.open(ids[start:])
        if read is not None and len(ids) - start - slot.length > max(1, read):
            self.decoder.release(slot)
            start = len(ids) - max(1, read)
            slot = self.decoder.open(ids[start:])
        place = self._known[sequence] = _Place(slot, start, list(ids[start:start + slot.length]))
        return place

    def beginning(self, first: int, size: int, ahead: int) -> int:
        """Where to begin with a text of ``size`` tokens: at ``first``, or so late that half of the context stays free."""
        context = self.decoder.context
        return first if size - first + ahead <= context else max(first, size - context // 2)

    def place(self, token: int) -> int | None:
        """In which column its logit stands; None: in none."""
        if self.columns is None:
            return token if token < self.decoder.vocab.size else None
        column = int(np.searchsorted(self.columns, token))
        return column if column < len(self.columns) and self.columns[column] == token else None

    def reserve(self, sequence: int, count: int) -> bool:
        slot = self._known[sequence].slot
        return slot.length + count <= self.decoder.context and self.decoder.reserve(slot, count)

    def extend(self, feeds: Sequence[tuple[int, list[int]]]) -> list:
        """One pass over (sequence, ids): the last row of logits of each, float32 [columns] on the host."""
        places = [self._known[sequence] for sequence, _ in feeds]
        rows = self.decoder.extend([Step(place.slot, ids, 1) for place, (_, ids) in zip(places, feeds)], **self._narrow)
        for place, (_, ids) in zip(places, feeds):
            place.held += ids
        return [sampler.rows(row)[0] for row in rows]

    def ahead(self, sequence: int, feed: list[int], want: Ahead) -> Guesses | None:
        """One guess after another in one call; None: that cannot be now, and nothing has changed."""
        place = self._known[sequence]
        guesses = self.decoder.ahead(place.slot, feed, None, want)
        if guesses is not None:
            place.held += guesses.read
        return guesses

    def forget(self, sequence: int) -> None:
        place = self._known.pop(sequence, None)
        if place is not None:
            self.decoder.release(place.slot)

    def shed(self, decoder: Decoder) -> bool:
        if decoder is not self.decoder or not self._known:
            return False
        self.close()
        return True

    def close(self) -> None:
        for sequence in list(self._known):
            self.forget(sequence)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix. The texts agree almost to the end, so slices are compared first."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    place = 0
    while one[place:place + 256] == other[place:place + 256]:
        place += 256
    while one[place] == other[place]:
        place += 1
    return place


# ------------------------------------------------------------------------------------------- a model
@dataclass(eq=False, slots=True)
class _Begun:
    """One job's draft on its way. ``feed``: what the draft reads next, [] where it has ended. ``plain``: the likeliest id is taken."""

    job: DraftJob
    most: int
    feed: list[int]
    sampling: Sampling
    plain: bool
    draft: Draft
    sure: list[float]

    def ended(self) -> Draft:
        if self.sure and self.job.judge is not None:
            self.draft.dropped = len(self.draft) - self.job.judge.worth(self.sure)
            del self.draft[len(self.draft) - self.draft.dropped:]
        return self.draft


class ModelDrafter:
    """A smaller model with the same vocabulary. It samples with the noise of the place, as the target will: where the two
    agree on the distribution they agree on the token. All sequences advance together, one `extend` for each token.

    ``known``: ids below it mean the same to both; a draft ends before any other."""

    def __init__(self, decoder: Decoder, known: int | None = None, places: Places | None = None) -> None:
        self.places = Places(decoder, narrow=True, growing=True) if places is None else places
        self.reads_states, self.known = self.places.reads_states, known
        self._near = None if self.places.columns is not None else self.places.scan
        self._checked: dict[int, int] = {}          # sequence → so many of its ids are known; -1: some are not

    def propose(self, batch: Sequence[DraftJob]) -> list[Draft]:
        begun = [self._begin(job) for job in batch]
        if len(begun) == 1 and self.places.at_once:
            self._at_once(begun[0])
        while active := [one for one in begun if one.feed and self.places.reserve(one.job.sequence, len(one.feed))]:
            for one, row in zip(active, self.places.extend([(one.job.sequence, one.feed) for one in active])):
                self._add(one, row)
        return [one.ended() for one in begun]

    def _begin(self, job: DraftJob) -> _Begun:
        most = job.most(MODEL)
        feed = self.places.catch_up(job.sequence, job.tokens, job.read, most, job.kept) if most and self._knows(job) else []
        sampling = self._own(job.sampling) if feed else job.sampling
        return _Begun(job, most, feed, sampling, sampler.is_plain(sampling, None, ()), Draft(source=MODEL), [])

    def _at_once(self, one: _Begun) -> None:
        """The whole draft in one call, where that can be."""
        job, sampling = one.job, one.sampling
        if not one.feed or sampling.logit_bias:
            return
        here, places = len(job.tokens), None
        if not one.plain:
            places = array("Q", [noise.key(job.seed, place) for place in range(here, here + one.most)])
        guesses = self.places.ahead(job.sequence, one.feed, Ahead(
            one.most, self.known, places, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p,
            None if job.judge is None else job.judge.ends()))
        if guesses is not None:
            one.feed, one.sure = [], guesses.sure
            one.draft.extend(guesses.ids)

    def _add(self, one: _Begun, row: np.ndarray) -> None:
        """The next id, and whether there is to be one more."""
        judge, sampling = one.job.judge, one.sampling
        token = sampler.choose(row, sampling, one.job.seed, len(one.job.tokens) + len(one.draft), scan=self.places.scan,
                               names=self.places.columns)
        sure = 1.0 if judge is None else sampler.probability(row, self.places.place(token), sampling, self._near)
        one.feed = []
        if self.known is None or token < self.known:
            one.draft.append(token)
            one.sure.append(sure)
            if len(one.draft) < one.most and (judge is None or judge.more(one.sure)):
                one.feed = [token]

    def _knows(self, job: DraftJob) -> bool:
        """Of a text that holds an id which the draft does not know, nothing is drafted."""
        if self.known is None:
            return True
        checked = self._checked.get(job.sequence, 0)
        if checked >= 0:
            new = job.tokens[checked:]
            checked = self._checked[job.sequence] = len(job.tokens) if max(new, default=0) < self.known else -1
        return checked >= 0

    def _own(self, sampling: Sampling) -> Sampling:
        """Penalties are left to the target: they count a text that the draft may be wrong about."""
        if not sampling.logit_bias and sampling.repetition_penalty == 1 and not sampling.frequency_penalty \
                and not sampling.presence_penalty:
            return sampling
        place = self.places.place
        bias = tuple((place(token), bias) for token, bias in sampling.logit_bias if place(token) is not None)
        return replace(sampling, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, logit_bias=bias)

    def forget(self, sequence: int) -> None:
        self.places.forget(sequence)
        self._checked.pop(sequence, None)

    def shed(self, decoder: Decoder) -> bool:
        return self.places.shed(decoder)

    def close(self) -> None:
        self.places.close()


# ------------------------------------------------------------------------------------------- both
class FirstOf:
    """The first drafter's proposal, and the second's for those sequences for which the first has none."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first, self.second, self.reads_states = first, second, second.reads_states

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
