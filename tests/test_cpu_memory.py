"""The arena of packed weights: pieces do not overlap, begin at cache lines, and their memory goes when they do."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch

from backends.kernels import cpu_memory
from backends.kernels.cpu_memory import BLOCK, HUGE, LINE, Arena


@pytest.fixture(params=["advised", "refused"])
def arena(request, monkeypatch):
    if request.param == "refused":
        monkeypatch.setattr(cpu_memory, "allowed", lambda: False)
    elif not cpu_memory.allowed():
        pytest.skip("this system gives no huge pages")
    return Arena()


def test_pieces_are_apart_aligned_and_zero(arena):
    sizes = [1, 63, 64, 65, 4096, BLOCK // 8, BLOCK // 8 + 1, 3 * HUGE + 5, 1000] + [BLOCK // 9] * 9
    pieces = [arena.take(size) for size in sizes]
    spans = sorted((piece.data_ptr(), piece.numel()) for piece in pieces)
    assert [piece.numel() for piece in pieces] == sizes
    assert all(not start % LINE for start, _ in spans)
    assert all(start + size <= later for (start, size), (later, _) in zip(spans, spans[1:]))
    assert not any(piece.any() for piece in pieces)


def test_kept_values_are_a_copy(arena):
    values = torch.arange(60, dtype=torch.float16).view(6, 10).t()
    kept = arena.keep(values)
    assert kept.is_contiguous() and torch.equal(kept, values) and kept.data_ptr() != values.data_ptr()


def test_memory_comes_and_goes(arena):
    process = psutil.Process()
    before = process.memory_info().rss
    held = arena.take(20 * HUGE).fill_(1)
    assert process.memory_info().rss - before > 19 * HUGE
    del held
    gc.collect()
    assert process.memory_info().rss - before < 2 * HUGE
