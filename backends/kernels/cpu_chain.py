"""Ids that a small model guesses one after another, in one native call: to ask for a pass of a few megabytes costs more than the
pass. Passes as in `cpu_passes.py`; what is chosen and when it ends is said by an `Ahead`, by the rules of `engine/sampler.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backends.errors import StepFailed
from backends.kernels import Ahead, Guesses, KVLayer, cpu_passes as words, native_abi as abi
from backends.kernels.cpu_passes import Passes, Turns
from backends.kernels.cpu_replay import Replay

if TYPE_CHECKING:
    from backends.kernels.cpu import CpuOps

MOST = 64               # ids of one call
NO_END = 2**63 - 1
LIKELIEST, TO_THE_END = (0.0, 0, 0, 1.0, 0.0), (0, 0, 0, 0)


class Chain(Passes):
    """As `Passes`. ``names``: int64, the id of each column of the logits (None: a column is its id); ``columns``: so many count."""

    def __init__(self, ops: CpuOps, replay: Replay, kv: Sequence[KVLayer], head: Callable[[Tensor], Tensor], width: int,
                 turns: Turns, names: Tensor | None, columns: int) -> None:
        super().__init__(ops, replay, kv, head, width, turns)
        self._out, self._sure = array("q", bytes(8 * MOST)), array("d", bytes(8 * MOST))
        self._names = None if names is None else names.to(torch.int64).contiguous()
        self._found, line = torch.empty(columns, dtype=torch.int32), self._line
        line[words.NAMES], line[words.COLUMNS] = abi.pointer(self._names), columns
        line[words.FOUND], line[words.OUT], line[words.SURE] = self._found.data_ptr(), abi.address(self._out), abi.address(self._sure)

    def can_guess(self, before: int, rows: int, most: int) -> bool:
        """Can `guess` begin with that many rows behind ``before`` tokens, and go on to ``most`` ids?"""
        following = self._program(1, 1) if most <= MOST else None
        if following is None or self._program(rows, 1) is None or not self._reaches(before + rows + most):
            return False
        line, logits = self._line, self._heads[1][1].data_ptr()
        line[words.NEXT], line[words.NEXT_LINES], line[words.NEXT_STREAM] = abi.address(following.words), following.lines, following.stream
        line[words.LOGITS] = following.words[-abi.WORDS + words.TO] = self._programs[rows, 1].words[-abi.WORDS + words.TO] = logits
        return True

    def guess(self, before: int, pages: array, feed: Sequence[int], states: Tensor | None, want: Ahead) -> Guesses:
        """Reads ``feed`` after ``before`` tokens, whose K and V ``pages`` hold with room for all that follow, and goes on with its own
        guesses. ``states``: float32 [len(feed), H]. Only where it `can_guess`, just before. Raises StepFailed when logits are no
        numbers."""
        rows, line, address = len(feed), self._line, abi.address
        self._ids[:rows] = array("q", feed)
        drawn = LIKELIEST if want.places is None else (
            want.temperature, address(want.places), want.top_k if want.top_k < line[words.COLUMNS] else 0, want.top_p, want.min_p)
        ends = TO_THE_END if want.ends is None else (*map(address, want.ends), len(want.ends[0]))
        known = NO_END if want.known is None else want.known
        self._call(self._programs[rows, 1], states, pages, before, rows, (want.most, known, *drawn, *ends))
        made = line[words.MADE]
        if made < 0:
            raise StepFailed("The model's output is not a number.", position=before + rows)
        ids = self._out[:made].tolist()
        return Guesses(ids, self._sure[:made].tolist(), [*feed, *ids[:line[words.PASSES] - 1]])
