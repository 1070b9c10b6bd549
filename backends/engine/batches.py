"""Steps → the numbers of a forward pass: ids, positions, pages, slots of packed ragged rows.

Between two passes the weights have driven everything out of the caches, so what is made here is paid three times over: the
usual passes take views of tables and few small arrays. Knows slots and pages; nothing of weights.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from backends.base import Step
from backends.engine.arch import Arch
from backends.engine.kv import PAGE
from backends.engine.transfer import send
from backends.kernels import Batch

if TYPE_CHECKING:
    from backends.engine.runner import PagedSlot


class Batches:
    """Makes the `Batch` of some steps. ``pages``: of the cache."""

    def __init__(self, arch: Arch, device: torch.device, pages: int) -> None:
        self.arch, self.device = arch, device
        self._even: dict[int, tuple[Tensor, Tensor]] = {}       # starts and wanted of n sequences with one row each
        self._starts = [torch.tensor([0, rows], dtype=torch.int32) for rows in range(PAGE + 1)]
        # 0, 1, 2, …: any run of positions, or of slots within a page, is a view of it
        self._count, self._short = (torch.arange(pages * PAGE + 1, dtype=kind) if device.type == "cpu" else None
                                    for kind in (torch.int64, torch.int32))

    def __call__(self, steps: Sequence[Step]) -> Batch:
        if self.device.type != "cpu":
            return self._ragged(steps)
        if len(steps) == 1 and steps[0].slot.length % PAGE + len(steps[0].tokens) <= PAGE:
            return self._within_a_page(steps[0].slot, steps[0].tokens, steps[0].want)
        return self._decoding(steps) if all(len(step.tokens) == step.want == 1 for step in steps) else self._ragged(steps)

    def _within_a_page(self, slot: PagedSlot, tokens: Sequence[int], want: int) -> Batch:
        """One sequence and few tokens, as nearly always where one answer is made, drafted or not."""
        rows, before = len(tokens), slot.length
        after, last, run = before + rows, before // PAGE, self._count.narrow          # of all ways to a view the shortest
        positions, slots = run(0, before, rows), run(0, slot.pages[last] * PAGE + before % PAGE, rows)
        pages = torch.frombuffer(slot.pages[:last + 1], dtype=torch.int32).view(1, last + 1)
        return Batch(torch.frombuffer(array("q", tokens), dtype=torch.int64), positions, self._starts[rows],
                     self._short.narrow(0, after, 1), pages, slots, run(0, rows - want, want),
                     *self.arch.rotation(positions, after - 1, True))

    def _decoding(self, steps: Sequence[Step]) -> Batch:
        """Several sequences that add one token each and want its row."""
        befores = [len(step.slot.tokens) for step in steps]
        pages = np.zeros((len(steps), max(befores) // PAGE + 1), np.int32)
        places = []
        for row, (step, before) in enumerate(zip(steps, befores)):
            held, last = step.slot.pages, before // PAGE
            pages[row, :last + 1] = held[:last + 1]
            places.append(held[last] * PAGE + before % PAGE)
        if len(steps) not in self._even:
            self._even[len(steps)] = torch.arange(len(steps) + 1, dtype=torch.int32), torch.arange(len(steps))
        starts, wanted = self._even[len(steps)]
        numbers = np.array([[step.tokens[0] for step in steps], befores, places], np.int64)
        ids, positions, slots = map(torch.from_numpy, numbers)                 # a third of the time of three torch.tensor
        lengths = numbers[1].astype(np.int32)
        lengths += 1
        return Batch(ids, positions, starts, torch.from_numpy(lengths), torch.from_numpy(pages), slots, wanted,
                     *self.arch.rotation(positions, max(befores)))

    def _ragged(self, steps: Sequence[Step]) -> Batch:
        counts = [len(step.tokens) for step in steps]
        starts = np.zeros(len(steps) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        befores = np.array([step.slot.length for step in steps], np.int64)
        lengths = (befores + counts).astype(np.int32)
        sequence = np.repeat(np.arange(len(steps)), counts)
        positions = np.arange(starts[-1]) - starts[:-1][sequence] + befores[sequence]
        longest = int(lengths.max())
        pages = np.zeros((len(steps), -(-longest // PAGE)), np.int32)
        for row, step in enumerate(steps):
            used = -(-int(lengths[row]) // PAGE)
            pages[row, :used] = step.slot.pages[:used]
        slots = pages[sequence, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
        wanted = np.concatenate([np.arange(end - step.want, end, dtype=np.int64) for step, end in zip(steps, starts[1:])])
        ids = np.fromiter((token for step in steps for token in step.tokens), np.int64, starts[-1])
        ids, positions, starts, lengths, pages, slots, wanted = send(
            (ids, positions, starts, lengths, pages, slots, wanted), self.device)
        return Batch(ids, positions, starts, lengths, pages, slots, wanted, *self.arch.rotation(positions, longest - 1))
