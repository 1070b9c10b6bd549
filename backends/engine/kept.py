"""Rows of a verifier's residual stream that a draft will read. Knows rows and places; nothing of models."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

MOST_BYTES = 64 << 20       # of one sequence; beyond, the older half goes, and a draft that has not read it begins later
AT_FIRST = 64               # places


class Kept:
    """[H] for each of the places ``first`` … ``end`` - 1 of one sequence."""

    def __init__(self, first: int) -> None:
        self.first = self.end = first
        self._room, self._places = torch.empty(0, 0), 0
        self._row = 0                                       # bytes of a place in the host's memory; 0: it is elsewhere

    def add(self, stream: Tensor, row: int, count: int) -> None:
        """The next places: rows [row, row + count) of ``stream``, [R, H], which are copied."""
        at = self.end - self.first
        if at + count > self._places:
            at = self._make_room(stream, at, count)
        if self._row and stream.is_contiguous():            # few steps: between two passes all code is slow
            ctypes.memmove(self._room.data_ptr() + at * self._row, stream.data_ptr() + row * self._row, count * self._row)
        else:
            self._room[at:at + count] = stream[row:row + count]
        self.end += count

    def _make_room(self, stream: Tensor, held: int, count: int) -> int:
        """Twice the room, or, where that would be too much, the younger half of what is held. Returns where the next place goes."""
        stay = held // 2 if held + count > MOST_BYTES // (stream.shape[1] * stream.element_size()) else held
        rows = stream.new_empty(max(AT_FIRST, 2 * (stay + count)), stream.shape[1])
        if stay:
            rows[:stay] = self._room[held - stay:held]
        self.first += held - stay
        self._room, self._places = rows, len(rows)
        self._row = rows.shape[1] * rows.element_size() if rows.device.type == "cpu" else 0
        return stay

    def cut(self, end: int) -> None:
        """Forget the places from ``end`` on."""
        self.end = min(self.end, max(end, self.first))

    def rows(self, begin: int, end: int) -> Tensor:
        """[end - begin, H] of places that are kept, as long as nothing is added."""
        return self._room[begin - self.first:end - self.first]
