"""Triton kernels for products with packed and float matrices, and how they are launched.

One kernel serves few rows and many: a program makes a tile [BN outputs, BM rows] of the transposed product on tensor cores.
A weight's code minus its zero is a whole number that fp16 and bf16 hold exactly; a group's products are summed in float32 and
meet their scale there, so no weight is rounded. Up to `FEW` rows BM is 16 and the columns may be split among programs, whose
sums a second kernel adds in order: tile, split and order follow from the matrix alone, so a row's bits depend on nothing else.

Codes become numbers without a conversion: set into the mantissa of 2^7 (bf16) or 2^10 (fp16), they are 128 + code or 1024 +
code, from which 128 + zero or 1024 + zero is subtracted exactly (the trick of Kim et al. 2022, arXiv:2211.10017).

Knows tensors and layouts (`triton_pack`); nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from backends.kernels.triton_pack import FloatMatrix, PackedMatrix

FEW = 16                                                # rows up to which a row has one arithmetic
INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))    # the interpreter holds bfloat16, but cannot compute with it
MOST_SPLITS, LEAST_STEPS = 16, 8                        # of one product; a split has at least so many steps
FLOAT_STEP = 64                                         # columns of a float matrix at a time


@dataclass(frozen=True)
class Tile:
    """Outputs and rows of one program, warps, and loads under way. None of it changes a result's bits at one ``rows``."""

    outputs: int
    rows: int
    warps: int
    stages: int


FEW_TILE, MANY_TILE, WIDE_TILE = Tile(64, 16, 4, 4), Tile(64, 64, 4, 3), Tile(128, 128, 8, 3)
WIDE = 96                                               # rows from which the largest tile pays


def tile_for(rows: int, dtype: torch.dtype) -> Tile:
    """float32 rows do not fit a consumer card's shared memory in the largest tile."""
    return FEW_TILE if rows <= FEW else MANY_TILE if rows < WIDE or dtype == torch.float32 else WIDE_TILE


def splits_for(outputs: int, steps: int, processors: int) -> int:
    """Programs that share a tile's columns: enough for two a processor, while each has work."""
    tiles, splits = triton.cdiv(outputs, FEW_TILE.outputs), 1
    while splits < MOST_SPLITS and tiles * splits < 2 * processors and steps // (2 * splits) >= LEAST_STEPS:
        splits *= 2
    return splits


# ---------------------------------------------------------------------------------------------- device code
@triton.jit
def tanh(x):
    """Exact to float32's rounding near 0 too, where the formula cancels."""
    small = x * x
    series = x * (1.0 + small * (-1.0 / 3 + small * (2.0 / 15 + small * (-17.0 / 315))))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.15, series, tl.where(x < 0, -far, far))


@triton.jit
def whole(words, field: tl.constexpr, BITS: tl.constexpr, zero, like: tl.constexpr):
    """The codes of one field of 16-bit ``words``, minus ``zero`` (float32), exactly, in the type ``like``."""
    code = (words >> (field * BITS)) & ((1 << BITS) - 1)
    if BITS == 4 and like == tl.bfloat16:
        if INTERPRETED:
            value = ((code.to(tl.int32) | 0x4300) << 16).to(tl.float32, bitcast=True) - (zero + 128.0)
        else:
            value = (code | 0x4300).to(tl.bfloat16, bitcast=True) - (zero + 128.0).to(tl.bfloat16)
    else:
        value = (code | 0x6400).to(tl.float16, bitcast=True) - (zero + 1024.0).to(tl.float16)
    return value.to(like)


@triton.jit
def dot(a, b, total):
    """total + a @ b, summed in float32."""
    if INTERPRETED:                                     # exact
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def finish(total, out, bias, at, n, mask, softcap, ADD: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr):
    """Bias, cap or residual, and the store; ``total`` float32."""
    if BIASED:
        total += tl.load(bias + n, mask=mask, other=0.0)
    if CAPPED:
        total = softcap * tanh(total / softcap)
    if ADD:
        total += tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R", "per_split"])
