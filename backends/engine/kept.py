"""Rows of a verifier's residual stream that a draft will read. Knows rows and places; nothing of models."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_BYTES = 64 << 20       # of one sequence; beyond, the oldest go, and a draft that has not read them begins later


class Kept:
    """[H] for each of the places ``first`` … ``end`` - 1 of one sequence."""

    def __init__(self, first: int) -> None:
        self.first = self.end = first
        self._pieces: list[tuple[Tensor, int]] = []         # [n, H] and n, one behind another
        self._most = 0                                      # places

    def add(self, rows: Tensor, count: int) -> None:
        """The rows of the next places; kept as they are, so nobody may write to them. In every pass: few calls of torch."""
        self._pieces.append((rows, count))
        self.end += count
        if not self._most:
            self._most = max(1, MOST_BYTES // (rows.shape[1] * rows.element_size()))
        while self.end - self.first > self._most and len(self._pieces) > 1:
            self.first += self._pieces.pop(0)[1]

    def cut(self, end: int) -> None:
        """Forget the places from ``end`` on."""
        while self.end > max(end, self.first):
            rows, count = self._pieces.pop()
            self.end -= count
            if self.end < end:
                self._pieces.append((rows[:end - self.end], end - self.end))
                self.end = end

    def rows(self, begin: int, end: int) -> Tensor:
        """[end - begin, H] of places that are kept."""
        found, at = [], self.end
        for rows, count in reversed(self._pieces):          # what is asked for is nearly always at the end
            at -= count
            if at < end:
                found.append(rows if begin <= at and at + count <= end else rows[max(0, begin - at):end - at])
            if at <= begin:
                break
        return found[0] if len(found) == 1 else torch.cat(found[::-1])
