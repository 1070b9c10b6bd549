"""A drafter whose model has another tokenizer: its text becomes the target's tokens.

The target's text is read as the draft's tokens, the draft goes on in greedy steps, and what it wrote is cut into the target's
tokens again. Three things need care: a text that ends in the middle of a character is not gone on from; the draft's last token
of a text may be half of what it would have written there, so it is taken back and said again under the condition that it
begins with the same bytes (token healing); and a token that the draft may not have finished is held back. Knows two codecs and
the draft's cache; the target decides, so what is wrong here costs time only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.base import Decoder, Draft, DraftJob
from backends.engine.drafters import Places
from backends.engine.text import TextCodec

SOURCE = "text"
KEPT = 160                              # bytes at the end of a text whose tokens are made anew for each draft
FOLD = 480                              # bytes after which all but `KEPT` of them get their tokens for good
TAIL = 32                               # bytes of context that a tokenizer sees before the text it is to cut


# ------------------------------------------------------------------------------------------- bytes and tokens
class Pieces:
    """The bytes of a codec's tokens, special ones by their names; and which tokens begin with which bytes."""

    def __init__(self, text: TextCodec, size: int) -> None:
        self.text, self.size = text, size
        self._piece = text.stream(True).piece
        self._known: dict[int, bytes] = {}
        self._sorted: list[tuple[bytes, int]] = []
        self._exact: dict[bytes, int] = {}

    def index(self) -> Pieces:
        """Ready for `towards` and `grows`: some tenths of a second for a large vocabulary."""
        special = self.text.special_ids
        self._sorted = sorted((self.of(id), id) for id in range(self.size) if id not in special and self.of(id))
        self._exact = {data: id for data, id in reversed(self._sorted)}
        return self

    def of(self, token: int) -> bytes:
        found = self._known.get(token)
        if found is None:
            special = token in self.text.special_ids
            found = self._known[token] = self.text.token_text(token).encode() if special else self._piece(token)
        return found

    def encode(self, before: str, text: str) -> list[int]:
        """Ids of ``text`` where it follows ``before``. Where their border is none of tokens: as if it began a line, since a text
        alone begins with a space for some tokenizers; else of the text alone."""
        for front in (before, "\n"):
            ids = self._behind(front, text)
            if ids is not None:
                return ids
        return self.text.encode(text, special=False)

    def _behind(self, before: str, text: str) -> list[int] | None:
        ids, passed, border = self.text.encode(before + text, special=False), 0, len(before.encode())
        whole = sum(len(self.of(id)) for id in ids)
        border += whole - len((before + text).encode())     # a space that the tokenizer puts before every text
        for place, id in enumerate(ids):
            if passed >= border:
                return ids[place:] if passed == border else None
            passed += len(self.of(id))
        return [] if passed == border else None

    def beginning(self, start: bytes) -> list[int]:
        """Ids of the tokens whose bytes begin with ``start``."""
        low = high = bisect_left(self._sorted, (start, -1))
        while high < len(self._sorted) and self._sorted[high][0].startswith(start):
            high += 1
        return [id for _, id in self._sorted[low:high]]

    def towards(self, goal: bytes) -> list[int]:
        """Ids of the tokens that begin with ``goal``, or that ``goal`` begins with."""
        shorter = (self._exact.get(goal[:end]) for end in range(1, len(goal)))
        return [id for id in shorter if id is not None] + self.beginning(goal)

    def grows(self, token: int) -> bool:
        """Is there a longer token that begins with this one's bytes?"""
        data = self.of(token)
        after = bisect_left(self._sorted, (data + b"\0", -1))
        return bool(data) and after < len(self._sorted) and self._sorted[after][0].startswith(data)


def unfinished(data: bytes | bytearray) -> int:
    """How many bytes at the end are the beginning of a character."""
    for back in range(1, min(3, len(data)) + 1):
        lead = data[-back]
        if lead >= 0xC0:
            return back if (lead >= 0xF0) + (lead >= 0xE0) + 2 > back else 0
        if lead < 0x80:
            return 0
    return 0


def _last_border(text: str) -> int:
    """Where the last word of a text begins: up to there a tokenizer would cut it the same whatever follows. 0: nowhere."""
    for place in range(len(text) - 1, 0, -1):
        before, after = text[place - 1], text[place]
        if not (before.isalnum() and after.isalnum()) and not (before.isspace() and not after.isspace()) or after > "\u2e80":
            return place
    return 0


def _tail(text: str) -> str:
    """The end of a text from the beginning of a word on, if there is one within reach."""
    end = text[-TAIL:]
    gaps = [place for place in range(1, len(end)) if end[place].isspace() and not end[place - 1].isspace()]
    return end[gaps[0]:] if gaps else end


# ------------------------------------------------------------------------------------------- one sequence
@dataclass
class _Reading:
    """A target's text as bytes, and the draft's ids of it: ``ids`` of the first ``base`` bytes for good."""

    seen: int = 0
    data: bytearray = field(default_factory=bytearray)
    ids: list[int] = field(default_factory=list)
    base: int = 0


@dataclass
class _Writing:
    """A draft on its way: ``must`` bytes it still has to repeat, ``out`` what is new."""

    feed: list[int]
    must: bytes
    before: str
    out: bytearray = field(default_factory=bytearray)
    made: list[int] = field(default_factory=list)           # the target's tokens of it so far
    sure: int = 0                                           # of them those of whole words, which nothing that follows can change
    steps: int = 0


