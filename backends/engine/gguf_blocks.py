"""The block types of ggml: packed bytes → codes, scales and offsets. Vectorised over all blocks of a tensor.

Knows one byte layout per type and nothing of files, names or models. Every type here is a linear one (a code times a scale,
less a zero or plus a bias), so its translation is exact: `QWeight.dequantize()` gives what the ggml reference gives.

numpy and not torch: a model is hundreds of matrices and thousands of short passes, and torch's threads meet after each one.
On a machine that is busy with anything else, those meetings cost more than the passes. Large matrices are cut by rows.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from backends.kernels import FileRows, QWeight, StoredWeight

Parts = tuple[ndarray, ndarray, "ndarray | None"]      # codes uint8 [N, B, …], scale [N, B, …], bias like scale or None
LARGE = 1 << 22                                        # bytes of a matrix from which on rows are shared out
Unpacker = Callable[[ndarray], Parts]


def _half(raw: ndarray, start: int) -> ndarray:
    """The fp16 number at ``start`` of each block: uint8 [N, B, bytes] → float16 [N, B, 1]."""
    return np.ascontiguousarray(raw[..., start:start + 2]).view(np.float16)


def _single(raw: ndarray, start: int) -> ndarray:
    return _half(raw, start).astype(np.float32)


def _planes(raw: ndarray, bits: int, run: int) -> ndarray:
    """Codes of ``bits`` bits laid in planes: in each run of ``run`` bytes first all lowest fields, then the next ones.
    uint8 [N, B, n] → [N, B, 8 / bits * n]."""
    runs = raw.reshape(*raw.shape[:2], -1, run)
    out = np.empty((*runs.shape[:3], 8 // bits, run), np.uint8)
    for place in range(8 // bits):
        field = out[..., place, :]
        np.right_shift(runs, bits * place, out=field)
        if place < 8 // bits - 1:
            np.bitwise_and(field, (1 << bits) - 1, out=field)
    return out.reshape(*raw.shape[:2], -1)


def _merged(low: ndarray, high: ndarray, bits: int) -> ndarray:
    """Codes whose upper part lies elsewhere; in place."""
    np.left_shift(high, bits, out=high)
    return np.bitwise_or(low, high, out=low)


# ---------------------------------------------------------------------------------------------- blocks of 32
def q8_0(raw: ndarray) -> Parts:
    return raw[..., 2:] ^ 128, _half(raw, 0), None      # int8 → uint8: + 128


def q4_0(raw: ndarray) -> Parts:
    return _planes(raw[..., 2:], 4, 16), _half(raw, 0), None


def q4_1(raw: ndarray) -> Parts:
    return _planes(raw[..., 4:], 4, 16), _half(raw, 0), _half(raw, 2)


def _fives(raw: ndarray, start: int) -> ndarray:
    """Codes of Q5: 32 fifth bits in 4 bytes, in order, then 16 bytes of nibbles."""
    high = np.unpackbits(np.ascontiguousarray(raw[..., start:start + 4]), axis=-1, bitorder="little")
    return _merged(_planes(raw[..., start + 4:], 4, 16), high, 4)


def q5_0(raw: ndarray) -> Parts:
    return _fives(raw, 2), _half(raw, 0), None


def q5_1(raw: ndarray) -> Parts:
    return _fives(raw, 4), _half(raw, 0), _half(raw, 2)


# ---------------------------------------------------------------------------------------------- blocks of 256
def q2_k(raw: ndarray) -> Parts:
    fields = raw[..., :16]
    scale, low = _single(raw, 80) * (fields & 15), _single(raw, 82) * (fields >> 4)
    return _planes(raw[..., 16:80], 2, 32), scale, -low


def q3_k(raw: ndarray) -> Parts:
    codes = _merged(_planes(raw[..., 32:96], 2, 32), _planes(raw[..., :32], 1, 32), 2)      # high bit set: no offset of -4
    packed = raw[..., 96:108]
    fields = _merged(_planes(packed[..., :8], 4, 8), _planes(packed[..., 8:], 2, 4), 4)
    return codes, _single(raw, 108) * (fields.astype(np.float32) - 32), None


def _sixes(packed: ndarray) -> tuple[ndarray, ndarray]:
    """The 8 scales and 8 minima of 6 bits that Q4_K and Q5_K pack into 12 bytes → uint8 [N, B, 8] each."""
    d, m, rest = (packed[..., start:start + 4] for start in (0, 4, 8))
    scale = np.concatenate([d & 63, rest & 15 | d >> 2 & 48], -1)
    return scale, np.concatenate([m & 63, rest >> 4 | m >> 2 & 48], -1)


def q4_k(raw: ndarray) -> Parts:
    scale, low = _sixes(raw[..., 4:16])
    return _planes(raw[..., 16:], 4, 32), _single(raw, 0) * scale, -(_single(raw, 2) * low)


def q5_k(raw: ndarray) -> Parts:
    scale, low = _sixes(raw[..., 4:16])
    codes = _merged(_planes(raw[..., 48:], 4, 32), _planes(raw[..., 16:48], 1, 32), 4)
    return codes, _single(raw, 0) * scale, -(_single(raw, 2) * low)


def q6_k(raw: ndarray) -> Parts:
    codes = _merged(_planes(raw[..., :128], 4, 64), _planes(raw[..., 128:192], 2, 32), 4)
    return codes, _single(raw, 208) * np.ascontiguousarray(raw[..., 192:208]).view(np.int8), None


# name: (how to unpack a block, bits of a code, weights that share a scale, the one zero of a symmetric type)
QUANTIZED: dict[str, tuple[Unpacker, int, int, int | None]] = {
    "Q8_0": (q8_0, 8, 32, 128), "Q4_0": (q4_0, 4, 32, 8), "Q4_1": (q4_1, 4, 32, None), "Q5_0": (q5_0, 5, 32, 16),
    "Q5_1": (q5_1, 5, 32, None), "Q2_K": (q2_k, 2, 16, None), "Q3_K": (q3_k, 3, 16, 4), "Q4_K": (q4_k, 4, 32, None),
    "Q5_K": (q5_k, 5, 32, None), "Q6_K": (q6_k, 6, 16, 32)}
FLOATS: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def stored(kind: str, rows: FileRows | Tensor, columns: int, block_bytes: int) -> StoredWeight:
    """``rows`` of a quantized ``kind``, unpacked only for a target that wants codes."""
    _, bits, group, _ = QUANTIZED[kind]
    return StoredWeight(kind, (rows,), columns, bits, group,
                        lambda blocks: unpack(kind, blocks.numpy(), block_bytes))


def unpack(kind: str, rows: ndarray, block_bytes: int) -> QWeight:
    """``rows``: uint8 [N, bytes of a row] of a quantized ``kind``."""
    read, bits, group, middle = QUANTIZED[kind]
    count = len(rows)

    def part(raw: ndarray) -> tuple[ndarray | None, ...]:
        made = read(raw.reshape(len(raw), -1, block_bytes))
        return tuple(None if values is None else values.reshape(len(raw), -1) for values in made)

    codes, scale, bias = _by_rows(part, rows) if rows.nbytes >= LARGE and count > 1 else part(rows)
    # A zero for every group, without memory of its own
    zero = None if middle is None else torch.tensor(middle, dtype=torch.uint8).expand(scale.shape)
    return QWeight(torch.from_numpy(codes), torch.from_numpy(scale), zero, None if bias is None else torch.from_numpy(bias),
                   bits, group)


def _by_rows(part: Callable[[ndarray], tuple[ndarray | None, ...]], rows: ndarray) -> list[ndarray | None]:
    """The same, a piece a thread: numpy lets go of the interpreter while it works."""
    workers = max(1, min(torch.get_num_threads(), len(rows)))
    with ThreadPoolExecutor(workers) as pool:
        pieces = list(pool.map(part, np.array_split(rows, workers)))
    return [None if values[0] is None else np.concatenate(values) for values in zip(*pieces)]


def floats(kind: str, raw: ndarray) -> Tensor:
    """uint8 [bytes] → a float tensor [n]."""
    return torch.from_numpy(raw).view(FLOATS[kind])
