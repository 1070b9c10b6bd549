"""Arrays of strings in a GGUF header: where each begins, and all of them decoded at once. Knows bytes; nothing of files or keys.

The one part of a header that needs NumPy, so that a list of models is made without it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from backends.errors import BrokenFile

LINE_END = 10


class Strings(Sequence[str]):
    """An array of strings as it lies in the file; decoded when asked for. ``starts``: [n + 1], where each begins in
    ``raw`` with its length in 8 bytes, and where the last one ends."""

    def __init__(self, key: str, raw: bytes, starts: array[int]) -> None:
        self._key, self._raw, self._starts = key, raw, np.array(starts)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        return self._decoded(range(index, index + 1))[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._at_once() or self._decoded(range(len(self))))

    def _at_once(self) -> list[str] | None:
        """All of them by one decoding and one split: the lengths go, a line's end takes their place. None where that would
        not be certain, because a string holds one itself."""
        data = np.frombuffer(self._raw, np.uint8)
        first = self._starts[:-1]
        text, kept = data.copy(), np.ones(len(data), bool)
        text[first] = LINE_END
        for place in range(1, 8):
            kept[first + place] = False
        text = text[kept]
        if np.count_nonzero(text == LINE_END) != len(self):
            return None
        try:
            return text.tobytes().decode().split(chr(LINE_END))[1:]
        except UnicodeDecodeError:
            return None                     # `_decoded` says which

    def _decoded(self, indices: range) -> list[str]:
        raw, starts = self._raw, self._starts.tolist() if len(indices) > 1 else self._starts
        try:
            return [raw[starts[index] + 8:starts[index + 1]].decode() for index in indices]
        except UnicodeDecodeError as error:
            raise BrokenFile(f"A string in {self._key} is not UTF-8.", key=self._key) from error


def string_starts(raw: bytes, count: int) -> np.ndarray:
    """int64: where the first strings of an array begin, each proven by the length of the one before it; ends before ``count``
    at an empty string, at one of 256 bytes or more, or at the end of ``raw``. A length below 256 is a byte and seven NULs,
    which hardly anything else is."""
    if len(raw) < 8:
        return np.empty(0, np.int64)
    words = np.ndarray((len(raw) - 7,), "<u8", raw, strides=(1,))      # the eight bytes from each byte on
    found = np.flatnonzero(words - np.uint64(1) < np.uint64(255))[:count + 1]
    if not len(found) or found[0] != 0:
        return np.empty(0, np.int64)
    right = np.diff(found) == words[found[:-1]].astype(np.int64) + 8
    return found[1:1 + (len(right) if right.all() else int(right.argmin()))]
