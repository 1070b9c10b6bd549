"""Triton kernels for attention over pages: place the rows' keys and values, attend, and put chunks together.

A program takes a tile of rows of one sequence, all query heads of one KV head, and walks the keys in blocks with the running
maximum of Milakov and Gimelshein (2018, arXiv:1805.02867), as FlashAttention does (Dao 2023, arXiv:2307.08691). Passes of up
to `FEW` rows split the keys into chunks of `CHUNK` tokens counted from the sequence's start (flash decoding), combined in
order: what a row gets depends on its own position and keys, not on its company. In 8 bits the codes enter the products as
they are: q·k = scale (q·code) + low Σq, and scale and low of a value go to its weight.

Which rows belong to whom is worked out on the device from ``starts``: nothing here waits for the host. Rows that no sequence
owns (padding of a recorded pass) read nothing, and slots below 0 write nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.kernels import AttentionSpec, Batch, KVLayer
from backends.kernels.triton_matmul import FEW, dot, tanh

CHUNK = 128                             # keys of one split
FEW_TILE, MANY_TILE = 16, 64            # pairs of row and query head in a program
LOG2E = 1.4426950408889634


# ---------------------------------------------------------------------------------------------- device code
@triton.jit
def store_row(pages, scales, lows, y, at, line, c, mask, INT8: tl.constexpr):
    """``y`` float32 [B] to ``pages`` from element ``at`` on; ``line``: where its scale and low go."""
    if INT8:
        least = tl.min(tl.where(mask, y, float("inf")), 0)
        most = tl.max(tl.where(mask, y, float("-inf")), 0)
        step = tl.div_rn(most - least, 255.0)
        code = tl.div_rn(y - least, tl.maximum(step, 1.1754944e-38))
        code = (code + 12582912.0) - 12582912.0                   # to the nearest whole number, of equals the even one
        tl.store(pages + at + c, tl.minimum(tl.maximum(code, 0.0), 255.0).to(tl.uint8), mask=mask)
        tl.store(scales + line, step)
        tl.store(lows + line, least)
    else:
        tl.store(pages + at + c, y.to(pages.dtype.element_ty), mask=mask)


@triton.jit
def place_rows(qkv, cos, sin, slots, q, k, v, k_scale, k_low, v_scale, v_low, q_norm, k_norm, eps, D, HALF,
               HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, B: tl.constexpr, ROPE: tl.constexpr,
               NORM_Q: tl.constexpr, NORM_K: tl.constexpr, INT8: tl.constexpr):
    """One head of one row: norm, rotation, and to ``q`` or to its page."""
    row, head, c = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, B)
    mask = c < D
    first = (row * (HEADS + 2 * KV_HEADS) + head) * D
    turned = ROPE & (head < HEADS + KV_HEADS)
    partner = tl.where(c < HALF, c + HALF, c - HALF)              # within the rotated width 2 HALF
    inside = (c < 2 * HALF) & turned
    y = tl.load(qkv + first + c, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(qkv + first + partner, mask=mask & inside, other=0.0).to(tl.float32)
    if NORM_Q | NORM_K:
        root = tl.rsqrt(tl.sum(y * y, 0) / D + eps)
        if NORM_Q:
            if head < HEADS:
                y = y * root * tl.load(q_norm + c, mask=mask, other=0.0)
                other = other * root * tl.load(q_norm + partner, mask=mask & inside, other=0.0)
        if NORM_K:
            if (head >= HEADS) & (head < HEADS + KV_HEADS):
                y = y * root * tl.load(k_norm + c, mask=mask, other=0.0)
                other = other * root * tl.load(k_norm + partner, mask=mask & inside, other=0.0)
    if ROPE:
        angle = row * HALF + tl.where(c < HALF, c, c - HALF)
        turn, lift = tl.load(cos + angle, mask=inside, other=1.0), tl.load(sin + angle, mask=inside, other=0.0)
        y = y * turn + tl.where(c < HALF, -other, other) * lift
    if head < HEADS:
        tl.store(q + (row * HEADS + head) * D + c, y.to(q.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            h = (head - HEADS) % KV_HEADS
            line = (slot // PAGE * KV_HEADS + h) * PAGE + slot % PAGE
            if head < HEADS + KV_HEADS:
                store_row(k, k_scale, k_low, y, line * D, line, c, mask, INT8)
            else:
                store_row(v, v_scale, v_low, y, line * D, line, c, mask, INT8)


@triton.jit(do_not_specialize=["R", "S", "width"])
def attend_tiles(q, k, v, k_scale, k_low, v_scale, v_low, starts, positions, table, out, peaks, sums, parts, R, S, width, window,
                 scale, softcap, D: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
                 SPAN: tl.constexpr, ROWS: tl.constexpr, REPEAT: tl.constexpr, B: tl.constexpr, BN: tl.constexpr,
                 SEQUENCES: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INT8: tl.constexpr, SPLIT: tl.constexpr):
    """ROWS rows × REPEAT query heads (those beyond HEADS / KV_HEADS are padding) of one sequence over the keys of one chunk of
    SPAN, or over all of them. With SPLIT the maximum (of scores in base 2), the sum and the unnormalized mix go to ``peaks``,
    ``sums`` [chunks, R, HEADS] and ``parts`` [chunks, R, HEADS, D]."""
    EACH: tl.constexpr = HEADS // KV_HEADS
    tile, h, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s = tl.arange(0, SEQUENCES)
    begin, end = tl.load(starts + s, mask=s < S, other=0), tl.load(starts + s + 1, mask=s < S, other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    sequence = tl.sum(((tl.cumsum(tiles, 0) <= tile) & (s < S)).to(tl.int32), 0)
    if sequence < S:
        first = tl.load(starts + sequence) + (tile - tl.sum(tl.where(s < sequence, tiles, 0), 0)) * ROWS
        m, c = tl.arange(0, ROWS * REPEAT), tl.arange(0, B)
        row = (first + m // REPEAT).to(tl.int64)
        head = h * EACH + m % REPEAT
        live = (row < tl.load(starts + sequence + 1)) & (m % REPEAT < EACH)
        position = tl.load(positions + row, mask=live, other=-1).to(tl.int32)
        highest = tl.max(position, 0)
        lowest = tl.min(tl.where(live, position, highest), 0)
        least = chunk * SPAN if SPLIT else 0
        last = tl.minimum(highest + 1, least + SPAN) if SPLIT else highest + 1
        if WINDOWED:
            least = tl.maximum(least, tl.maximum(lowest - window + 1, 0) // BN * BN)
        if least < last:
            query = tl.load(q + (row * HEADS + head)[:, None] * D + c[None, :], mask=live[:, None] & (c < D)[None, :], other=0.0)
            total = tl.sum(query.to(tl.float32), 1)
            peak, norm = tl.full((ROWS * REPEAT,), float("-inf"), tl.float32), tl.zeros((ROWS * REPEAT,), tl.float32)
            mix = tl.zeros((ROWS * REPEAT, B), tl.float32)
            for key0 in range(least, last, BN):
                key = key0 + tl.arange(0, BN)
                seen = key < last
                if WINDOWED:
                    seen = seen & (key > lowest - window)
                page = tl.load(table + sequence * width + key // PAGE, mask=seen, other=0).to(tl.int64)
                line = (page * KV_HEADS + h) * PAGE + key % PAGE
                keys = tl.load(k + line[None, :] * D + c[:, None], mask=(c < D)[:, None] & seen[None, :], other=0)
                score = dot(query, as_type(keys, query.dtype), tl.zeros((ROWS * REPEAT, BN), tl.float32))
                if INT8:
                    score = score * tl.load(k_scale + line, mask=seen, other=0.0)[None, :]
                    score += total[:, None] * tl.load(k_low + line, mask=seen, other=0.0)[None, :]
                score = score * scale
                if CAPPED:
                    score = softcap * tanh(score / softcap)
                visible = (key[None, :] <= position[:, None]) & seen[None, :]
                if WINDOWED:
                    visible = visible & (key[None, :] > position[:, None] - window)
                score = tl.where(visible, score * 1.4426950408889634, float("-inf"))
                higher = tl.maximum(peak, tl.max(score, 1))
                ground = tl.where(higher == float("-inf"), 0.0, higher)
                weight, fade = tl.exp2(score - ground[:, None]), tl.exp2(peak - ground)
                norm, peak = norm * fade + tl.sum(weight, 1), higher
                mix = mix * fade[:, None]
                values = tl.load(v + line[:, None] * D + c[None, :], mask=seen[:, None] & (c < D)[None, :], other=0)
                if INT8:
                    mix += tl.sum(weight * tl.load(v_low + line, mask=seen, other=0.0)[None, :], 1)[:, None]
                    weight = weight * tl.load(v_scale + line, mask=seen, other=0.0)[None, :]
                mix = dot(weight.to(query.dtype), as_type(values, query.dtype), mix)
            into = row * HEADS + head
            cell = live[:, None] & (c < D)[None, :]
            if SPLIT:
                into += chunk.to(tl.int64) * R * HEADS
                tl.store(peaks + into, peak, mask=live)
                tl.store(sums + into, norm, mask=live)
                tl.store(parts + into[:, None] * D + c[None, :], mix, mask=cell)
            else:
                tl.store(out + into[:, None] * D + c[None, :], (mix / norm[:, None]).to(out.dtype.element_ty), mask=cell)


@triton.jit
def as_type(codes, like: tl.constexpr):
    """Numbers of a page for a product: bytes by way of float32, which is exact."""
    if codes.dtype == tl.uint8:
        codes = codes.to(tl.float32)
    return codes.to(like)


@triton.jit(do_not_specialize=["R"])
def combine_chunks(positions, peaks, sums, parts, out, R, window, D: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr,
                   B: tl.constexpr, WINDOWED: tl.constexpr):
    """One head of one row: the chunks that it sees, in order."""
    row, head, c = tl.program_id(0), tl.program_id(1), tl.arange(0, B)
    position = tl.load(positions + row).to(tl.int32)
    first = tl.maximum(position - window + 1, 0) // SPAN if WINDOWED else 0
    peak, norm, mix = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32), tl.zeros((B,), tl.float32)
    for chunk in range(first, position // SPAN + 1):
        at = (tl.full((), 0, tl.int64) + chunk) * R * HEADS + row * HEADS + head
        found = tl.load(peaks + at)
        higher = tl.maximum(peak, found)
        fade, share = tl.exp2(peak - higher), tl.exp2(found - higher)
        norm = norm * fade + tl.load(sums + at) * share
        mix = mix * fade + tl.load(parts + at * D + c, mask=c < D, other=0.0) * share
        peak = higher
    into = (row.to(tl.int64) * HEADS + head) * D
    tl.store(out + into + c, (mix / norm).to(out.dtype.element_ty), mask=c < D)


# ---------------------------------------------------------------------------------------------- launches
def place(qkv: Tensor, spec: AttentionSpec, kv: KVLayer, batch: Batch) -> Tensor:
    """Writes the rows' keys and values; returns the queries [R, heads, head_dim]."""
    rows, rope = qkv.shape[0], spec.rope is not None
    q = torch.empty(rows, spec.heads, spec.head_dim, dtype=qkv.dtype, device=qkv.device)
    cos, sin = (batch.cos[spec.rope].contiguous(), batch.sin[spec.rope].contiguous()) if rope else (batch.cos, batch.sin)
    place_rows[(rows, spec.heads + 2 * spec.kv_heads)](
        qkv, cos, sin, batch.slots, q, kv.k, kv.v, kv.k_scale, kv.k_low, kv.v_scale, kv.v_low, spec.q_norm, spec.k_norm,
        spec.norm_eps, spec.head_dim, cos.shape[-1] if rope else 0, HEADS=spec.heads, KV_HEADS=spec.kv_heads,
        PAGE=kv.k.shape[2], B=triton.next_power_of_2(spec.head_dim), ROPE=rope, NORM_Q=spec.q_norm is not None,
        NORM_K=spec.k_norm is not None, INT8=kv.k_scale is not None, num_warps=1)
    return q