class RetokenizingDrafter:
    """``target``: the codec whose ids are proposed; ``size``: its real ids."""

    reads_states = False

    def __init__(self, decoder: Decoder, text: TextCodec, target: TextCodec, size: int) -> None:
        self.places = Places(decoder)
        self.mine, self.theirs = Pieces(text, decoder.vocab.size).index(), Pieces(target, size)
        self._ends = decoder.vocab.eos_ids | text.special_ids
        self._readings: dict[int, _Reading] = {}

    def propose(self, batch: Sequence[DraftJob]) -> list[Draft]:
        most = [job.most(SOURCE) for job in batch]
        writings = [self._begin(job, k) for job, k in zip(batch, most)]
        while active := [i for i, w in enumerate(writings) if w is not None and w.feed and not self._enough(w, most[i])
                         and self.places.reserve(batch[i].sequence, len(w.feed))]:
            rows = self.places.extend([(batch[i].sequence, writings[i].feed) for i in active])
            for i, row in zip(active, rows):
                self._write(writings[i], row)
        return [Draft(self._settled(w, k) if w is not None else (), SOURCE) for w, k in zip(writings, most)]

    # --------------------------------------------------------------------------------------- reading
    def _begin(self, job: DraftJob, most: int) -> _Writing | None:
        reading = self._readings.setdefault(job.sequence, _Reading())
        for token in job.tokens[reading.seen:]:
            reading.data += self.theirs.of(token)
        reading.seen = len(job.tokens)
        if not most or unfinished(reading.data):
            return None
        ids, must = self._heal(self._ids(reading))
        if not ids:
            return None
        feed = self.places.catch_up(job.sequence, ids, job.read, 2 * most + 8)
        before = _tail(bytes(reading.data[-4 * TAIL:]).decode("utf-8", "ignore"))
        return _Writing(feed, must, before)

    def _ids(self, reading: _Reading) -> list[int]:
        """The draft's ids of the whole text. What lies far enough back is cut once, at the beginning of a word."""
        while len(reading.data) - reading.base > FOLD:
            border = self._border(reading)
            reading.ids += self._cut(reading, reading.base, border)
            reading.base = border
        return reading.ids + self._cut(reading, reading.base, len(reading.data))

    def _border(self, reading: _Reading) -> int:
        end = min(len(reading.data) - KEPT, reading.base + 64 * FOLD)
        for place in range(end, max(reading.base, end - KEPT), -1):
            if reading.data[place] == 32 and reading.data[place - 1] != 32:
                return place
        while reading.data[end] & 0xC0 == 0x80:              # no word within reach: at least a whole character
            end -= 1
        return end

    def _cut(self, reading: _Reading, start: int, end: int) -> list[int]:
        text = bytes(reading.data[start:end]).decode("utf-8", "replace")
        if start == 0:
            return self.mine.text.encode(text)
        before = _tail(bytes(reading.data[max(0, start - 4 * TAIL):start]).decode("utf-8", "ignore"))
        return self.mine.encode(before, text)

    def _heal(self, ids: list[int]) -> tuple[list[int], bytes]:
        """Without the last token, where the draft could have said a longer one; and the bytes that it now has to repeat."""
        if len(ids) > 1 and ids[-1] not in self.mine.text.special_ids and self.mine.grows(ids[-1]):
            return ids[:-1], self.mine.of(ids[-1])
        return ids, b""

    # --------------------------------------------------------------------------------------- writing
    def _write(self, w: _Writing, row: np.ndarray) -> None:
        """One token more of the draft."""
        token = self._choose(row, w.must)
        if token is None or token in self._ends:
            w.feed = []
            return
        data = self.mine.of(token)
        new, w.must = data[len(w.must):], w.must[len(data):]
        w.out += new
        w.feed = [token]
        w.steps += bool(new)                                # repeating what was taken back does not count
        if new:
            self._cut_again(w)

    def _choose(self, row: np.ndarray, must: bytes) -> int | None:
        best = int(row.argmax())
        if not must or (best not in self._ends and self.mine.of(best).startswith(must)):
            return best
        fits = np.array(self.mine.towards(must), np.int64)
        return int(fits[row[fits].argmax()]) if len(fits) else None

    def _cut_again(self, w: _Writing) -> None:
        """The target's ids of what was written, up to the last whole character; nothing from an id on that is none of text."""
        whole = bytes(w.out[:len(w.out) - unfinished(w.out)])
        try:
            text = whole.decode()
        except UnicodeDecodeError as error:
            text = whole[:error.start].decode()
        ids = self.theirs.encode(w.before, text)
        wrong = (place for place, id in enumerate(ids) if id >= self.theirs.size or id in self.theirs.text.special_ids)
        w.made, w.sure, passed = ids[:next(wrong, len(ids))], 0, 0
        words = len(text[:_last_border(text)].encode())
        for id in w.made:
            passed += len(self.theirs.of(id))
            w.sure += passed <= words

    @staticmethod
    def _enough(w: _Writing, most: int) -> bool:
        return w.sure >= most or w.steps >= 2 * most + 4

    def _settled(self, w: _Writing, most: int) -> list[int]:
        """Of an unfinished word nothing, if there is anything else; of nothing but one all but its last token."""
        if not w.feed:                                      # the draft has ended its text
            return w.made[:most]
        return w.made[:min(most, w.sure)] if w.sure else (w.made[:-1] or w.made)[:most]

    # --------------------------------------------------------------------------------------- room
    def forget(self, sequence: int) -> None:
        self._readings.pop(sequence, None)
        self.places.forget(sequence)

    def shed(self, decoder: Decoder) -> bool:
        return self.places.shed(decoder)

    def close(self) -> None:
        self._readings.clear()
        self.places.close()
