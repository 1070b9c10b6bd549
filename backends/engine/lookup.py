"""Drafting by looking up: what followed the last tokens where they stood before, in prompt or answer.

The index is a hash chain over pairs of tokens, as compressors keep one: a token costs one entry, whatever the length of the
text, and a question looks at the last few places only. Prompt lookup decoding (Saxena 2023) and suffix decoding (Oliaro et
al. 2024) for one text. Knows ids; knows no model and no probability: how far a match of which length may be trusted is for
whoever counts what became of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.base import Decoder, Draft, DraftJob

CANDIDATES = 12             # earlier places that are compared, the latest first
LONGEST = 24                # a match of so many tokens is looked for no further
KINDS = ((9, "lookup 9+"), (5, "lookup 5-8"), (3, "lookup 3-4"), (2, "lookup 2"))   # from so many matched tokens on


class TokenIndex:
    """Places of each pair of tokens in a text that only grows: O(1) a token, O(`CANDIDATES` · `LONGEST`) a question."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}         # pair → the place after its latest occurrence
        self._before: list[int] = [0, 0]        # place → the place after the pair's occurrence before that; 0: none

    def follow(self, tokens: Sequence[int]) -> None:
        """Index the pairs that end before the last token, so that a text's own end is not its model."""
        if len(self._before) > max(2, len(tokens)):         # another text than the one seen so far
            self.__init__()
        last, before = self._last, self._before
        for place in range(len(before), len(tokens)):
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            before.append(last.get(pair, 0))
            last[pair] = place

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(place, length): where the text went on after its last ``length`` tokens; the longest match, of equals the latest.
        (0, 0): their like has not been seen."""
        size, best, at = len(tokens), 0, 0
        if size < 3:
            return 0, 0
        place = self._last.get(tokens[-2] << 32 | tokens[-1], 0)
        for _ in range(CANDIDATES):
            if not place:
                break
            length = self._length(tokens, place, size)
            if length > best:
                best, at = length, place
                if best >= LONGEST:
                    break
            place = self._before[place]
        return at, best

    @staticmethod
    def _length(tokens: Sequence[int], place: int, size: int) -> int:
        length, most = 0, min(place, LONGEST)
        while length < most and tokens[place - 1 - length] == tokens[size - 1 - length]:
            length += 1
        return length


def kind(length: int) -> str:
    """The name under which drafts of such a match are counted."""
    return next(name for least, name in KINDS if length >= least)


class LookupDrafter:
    """Proposes what followed the last few tokens where they stood before."""

    reads_states = False

    def __init__(self) -> None:
        self._known: dict[int, TokenIndex] = {}

    def propose(self, batch: Sequence[DraftJob]) -> list[Draft]:
        return [self._one(job) for job in batch]

    def _one(self, job: DraftJob) -> Draft:
        tokens, index = job.tokens, self._known.setdefault(job.sequence, TokenIndex())
        index.follow(tokens)
        place, length = index.find(tokens)
        if length < KINDS[-1][0]:
            return Draft()
        draft = Draft(source=kind(length))
        for ahead in range(place, place + job.most(draft.source)):
            # a match close to the end repeats what it has drafted itself
            draft.append(tokens[ahead] if ahead < len(tokens) else draft[ahead - len(tokens)])
        return draft

    def forget(self, sequence: int) -> None:
        self._known.pop(sequence, None)

    def shed(self, decoder: Decoder) -> bool:
        return False

    def close(self) -> None:
        self._known.clear()
