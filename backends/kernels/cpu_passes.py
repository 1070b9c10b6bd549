"""Passes of one sequence's few rows, head included, in one native call that makes its batch itself.

Between two passes the weights have driven everything out of the processor's caches: positions, slots and the rest of a batch,
made in Python, cost as much as a layer then. What is run is what `cpu_replay.py` has recorded and trusts, so the rows are the
same, bit for bit. Knows programs; nothing of models or slots.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from backends.kernels import KVLayer, native_abi as abi
from backends.kernels.cpu_replay import Recording, Replay

if TYPE_CHECKING:
    from backends.kernels.cpu import CpuOps

CALL = struct.Struct("10qd2q2d4q")       # the words of `Chain` in abi.h that change with every call; behind them:
(NEXT, NEXT_LINES, NEXT_STREAM, WIDTH, IDS, BATCH, COS, SIN, HALF, PAGE, LOGITS, NAMES, COLUMNS, FOUND, OUT, SURE, MADE,
 PASSES) = range(CALL.size // 8, abi.CHAIN_WORDS)
ONE_PASS = (0, 0, 0.0, 0, 0, 1.0, 0.0, 0, 0, 0, 0)       # no id is chosen behind it
TO = 4                                   # the word of a product of logits that says where they go
Turns = Callable[[int], tuple[Tensor, Tensor] | None]


class Program(NamedTuple):
    """A recorded pass and the head behind it. ``stream``: where its last row is left."""

    recording: Recording
    words: array
    lines: int
    stream: int


class Passes:
    """Of one decoder over one KV cache. ``head``: its norm and head, rows [n, H] → logits; ``turns``: cos and sin [positions, half]
    of at least so many positions, or None."""

    def __init__(self, ops: CpuOps, replay: Replay, kv: Sequence[KVLayer], head: Callable[[Tensor], Tensor], width: int, turns: Turns) -> None:
        self._ops, self._replay, self._head, self._turns, self._width = ops, replay, head, turns, width
        self._heads: dict[int, tuple[list[tuple[int, ...]], Tensor]] = {}       # by rows: instructions and logits
        self._programs: dict[tuple[int, int], Program | None] = {}              # by rows of the pass and of the head
        self._ids = array("q", bytes(8 * abi.CHAIN_ROWS))
        self._states = torch.empty(abi.CHAIN_ROWS, width)
        self._turned: tuple[Tensor, Tensor] | None = None
        self._places = 0                                    # so many positions have their cos and sin
        self._line = line = abi.words(*(0,) * abi.CHAIN_WORDS)
        line[WIDTH], line[IDS], line[BATCH], line[PAGE] = width, abi.address(self._ids), ops.batch_address, kv[0].k.shape[2]

    def ready(self, before: int, rows: int) -> bool:
        """Can `run` read so many ids behind ``before`` tokens?"""
        return self._program(rows, rows) is not None and self._reaches(before + rows)

    def run(self, before: int, pages: array, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Reads ``ids`` after ``before`` tokens, whose K and V ``pages`` hold with room for theirs. Returns the logits of each,
        float32 [n, columns], and the residual stream, [n, H], which the next pass writes over. Only where `ready`, just before."""
        rows = len(ids)
        program = self._programs[rows, rows]
        logits = torch.empty_like(self._heads[rows][1])     # fresh: callers keep them
        program.words[-abi.WORDS + TO] = logits.data_ptr()
        self._ids[:rows] = array("q", ids)
        self._call(program, None, pages, before, rows, ONE_PASS)
        return logits, program.recording.result

    def _call(self, program: Program, states: Tensor | None, pages: array, before: int, rows: int, rest: tuple[float, ...]) -> None:
        given = (0, 0) if states is None else (states.data_ptr(), self._states.data_ptr())
        CALL.pack_into(self._line, 0, abi.address(program.words), program.lines, program.stream, *given, abi.address(pages), before,
                       rows, *rest)
        self._ops.run_chain(abi.address(self._line))

    def _program(self, rows: int, wanted: int) -> Program | None:
        """The pass of so many rows, and the head on the last ``wanted``; None: not recorded yet, or not of this kind."""
        known = self._programs.get((rows, wanted))
        recording = self._replay.trusted(rows) if rows <= abi.CHAIN_ROWS else None
        if recording is None or known is not None and known.recording is recording:
            return known if recording is not None else None
        made = self._programs[rows, wanted] = self._compose(recording, rows, wanted)
        return made

    def _compose(self, recording: Recording, rows: int, wanted: int) -> Program | None:
        if wanted not in self._heads:
            self._heads[wanted] = self._record(wanted)
        lines, _ = self._heads[wanted]
        if not lines:
            return None
        program, row = array("q", recording.program), 4 * self._width
        for at in recording.ids_at:
            program[at] = abi.address(self._ids)
        for at in recording.states_at:
            program[at] = self._states.data_ptr()
        norm, logits = lines
        start = recording.result.data_ptr() + row * (rows - wanted)
        for line in ((norm[0], start, *norm[2:]), logits):
            program.extend((*line, *(0,) * (abi.WORDS - len(line))))
        return Program(recording, program, len(program) // abi.WORDS, recording.result.data_ptr() + row * (rows - 1))

    def _record(self, rows: int) -> tuple[list[tuple[int, ...]], Tensor]:
        """The head's instructions and where they leave the logits; [] where they are not those of one norm and one product."""
        stream = torch.zeros(rows, self._width)
        with self._ops.recording() as lines:
            logits = self._head(stream)
        plain = [line[0] for line in lines] == [abi.NORM, abi.LOGITS] and lines[0][1] == stream.data_ptr() \
            and lines[1][TO] == logits.data_ptr()
        return (lines if plain else []), logits

    def _reaches(self, last: int) -> bool:
        """Are there cos and sin up to place ``last``?"""
        if last >= self._places:
            self._turned = self._turns(last + 1)
            self._places = 0 if self._turned is None else len(self._turned[0])
            if self._turned is not None:
                cos, sin = self._turned
                self._line[COS], self._line[SIN], self._line[HALF] = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
        return self._turned is not None
