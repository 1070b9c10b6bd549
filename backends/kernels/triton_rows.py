"""Triton kernels that take one row at a time: norms, gated activations, rows of a table, gathered columns. float32 inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.kernels.triton_matmul import tanh, whole
from backends.kernels.triton_pack import PackedMatrix

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
BLOCK = 1024


@triton.jit
def norm_rows(x, weight, out, width, eps, B: tl.constexpr, ADD: tl.constexpr):
    """out = rms(x) * weight, or added to what is there."""
    row, c = tl.program_id(0).to(tl.int64) * width, tl.arange(0, B)
    mask = c < width
    v = tl.load(x + row + c, mask=mask, other=0.0).to(tl.float32)
    y = v * tl.rsqrt(tl.sum(v * v, 0) / width + eps) * tl.load(weight + c, mask=mask, other=0.0)
    if ADD:
        y += tl.load(out + row + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + c, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def glu_rows(gate_up, out, width, KIND: tl.constexpr, B: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    mask = c < width
    gate = tl.load(gate_up + row * 2 * width + c, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + c, mask=mask, other=0.0).to(tl.float32)
    if KIND == 0:
        gate = gate / (1.0 + tl.exp(-gate))
    elif KIND == 1:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        gate = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    tl.store(out + row * width + c, (gate * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gather_columns(x, feature, out, width, packed, B: tl.constexpr):
    """out [R, packed] = x [R, width] at ``feature``, zero where it is -1."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    mask = c < packed
    at = tl.load(feature + c, mask=mask, other=-1)
    tl.store(out + row * packed + c, tl.load(x + row * width + at, mask=at >= 0, other=0.0), mask=mask)


@triton.jit
def embed_rows(ids, words, scale, offset, feature, out, NP, K, G, steps, group, zero, factor, BITS: tl.constexpr,
               KIND: tl.constexpr, LANES: tl.constexpr, INDEXED: tl.constexpr):
    """One step of one row: its packed columns to the features that they stand for."""
    SETS: tl.constexpr = 16 // BITS
    row, s, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, LANES)
    n = tl.load(ids + row)
    word = tl.load(words + ((n // 16 * steps + s) * 16 + n % 16) * LANES + j)
    for field in tl.static_range(SETS):
        k = (s * SETS + field) * LANES + j
        g = k // group
        held = g < G
        at = g * NP + n
        low = tl.zeros((LANES,), tl.float32) + zero
        if KIND == 1:
            low = tl.load(offset + at, mask=held, other=0).to(tl.float32)
        y = whole(word, field, BITS, low, tl.float16).to(tl.float32) * tl.load(scale + at, mask=held, other=0.0).to(tl.float32)
        if KIND == 2:
            y += tl.load(offset + at, mask=held, other=0.0).to(tl.float32)
        c = tl.load(feature + k) if INDEXED else k
        tl.store(out + row * K + c, (y * factor).to(out.dtype.element_ty), mask=(c >= 0) & (c < K))


# ---------------------------------------------------------------------------------------------- launches
def norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, *, add: bool = False) -> None:
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    norm_rows[(rows,)](x, weight, out, width, eps, B=block, ADD=add, num_warps=min(16, max(1, block // 512)))


def glu(gate_up: Tensor, kind: str, out: Tensor) -> None:
    rows, width = out.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    glu_rows[(rows, triton.cdiv(width, block))](gate_up, out, width, KIND=KINDS[kind], B=block, num_warps=4)


def gather(x: Tensor, feature: Tensor) -> Tensor:
    rows, width = x.shape
    packed = feature.shape[0]
    out = torch.empty(rows, packed, dtype=x.dtype, device=x.device)
    gather_columns[(rows, triton.cdiv(packed, BLOCK))](x, feature, out, width, packed, B=BLOCK, num_warps=4)
    return out


def embed(table: PackedMatrix, ids: Tensor, factor: float, out: Tensor) -> None:
    embed_rows[(ids.shape[0], table.steps)](
        ids, table.words, table.scale, table.offset, table.feature, out, table.padded_rows, table.columns, table.scale.shape[0],
        table.steps, table.group, float(table.zero), factor, BITS=table.bits, KIND=table.kind, LANES=table.lanes,
        INDEXED=table.feature is not None, num_warps=1)
