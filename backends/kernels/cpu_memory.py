"""Memory for packed weights: a few large mappings that the system may back with huge pages.

A decode step reads every weight once, so with pages of 4 KiB it misses the translation buffer once in 64 lines; on a virtual
machine, whose misses cost two walks, that halves the bandwidth a core gets. Knows bytes and the system's advice; nothing of
layouts. What is not taken from a mapping is never touched, and so costs nothing.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HUGE = 2 << 20                  # bytes of a huge page on x86-64, and a multiple of those of 64 KiB on AArch64
BLOCK = 64 << 20                # of one mapping; what is larger than an eighth of it gets one of its own
LINE = 64
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Arena:
    """Hands out pieces of mappings. A mapping goes when the last tensor over it does."""

    def __init__(self) -> None:
        self._block: Tensor | None = None
        self._used = 0

    def take(self, size: int) -> Tensor:
        """uint8 [size], zeros, at a cache line."""
        if size > BLOCK // 8:
            return mapped(size)[:size]
        start = -(-self._used // LINE) * LINE
        if self._block is None or start + size > BLOCK:
            self._block, start = mapped(BLOCK), 0
        self._used = start + size
        return self._block[start:start + size]

    def keep(self, values: Tensor) -> Tensor:
        """A contiguous copy in here."""
        raw = self.take(values.numel() * values.element_size())
        return raw.view(values.dtype).view(values.shape).copy_(values)


def mapped(size: int) -> Tensor:
    """uint8, at least ``size`` bytes of zeros at a cache line, in huge pages where the system gives them; untouched, none is
    there yet."""
    room = -(-size // HUGE) * HUGE
    if not allowed():
        return untouched(room)
    memory = mmap.mmap(-1, room + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE
    return whole[first:first + room]


def untouched(size: int) -> Tensor:
    """uint8 [size], zeros at a cache line in ordinary pages; what nobody writes to costs none."""
    if hasattr(mmap, "MAP_ANONYMOUS"):                         # a freed block of the heap would be filled by hand
        return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    raw = np.zeros(size + LINE, dtype=np.uint8)                # calloc: torch.zeros would write every byte
    first = -raw.ctypes.data % LINE
    return torch.from_numpy(raw[first:first + size])


def allowed() -> bool:
    """Does this system give huge pages to whoever asks?"""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in SETTING.read_text()
    except OSError:
        return False