def packed_product(x, words, scale, offset, bias, out, parts, R, N, NP, K, G, steps, per_split, per_group, zero, softcap,
                   BITS: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, BN: tl.constexpr,
                   BM: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr):
    """GROUPS: groups in a step; where it is 1, ``per_group`` steps make one group."""
    SETS: tl.constexpr = 16 // BITS
    EACH: tl.constexpr = SETS // GROUPS
    n, r, j = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BM + tl.arange(0, BM), tl.arange(0, LANES)
    split = tl.program_id(2)
    stored, there = n < NP, r < R
    row = (n // 16).to(tl.int64) * steps * (16 * LANES) + n % 16 * LANES
    x_row = r.to(tl.int64) * K
    total = tl.zeros((BN, BM), tl.float32)
    for s in range(split * per_split, tl.minimum((split + 1) * per_split, steps)):
        word = tl.load(words + (row + s * (16 * LANES))[:, None] + j[None, :], mask=stored[:, None], other=0)
        part = tl.zeros((BN, BM), tl.float32)
        sums = tl.zeros((BM,), tl.float32)
        for field in tl.static_range(SETS):
            g = s * GROUPS + field // EACH if GROUPS > 1 else s // per_group
            held = stored & (g < G)
            at = g.to(tl.int64) * NP + n
            if KIND == 1:
                low = tl.load(offset + at, mask=held, other=0).to(tl.float32)[:, None]
            else:
                low = tl.full((1, 1), 0.0, tl.float32) + zero
            k = (s * SETS + field) * LANES + j
            rows = tl.load(x + x_row[None, :] + k[:, None], mask=there[None, :] & (k < K)[:, None], other=0.0)
            part = dot(whole(word, field, BITS, low, x.dtype.element_ty), rows, part)
            if KIND == 2:
                sums += tl.sum(rows.to(tl.float32), 0)
            if field % EACH == EACH - 1:
                total += part * tl.load(scale + at, mask=held, other=0.0).to(tl.float32)[:, None]
                if KIND == 2:
                    total += tl.load(offset + at, mask=held, other=0.0).to(tl.float32)[:, None] * sums[None, :]
                    sums = tl.zeros((BM,), tl.float32)
                part = tl.zeros((BN, BM), tl.float32)
    mask = (n < N)[:, None] & there[None, :]
    if SPLIT:
        tl.store(parts + (split.to(tl.int64) * R + r[None, :]) * N + n[:, None], total, mask=mask)
    else:
        finish(total, out, bias, r[None, :].to(tl.int64) * N + n[:, None], n[:, None], mask, softcap, ADD, BIASED, CAPPED)


@triton.jit(do_not_specialize=["R", "per_split"])
def float_product(x, weight, bias, out, parts, R, N, K, per_split, softcap, BK: tl.constexpr, BN: tl.constexpr,
                  BM: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr):
    n, r, j = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BK)
    split = tl.program_id(2)
    there, kept = r < R, n < N
    total = tl.zeros((BN, BM), tl.float32)
    for s in range(split * per_split, tl.minimum((split + 1) * per_split, tl.cdiv(K, BK))):
        k = s * BK + j
        w = tl.load(weight + n.to(tl.int64)[:, None] * K + k[None, :], mask=kept[:, None] & (k < K)[None, :], other=0.0)
        rows = tl.load(x + r.to(tl.int64)[None, :] * K + k[:, None], mask=there[None, :] & (k < K)[:, None], other=0.0)
        total = dot(w, rows, total)
    mask = kept[:, None] & there[None, :]
    if SPLIT:
        tl.store(parts + (split.to(tl.int64) * R + r[None, :]) * N + n[:, None], total, mask=mask)
    else:
        finish(total, out, bias, r[None, :].to(tl.int64) * N + n[:, None], n[:, None], mask, softcap, ADD, BIASED, CAPPED)


@triton.jit(do_not_specialize=["R"])
def add_parts(parts, bias, out, R, N, softcap, SPLITS: tl.constexpr, BN: tl.constexpr, ADD: tl.constexpr,
              BIASED: tl.constexpr, CAPPED: tl.constexpr):
    """What the splits found, added in their order."""
    r, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    mask = n < N
    total = tl.load(parts + r * N + n, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + (split * R + r) * N + n, mask=mask, other=0.0)
    finish(total, out, bias, r * N + n, n, mask, softcap, ADD, BIASED, CAPPED)


# ---------------------------------------------------------------------------------------------- launches
@dataclass(frozen=True)
class Ending:
    """Where a product goes: ``out`` [R, N]; added to what is there, or capped."""

    out: Tensor
    add: bool = False
    softcap: float | None = None

    def flags(self, bias: Tensor | None) -> dict[str, bool]:
        return {"ADD": self.add, "BIASED": bias is not None, "CAPPED": self.softcap is not None}


def multiply_packed(x: Tensor, w: PackedMatrix, end: Ending, processors: int, tile: Tile | None = None) -> None:
    """x [R, K], or [R, packed columns] where ``w.feature`` says which; see `Ending`."""
    rows, k = x.shape
    tile = tile or tile_for(rows, x.dtype)
    splits = splits_for(w.rows, w.steps, processors) if rows <= FEW else 1
    grid = triton.cdiv(w.rows, tile.outputs), triton.cdiv(rows, tile.rows), splits
    per_split = triton.cdiv(w.steps, splits)
    parts = _parts(splits, rows, w.rows, x)
    packed_product[grid](
        x, w.words, w.scale, w.offset, w.bias, end.out, parts, rows, w.rows, w.padded_rows, k, w.scale.shape[0], w.steps,
        per_split, max(1, w.group // w.step), float(w.zero), end.softcap or 0.0,
        BITS=w.bits, KIND=w.kind, GROUPS=max(1, w.step // w.group), LANES=w.lanes, BN=tile.outputs, BM=tile.rows,
        SPLIT=splits > 1, **end.flags(w.bias), num_warps=tile.warps, num_stages=tile.stages)
    if parts is not None:
        _gather_parts(parts, w.bias, end)


def multiply_float(x: Tensor, w: FloatMatrix, end: Ending, processors: int) -> None:
    """At most `FEW` rows."""
    rows, k = x.shape
    tile, steps = FEW_TILE, triton.cdiv(k, FLOAT_STEP)
    splits = splits_for(w.rows, steps, processors)
    parts = _parts(splits, rows, w.rows, x)
    float_product[(triton.cdiv(w.rows, tile.outputs), 1, splits)](
        x, w.weight, w.bias, end.out, parts, rows, w.rows, k, triton.cdiv(steps, splits), end.softcap or 0.0, BK=FLOAT_STEP,
        BN=tile.outputs, BM=tile.rows, SPLIT=splits > 1, **end.flags(w.bias), num_warps=tile.warps, num_stages=tile.stages)
    if parts is not None:
        _gather_parts(parts, w.bias, end)


def _parts(splits: int, rows: int, outputs: int, like: Tensor) -> Tensor | None:
    return None if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.float32, device=like.device)


def _gather_parts(parts: Tensor, bias: Tensor | None, end: Ending) -> None:
    splits, rows, outputs = parts.shape
    add_parts[(rows, triton.cdiv(outputs, 256))](parts, bias, end.out, rows, outputs, end.softcap or 0.0, SPLITS=splits, BN=256,
                                                 **end.flags(bias), num_warps=2)
