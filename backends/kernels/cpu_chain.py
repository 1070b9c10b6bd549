"""Ids that a small model guesses one after another, in one native call: between two passes of a large model everything is cold,
and to ask for a pass from Python costs more than a pass of a few megabytes.

The passes are those that `cpu_replay.py` has recorded and trusts, each followed by norm and head of its last row; what is chosen
and when it ends is said by an `Ahead`, whose rules are those of `engine/sampler.py`. Knows programs; nothing of models or slots.
"""

from __future__ import annotations

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

MOST = 16               # ids of one call
NO_END = 2**63 - 1
(FIRST, NEXT, FIRST_LINES, NEXT_LINES, FIRST_STREAM, NEXT_STREAM, GIVEN, STATES, WIDTH, IDS, BATCH, COS, SIN, HALF, PAGES, PAGE,
 BEFORE, ROWS, LOGITS, NAMES, COLUMNS, FOUND, MOST_IDS, KNOWN, TEMPERATURE, PLACES, TOP_K, TOP_P, MIN_P, EDGES, RATES, NEEDS, BANDS,
 OUT, SURE, MADE, PASSES) = range(abi.CHAIN_WORDS)
Turns = Callable[[int], tuple[Tensor, Tensor] | None]


class Chain:
    """Of one decoder over one KV cache. ``head``: its norm and head, rows [1, H] → logits; ``turns``: cos and sin [positions, half]
    of at least so many positions, or None; ``names``: int64, the id of each column of the logits (None: a column is its id);
    ``columns``: so many of them count."""

    def __init__(self, ops: CpuOps, replay: Replay, kv: Sequence[KVLayer], head: Callable[[Tensor], Tensor], width: int,
                 turns: Turns, names: Tensor | None, columns: int) -> None:
        self._ops, self._replay, self._turns, self._width = ops, replay, turns, width
        self._programs: dict[int, tuple[Recording, array]] = {}       # by rows of the first pass
        self._ids = array("q", bytes(8 * abi.CHAIN_ROWS))
        self._states = torch.empty(abi.CHAIN_ROWS, width)
        self._out, self._sure = array("q", bytes(8 * MOST)), array("d", bytes(8 * MOST))
        self._head, self._logits = self._record(head)
        found = torch.empty(columns, dtype=torch.int32)
        names = None if names is None else names.to(torch.int64).contiguous()
        self._keep = kv, names, found, head
        self._line = line = abi.words(*(0,) * abi.CHAIN_WORDS)
        line[WIDTH], line[IDS], line[BATCH], line[PAGE] = width, abi.address(self._ids), ops.batch_address, kv[0].k.shape[2]
        line[NAMES], line[COLUMNS], line[FOUND] = abi.pointer(names), columns, found.data_ptr()
        line[LOGITS] = abi.pointer(self._logits)
        line[OUT], line[SURE] = abi.address(self._out), abi.address(self._sure)

    def _record(self, head: Callable[[Tensor], Tensor]) -> tuple[list[tuple[int, ...]], Tensor | None]:
        """The head's instructions and where they leave the logits; [] where they are not those of one norm and one product."""
        row = torch.zeros(1, self._width)
        with self._ops.recording() as lines:
            logits = head(row)
        plain = [line[0] for line in lines] == [abi.NORM, abi.LOGITS] and lines[0][1] == row.data_ptr() \
            and lines[1][4] == logits.data_ptr()
        return (lines, logits) if plain else ([], None)

    def ready(self, rows: int, last: int) -> bool:
        """Can it begin with that many rows, and go on to place ``last``?"""
        return bool(self._head) and rows <= abi.CHAIN_ROWS and self._program(rows) is not None and self._program(1) is not None \
            and self._turns(last + 1) is not None

    def _program(self, rows: int) -> tuple[Recording, array] | None:
        recording = self._replay.trusted(rows)
        if recording is None:
            return None
        known = self._programs.get(rows)
        if known is None or known[0] is not recording:
            known = self._programs[rows] = recording, self._compose(recording, rows)
        return known

    def _compose(self, recording: Recording, rows: int) -> array:
        """A pass that reads this chain's ids and states, then the head on its last row."""
        program = array("q", recording.program)
        for at in recording.ids_at:
            program[at] = abi.address(self._ids)
        for at in recording.states_at:
            program[at] = self._states.data_ptr()
        norm, logits = self._head
        for line in ((norm[0], self._stream(recording, rows), *norm[2:]), logits):
            program.extend((*line, *(0,) * (abi.WORDS - len(line))))
        return program

    def _stream(self, recording: Recording, rows: int) -> int:
        return recording.result.data_ptr() + 4 * self._width * (rows - 1)

    def run(self, before: int, pages: array, feed: Sequence[int], states: Tensor | None, want: Ahead) -> Guesses:
        """Reads ``feed`` after ``before`` tokens, whose K and V ``pages`` hold with room for all that follow, and goes on with its own
        guesses. ``states``: float32 [len(feed), H]. Only where `ready`.
        Raises StepFailed when logits are no numbers."""
        rows, line = len(feed), self._line
        (recording, first), (one, following) = self._program(rows), self._program(1)
        cos, sin = self._turns(before + rows + want.most)
        self._ids[:rows] = array("q", feed)
        line[FIRST], line[FIRST_LINES], line[FIRST_STREAM] = abi.address(first), len(first) // abi.WORDS, self._stream(recording, rows)
        line[NEXT], line[NEXT_LINES], line[NEXT_STREAM] = abi.address(following), len(following) // abi.WORDS, one.result.data_ptr()
        line[STATES], line[GIVEN] = (0, 0) if states is None else (self._states.data_ptr(), states.data_ptr())
        line[COS], line[SIN], line[HALF] = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        line[PAGES], line[BEFORE], line[ROWS] = abi.address(pages), before, rows
        line[MOST_IDS], line[KNOWN] = min(MOST, want.most), NO_END if want.known is None else want.known
        self._choices(want)
        try:
            self._ops.run_chain(abi.address(line))
        finally:
            self._ops.unbind()
        made = line[MADE]
        if made < 0:
            raise StepFailed("The model's output is not a number.", position=before + rows)
        ids = self._out[:made].tolist()
        return Guesses(ids, self._sure[:made].tolist(), [*feed, *ids[:line[PASSES] - 1]])

    def _choices(self, want: Ahead) -> None:
        line = self._line
        if want.places is None:
            line[TEMPERATURE] = 0
        else:
            line[TEMPERATURE], line[PLACES] = abi.bits(want.temperature), abi.address(want.places)
            line[TOP_K], line[TOP_P], line[MIN_P] = want.top_k, abi.bits(want.top_p), abi.bits(want.min_p)
        line[BANDS] = 0
        if want.ends is not None:
            edges, rates, needs = want.ends
            line[EDGES], line[RATES], line[NEEDS], line[BANDS] = abi.address(edges), abi.address(rates), abi.address(needs), len(edges)
