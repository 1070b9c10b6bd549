"""The block types of ggml: packed bytes → codes, scales and offsets. Vectorised over all blocks of a tensor.

Knows one byte layout per type and nothing of files, names or models. Every type here is a linear one (a code times a scale,
less a zero or plus a bias), so its translation is exact: `QWeight.dequantize()` gives what the ggml reference gives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from backends.kernels import QWeight

HALF = torch.float16


def _half(raw: Tensor, start: int) -> Tensor:
    """The fp16 number at ``start`` of each block: raw uint8 [N, B, bytes] → float16 [N, B, 1]."""
    return raw[..., start:start + 2].contiguous().view(HALF)


def _codes(raw: Tensor, width: int) -> Tensor:
    return torch.empty(*raw.shape[:2], width, dtype=torch.uint8)


def _nibbles(raw: Tensor, out: Tensor) -> Tensor:
    """[…, n] bytes → […, 2 n]: all low halves, then all high halves."""
    n = raw.shape[-1]
    torch.bitwise_and(raw, 15, out=out[..., :n])
    torch.bitwise_right_shift(raw, 4, out=out[..., n:])
    return out


def _zero(scale: Tensor, value: int) -> Tensor:
    """The one zero of a symmetric type for every group, without memory of its own."""
    return torch.tensor(value, dtype=torch.uint8).expand(scale.shape)


def _weight(codes: Tensor, scale: Tensor, bits: int, group: int, *, zero: int | None = None,
            bias: Tensor | None = None) -> QWeight:
    rows = codes.shape[0]
    scale = scale.reshape(rows, -1)
    return QWeight(codes.reshape(rows, -1), scale, None if zero is None else _zero(scale, zero),
                   None if bias is None else bias.reshape(rows, -1), bits, group)


# ---------------------------------------------------------------------------------------------- blocks of 32
def q8_0(raw: Tensor) -> QWeight:
    return _weight(raw[..., 2:].bitwise_xor(128), _half(raw, 0), 8, 32, zero=128)      # int8 → uint8: + 128


def q4_0(raw: Tensor) -> QWeight:
    return _weight(_nibbles(raw[..., 2:], _codes(raw, 32)), _half(raw, 0), 4, 32, zero=8)


def q4_1(raw: Tensor) -> QWeight:
    return _weight(_nibbles(raw[..., 4:], _codes(raw, 32)), _half(raw, 0), 4, 32, bias=_half(raw, 2))


def _fives(raw: Tensor, start: int) -> Tensor:
    """Codes of Q5: 32 fifth bits in 4 bytes, then 16 bytes of nibbles."""
    codes = _nibbles(raw[..., start + 4:], _codes(raw, 32))
    high = raw[..., start:start + 4].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return codes.bitwise_or_(high.flatten(-2) << 4)


def q5_0(raw: Tensor) -> QWeight:
    return _weight(_fives(raw, 2), _half(raw, 0), 5, 32, zero=16)


def q5_1(raw: Tensor) -> QWeight:
    return _weight(_fives(raw, 4), _half(raw, 0), 5, 32, bias=_half(raw, 2))


# ---------------------------------------------------------------------------------------------- blocks of 256
def _planes(raw: Tensor, bits: int, run: int) -> Tensor:
    """Codes of ``bits`` bits laid in planes: in each run of ``run`` bytes first all lowest fields, then the next ones.
    uint8 [N, B, n] → [N, B, n / run, 8 / bits, run]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    return (raw.unflatten(-1, (-1, 1, run)) >> shifts).bitwise_and_((1 << bits) - 1)


def q2_k(raw: Tensor) -> QWeight:
    fields, codes = raw[..., :16], _planes(raw[..., 16:80], 2, 32)
    scale = _half(raw, 80).float() * (fields & 15).float()
    bias = -(_half(raw, 82).float() * (fields >> 4).float())
    return _weight(codes.flatten(2), scale, 2, 16, bias=bias)


def q3_k(raw: Tensor) -> QWeight:
    low, high = _planes(raw[..., 32:96], 2, 32), _planes(raw[..., :32], 1, 32)      # high bit set: no offset of -4
    codes = low.flatten(2) | high.flatten(2) << 2
    packed = raw[..., 96:108]
    fields = _planes(packed[..., :8], 4, 8).flatten(2) | _planes(packed[..., 8:], 2, 4).flatten(2) << 4
    return _weight(codes, _half(raw, 108).float() * (fields.float() - 32), 3, 16, zero=4)


def _sixes(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 minima of 6 bits that Q4_K and Q5_K pack into 12 bytes → float [N, B, 8] each."""
    d, m, rest = packed.unflatten(-1, (3, 4)).unbind(-2)
    scale = torch.cat([d & 63, rest & 15 | d >> 2 & 48], -1)
    low = torch.cat([m & 63, rest >> 4 | m >> 2 & 48], -1)
    return scale.float(), low.float()


def q4_k(raw: Tensor) -> QWeight:
    scale, low = _sixes(raw[..., 4:16])
    codes = _planes(raw[..., 16:], 4, 32).flatten(2)
    return _weight(codes, _half(raw, 0).float() * scale, 4, 32, bias=-(_half(raw, 2).float() * low))


def q5_k(raw: Tensor) -> QWeight:
    scale, low = _sixes(raw[..., 4:16])
    codes = _planes(raw[..., 48:], 4, 32).flatten(2) | _planes(raw[..., 16:48], 1, 32).flatten(2) << 4
    return _weight(codes, _half(raw, 0).float() * scale, 5, 32, bias=-(_half(raw, 2).float() * low))


def q6_k(raw: Tensor) -> QWeight:
    codes = _planes(raw[..., :128], 4, 64).flatten(2) | _planes(raw[..., 128:192], 2, 32).flatten(2) << 4
    scale = _half(raw, 208).float() * raw[..., 192:208].contiguous().view(torch.int8).float()
    return _weight(codes, scale, 6, 16, zero=32)


QUANTIZED: dict[str, Callable[[Tensor], QWeight]] = {
    "Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1,
    "Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k}
FLOATS: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def unpack(kind: str, rows: Tensor, block_bytes: int) -> QWeight:
    """``rows``: uint8 [N, bytes of a row] of a quantized ``kind``."""
    return QUANTIZED[kind](rows.unflatten(-1, (-1, block_bytes)))
