"""A pass recorded once and run again as one native call: at one row the 240 calls of a pass cost as much as a tenth of it.

A recording holds the instructions of one number of rows; what changes from pass to pass (ids, positions, pages, rotation)
is reached through one batch descriptor, which is rewritten. Anything that a decoder computes between the ops would be lost,
so a recording is trusted only after it has given, bit for bit, what the ordinary pass gives on another batch; a decoder that
fails this keeps the ordinary way for good. Knows instructions and batches; knows nothing of models.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backends.kernels import Batch, KVLayer, native_abi as abi

if TYPE_CHECKING:
    from backends.kernels.cpu import CpuOps

# Where an instruction holds the address of rows it reads or adds to: all must be workspace, which outlives the recording.
STREAMS = {abi.EMBED: (4,), abi.NORM: (1,), abi.ACT: (1,), abi.MATMUL: (4,), abi.NORM_ADD: (1, 5), abi.GLU_OP: (1,),
           abi.ATTEND: (1,),
           abi.LOGITS: (4,), abi.GATED: ()}
Forward = Callable[[Batch, Sequence[KVLayer]], Tensor]


@dataclass(eq=False)
class Recording:
    """The program of one pass. ``ids_at``: words of the program that hold the address of the batch's ids."""

    program: array
    ids_at: tuple[int, ...]
    states_at: tuple[int, ...]          # of the batch's states
    result: Tensor
    batch: Batch
    keep: list[object] = field(default_factory=list)
    trusted: bool = False


class Replay:
    """Passes of one decoder, replayed where the rows are few. One caller at a time, as for the ops themselves."""

    def __init__(self, ops: CpuOps, few: int) -> None:
        self._ops, self._few = ops, few
        self._known: dict[int, Recording | None] = {}          # by rows; None: not replayable
        self._kv: Sequence[KVLayer] | None = None

    def run(self, forward: Forward, batch: Batch, kv: Sequence[KVLayer]) -> Tensor:
        """What ``forward(batch, kv)`` returns; ``forward`` is always the same pass, made of these ops."""
        rows = batch.ids.shape[0]
        if rows > self._few:
            return forward(batch, kv)
        if kv is not self._kv:
            self._known, self._kv = {}, kv
        if rows not in self._known:
            return self._record(forward, batch, kv)
        known = self._known[rows]
        if known is None:
            return forward(batch, kv)
        return self._replay(known, batch) if known.trusted else self._try(known, forward, batch, kv)

    def replays(self, rows: int) -> bool:
        """Are passes of this many rows replayed by now?"""
        return self.trusted(rows) is not None

    def trusted(self, rows: int) -> Recording | None:
        known = self._known.get(rows)
        return known if known is not None and known.trusted else None

    def _record(self, forward: Forward, batch: Batch, kv: Sequence[KVLayer]) -> Tensor:
        ids, states = batch.ids.data_ptr(), 0 if batch.states is None else batch.states.data_ptr()
        with self._ops.recording() as lines:
            result = forward(batch, kv)
        program = array("q")
        ids_at, states_at = [], []
        for line in lines:
            if line[0] == abi.EMBED and line[2] == ids:
                ids_at.append(len(program) + 2)
            if line[0] == abi.NORM and line[1] == states:
                states_at.append(len(program) + 1)
            program.extend((*line, *(0,) * (abi.WORDS - len(line))))
        own = self._ops.addresses()
        streams = {line[at] for line in lines for at in STREAMS[line[0]]} | {result.data_ptr()}
        whole = bool(ids_at) and streams - {states} <= own
        self._known[batch.ids.shape[0]] = Recording(program, tuple(ids_at), tuple(states_at), result, batch,
                                                    self._ops.workspace()) if whole else None
        return result

    def _try(self, known: Recording, forward: Forward, batch: Batch, kv: Sequence[KVLayer]) -> Tensor:
        """Replay, then the ordinary pass, which writes the same K and V again."""
        self._ops.poison()
        replayed = self._replay(known, batch).clone()
        result = forward(batch, kv)
        if not torch.equal(replayed, result):
            self._known[batch.ids.shape[0]] = None
        elif not torch.equal(batch.ids, known.batch.ids) or not torch.equal(batch.positions, known.batch.positions):
            known.trusted = True
        return result

    def _replay(self, known: Recording, batch: Batch) -> Tensor:
        ids = batch.ids.to(torch.int64).contiguous()           # itself, where it is that already
        self._ops.bind(batch)
        for at in known.ids_at:
            known.program[at] = ids.data_ptr()
        for at in known.states_at:
            known.program[at] = batch.states.data_ptr()
        self._ops.run(known.program)
        return known.result
