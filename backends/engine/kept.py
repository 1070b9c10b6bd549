"""Rows of a verifier's residual stream that a draft will read. Knows rows and places; nothing of models."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_BYTES = 64 << 20       # of one sequence; beyond, the oldest go, and a draft that has not read them begins later


class Kept:
    """[H] for each of the places ``first`` … ``end`` - 1 of one sequence."""

    def __init__(self, first: int) -> None:
        self.first = self.end = first
        self._pieces: list[Tensor] = []         # [n, H] each, one behind another

    def add(self, rows: Tensor) -> None:
        """The rows of the next places; kept as they are, so nobody may write to them."""
        self._pieces.append(rows)
        self.end += len(rows)
        while len(self._pieces) > 1 and (self.end - self.first) * rows[0].numel() * rows.element_size() > MOST_BYTES:
            self.first += len(self._pieces.pop(0))

    def cut(self, end: int) -> None:
        """Forget the places from ``end`` on."""
        while self.end > max(end, self.first):
            last = self._pieces.pop()
            self.end -= len(last)
            if self.end < end:
                self._pieces.append(last[:end - self.end])
                self.end = end

    def rows(self, begin: int, end: int) -> Tensor:
        """[end - begin, H] of places that are kept."""
        found, at = [], self.end
        for piece in reversed(self._pieces):            # what is asked for is nearly always at the end
            at -= len(piece)
            if at < end:
                found.append(piece[max(0, begin - at):end - at])
            if at <= begin:
                break
        return found[0] if len(found) == 1 else torch.cat(found[::-1])
