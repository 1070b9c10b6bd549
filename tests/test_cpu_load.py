"""Matrices on their way from file to memory while Python goes on: the same bits as laid out by themselves, errors with names."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from backends.engine import gguf_blocks
from backends.errors import BrokenFile, MissingRequirement
from backends.gguf_file import TYPES
from backends.kernels import FileRows, QWeight, StoredWeight, native_abi as abi

SIZES = {name: (weights, size) for name, weights, size in TYPES.values()}


@pytest.fixture(scope="module")
def ops():
    from backends.kernels import cpu
    try:
        return cpu.make("auto", 2)
    except MissingRequirement as reason:
        pytest.skip(str(reason))


def blocks(kind: str, rows: int, columns: int) -> np.ndarray:
    """uint8 [rows, bytes]: any codes, and scales that are numbers."""
    weights, size = SIZES[kind]
    raw = np.random.default_rng(rows * columns).integers(0, 256, (rows, columns // weights, size), np.uint8)
    for at in {"Q4_K": (1, 3), "Q5_K": (1, 3), "Q6_K": (209,)}.get(kind, (1, 3) if kind == "Q4_1" else (1,)):
        raw[..., at] = raw[..., at] & 0x83 | 0x20          # float16: exponents around 2^-7
    return raw.reshape(rows, -1)


def in_file(path, kind: str, raw: np.ndarray, columns: int, heads: int = 0, front: int = 0, cut: int = 0) -> StoredWeight:
    """``raw`` after ``front`` bytes of something else; the last ``cut`` bytes are missing."""
    path.write_bytes(bytes(front) + raw.tobytes()[:raw.size - cut])
    size, width = len(raw), raw.shape[1]
    meant = raw.reshape(heads, -1, 2, width).swapaxes(1, 2).reshape(-1, width) if heads else raw
    rows = FileRows(f"{path.stem}.weight", path, front, (size, width), heads, lambda: torch.from_numpy(meant.copy()))
    return gguf_blocks.stored(kind, rows, columns, SIZES[kind][1])


def bits(made) -> list:
    """All that a packed matrix holds but addresses."""
    line = made.keep[0]
    return [list(line[5:]), *(None if t is None else t.flatten().view(torch.uint8).tolist() for t in made.keep[1:4])]


@pytest.mark.parametrize("kind", abi.STORED)
@pytest.mark.parametrize("rows, columns, heads", [(64, 512, 0), (5, 256, 0), (336, 768, 0), (96, 512, 4), (80, 256, 2)])
def test_the_same_bits_as_laid_out_by_itself(ops, tmp_path, kind, rows, columns, heads):
    weight = in_file(tmp_path / "m", kind, blocks(kind, rows, columns), columns, heads, front=7)
    with ops.loading():
        later = ops.pack(weight)
    assert bits(later) == bits(ops.pack(StoredWeight(kind, weight.parts, columns, weight.bits, weight.group, weight.unpack)))
    assert later.nbytes == ops.pack(weight).nbytes > 0


def test_many_matrices_in_pieces_and_stacked(ops, tmp_path):
    """Some larger than a piece, some handed over together, one of two that share an input."""
    kinds = [("Q8_0", 2048, 512), ("Q4_0", 48, 576), ("Q4_1", 1600, 1536), ("Q4_0", 16, 64)]
    weights = [in_file(tmp_path / f"{i}", kind, blocks(kind, n, k), k) for i, (kind, n, k) in enumerate(kinds)]
    stacked = QWeight.cat([in_file(tmp_path / f"s{i}", "Q4_1", blocks("Q4_1", n, 96), 96, heads)
                           for i, (n, heads) in enumerate([(96, 3), (32, 1), (24, 0)])])
    with ops.loading():
        made = [ops.pack(weight) for weight in (*weights, stacked)]
    assert all(bits(one) == bits(ops.pack(weight)) for one, weight in zip(made, (*weights, stacked)))


def test_what_is_no_multiple_of_16_rows_in_the_middle_is_read_first(ops, tmp_path):
    parts = [in_file(tmp_path / f"{i}", "Q4_0", blocks("Q4_0", n, 64), 64) for i, n in enumerate((24, 16))]
    with ops.loading():
        made = ops.pack(QWeight.cat(parts))
    assert bits(made) == bits(ops.pack(QWeight.cat(parts)))


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_a_file_that_ends_early_is_named(ops, tmp_path, kind):
    whole = in_file(tmp_path / "whole", kind, blocks(kind, 512, 512), 512)
    short = in_file(tmp_path / "short", kind, blocks(kind, 512, 512), 512, cut=1)
    with pytest.raises(BrokenFile, match="short ended inside the tensor 'short.weight'"), ops.loading():
        ops.pack(whole), ops.pack(short), ops.pack(whole)
    with ops.loading():                                    # the next load is none the worse
        made = ops.pack(whole)
    assert bits(made) == bits(ops.pack(whole))


def test_an_error_of_the_caller_ends_the_reading(ops, tmp_path):
    weight = in_file(tmp_path / "m", "Q8_0", blocks("Q8_0", 4096, 1024), 1024)
    threads = threading.active_count()
    for _ in range(3):
        with pytest.raises(KeyError), ops.loading():
            ops.pack(weight)
            raise KeyError
    assert threading.active_count() == threads and not [f for f in ops.__dict__.values() if isinstance(f, abi.Loader)]
    assert bits(ops.pack(weight)) == bits(ops.pack(weight))


def test_a_product_right_after_loading(ops, tmp_path):
    weight = in_file(tmp_path / "m", "Q4_1", blocks("Q4_1", 160, 576), 576)
    with ops.loading():
        made = ops.pack(weight)
    x = torch.randn(3, 576, generator=torch.Generator().manual_seed(1))
    found = ops.matmul(ops.act(x), made).clone()
    exact = x @ weight.dequantize().T
    assert (found - exact).norm() / exact.norm() < 0.02