def attend(qkv: Tensor, spec: AttentionSpec, kv: KVLayer, batch: Batch) -> Tensor:
    """[R, heads * head_dim] in the type of ``qkv``."""
    q = place(qkv, spec, kv, batch)
    rows, few = q.shape[0], q.shape[0] <= FEW
    out = torch.empty_like(q)
    repeat, sequences = triton.next_power_of_2(spec.heads // spec.kv_heads), batch.lengths.shape[0]
    each = max(1, (FEW_TILE if few else MANY_TILE) // repeat)
    chunks = max(1, triton.cdiv(batch.pages.shape[1] * kv.k.shape[2], CHUNK)) if few else 1
    peaks, sums, parts = _room(chunks, q) if few else (None, None, None)
    block = max(16, triton.next_power_of_2(spec.head_dim))
    common = {"D": spec.head_dim, "HEADS": spec.heads, "SPAN": CHUNK, "B": block, "WINDOWED": spec.window is not None}
    attend_tiles[(min(rows, rows // each + sequences), spec.kv_heads, chunks)](
        q, kv.k, kv.v, kv.k_scale, kv.k_low, kv.v_scale, kv.v_low, batch.starts, batch.positions, batch.pages, out, peaks, sums,
        parts, rows, sequences, batch.pages.shape[1], spec.window or 0, spec.scale, spec.softcap or 0.0,
        KV_HEADS=spec.kv_heads, PAGE=kv.k.shape[2], ROWS=each, REPEAT=max(repeat, 16 // each),
        BN=64 if block < 256 else 32, SEQUENCES=triton.next_power_of_2(sequences), CAPPED=spec.softcap is not None,
        INT8=kv.k_scale is not None, SPLIT=few, **common, num_warps=4, num_stages=2)
    if few:
        combine_chunks[(rows, spec.heads)](batch.positions, peaks, sums, parts, out, rows, spec.window or 0, **common, num_warps=2)
    return out.flatten(1)


def _room(chunks: int, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads, width = q.shape
    new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=q.device)  # noqa: E731
    return new(chunks, rows, heads), new(chunks, rows, heads), new(chunks, rows, heads, width)
