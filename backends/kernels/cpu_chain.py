"""Ids that a small model guesses one after another, in one native call: between two passes of a large model everything is cold,
and to ask for a pass from Python costs more than a pass of a few megabytes.

The passes are those that `cpu_replay.py` has recorded and trusts, each followed by norm and head of its last row; what is chosen
and when it ends is said by an `Ahead`, whose rules are those of `engine/sampler.py`. Knows programs; nothing of models or slots.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backends.errors import StepFailed
from backends.kernels import Ahead, Guesses, KVLayer, native_abi as abi
from backends.kernels.cpu_replay import Recording, Replay

if TYPE_CHECKING:
    from backends.kernels.cpu import CpuOps

MOST = 64               # ids of one call
NO_END = 2**63 - 1
CALL = struct.Struct("10qd2q2d4q")       # the words of `Chain` in abi.h that change with every call; behind them:
(NEXT, NEXT_LINES, NEXT_STREAM, WIDTH, IDS, BATCH, COS, SIN, HALF, PAGE, LOGITS, NAMES, COLUMNS, FOUND, OUT, SURE, MADE,
 PASSES) = range(CALL.size // 8, abi.CHAIN_WORDS)
LIKELIEST, TO_THE_END = (0.0, 0, 0, 1.0, 0.0), (0, 0, 0, 0)
Turns = Callable[[int], tuple[Tensor, Tensor] | None]


class Chain:
    """Of one decoder over one KV cache. ``head``: its norm and head, rows [1, H] → logits; ``turns``: cos and sin [positions, half]
    of at least so many positions, or None; ``names``: int64, the id of each column of the logits (None: a column is its id);
    ``columns``: so many of them count."""

    def __init__(self, ops: CpuOps, replay: Replay, kv: Sequence[KVLayer], head: Callable[[Tensor], Tensor], width: int,
                 turns: Turns, names: Tensor | None, columns: int) -> None:
        self._ops, self._replay, self._turns, self._width = ops, replay, turns, width
        self._programs: dict[int, tuple[Recording, array, int]] = {}       # by rows of the first pass; where its last row is left
        self._ids = array("q", bytes(8 * abi.CHAIN_ROWS))
        self._states = torch.empty(abi.CHAIN_ROWS, width)
        self._out, self._sure = array("q", bytes(8 * MOST)), array("d", bytes(8 * MOST))
        self._head, self._logits = self._record(head)
        names, found = None if names is None else names.to(torch.int64).contiguous(), torch.empty(columns, dtype=torch.int32)
        self._keep: tuple[object, ...] = (kv, names, found, head)
        self._turned: tuple[Tensor, Tensor] | None = None
        self._places = 0                                    # so many positions have their cos and sin
        self._line = line = abi.words(*(0,) * abi.CHAIN_WORDS)
        line[WIDTH], line[IDS], line[BATCH], line[PAGE] = width, abi.address(self._ids), ops.batch_address, kv[0].k.shape[2]
        line[LOGITS], line[NAMES], line[COLUMNS] = abi.pointer(self._logits), abi.pointer(names), columns
        line[FOUND], line[OUT], line[SURE] = found.data_ptr(), abi.address(self._out), abi.address(self._sure)

    def _record(self, head: Callable[[Tensor], Tensor]) -> tuple[list[tuple[int, ...]], Tensor | None]:
        """The head's instructions and where they leave the logits; [] where they are not those of one norm and one product."""
        row = torch.zeros(1, self._width)
        with self._ops.recording() as lines:
            logits = head(row)
        plain = [line[0] for line in lines] == [abi.NORM, abi.LOGITS] and lines[0][1] == row.data_ptr() \
            and lines[1][4] == logits.data_ptr()
        return (lines, logits) if plain else ([], None)

    def ready(self, before: int, rows: int, most: int) -> bool:
        """Can it begin with that many rows behind ``before``, and go on to ``most`` ids?"""
        return bool(self._head) and most <= MOST and rows <= abi.CHAIN_ROWS and self._knows(rows) and self._knows(1) \
            and self._reaches(before + rows + most)

    def _knows(self, rows: int) -> bool:
        recording = self._replay.trusted(rows)
        known = self._programs.get(rows)
        if recording is None or known is not None and known[0] is recording:
            return recording is not None
        program, stream = self._compose(recording, rows)
        self._programs[rows] = recording, program, stream
        if rows == 1:
            self._line[NEXT], self._line[NEXT_LINES], self._line[NEXT_STREAM] = abi.address(program), len(program) // abi.WORDS, stream
        return True

    def _reaches(self, last: int) -> bool:
        if last >= self._places:
            self._turned = self._turns(last + 1)
            if self._turned is None:
                self._places = 0
                return False
            cos, sin = self._turned
            self._places = len(cos)
            self._line[COS], self._line[SIN], self._line[HALF] = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
        return True

    def _compose(self, recording: Recording, rows: int) -> tuple[array, int]:
        """A pass that reads this chain's ids and states, then the head on its last row; and where that row is."""
        program, stream = array("q", recording.program), recording.result.data_ptr() + 4 * self._width * (rows - 1)
        for at in recording.ids_at:
            program[at] = abi.address(self._ids)
        for at in recording.states_at:
            program[at] = self._states.data_ptr()
        norm, logits = self._head
        for line in ((norm[0], stream, *norm[2:]), logits):
            program.extend((*line, *(0,) * (abi.WORDS - len(line))))
        return program, stream

    def run(self, before: int, pages: array, feed: Sequence[int], states: Tensor | None, want: Ahead) -> Guesses:
        """Reads ``feed`` after ``before`` tokens, whose K and V ``pages`` hold with room for all that follow, and goes on with its own
        guesses. ``states``: float32 [len(feed), H]. Only where `ready`, just before. Raises StepFailed when logits are no numbers."""
        rows, line, address = len(feed), self._line, abi.address
        _, program, stream = self._programs[rows]
        self._ids[:rows] = array("q", feed)
        drawn = LIKELIEST if want.places is None else (
            want.temperature, address(want.places), want.top_k if want.top_k < line[COLUMNS] else 0, want.top_p, want.min_p)
        ends = TO_THE_END if want.ends is None else (*map(address, want.ends), len(want.ends[0]))
        CALL.pack_into(line, 0, address(program), len(program) // abi.WORDS, stream,
                       *((0, 0) if states is None else (states.data_ptr(), self._states.data_ptr())), address(pages), before, rows,
                       want.most, NO_END if want.known is None else want.known, *drawn, *ends)
        self._ops.run_chain(address(line))
        made = line[MADE]
        if made < 0:
            raise StepFailed("The model's output is not a number.", position=before + rows)
        ids = self._out[:made].tolist()
        return Guesses(ids, self._sure[:made].tolist(), [*feed, *ids[:line[PASSES] - 1]])
