"""Tensors of a pass as the native kernels' descriptors: rows, weights of norms, attention, KV layers, batches.

Each `describe_…` gives the address and what must be kept alive for it. Refuses what the kernels cannot run.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.errors import NotSupported
from backends.kernels import AttentionSpec, Batch, KVLayer, native_abi as abi

WIDEST_HEAD, MOST_QUERIES = 1024, 32
KV_TYPES = {torch.float32: abi.F32, torch.float16: abi.F16, torch.bfloat16: abi.BF16, torch.uint8: abi.U8}


@dataclass(eq=False)
class Rows:
    """Rows made ready for `matmul`: floats [R, K], beside them int8 codes with scales and sums where those are wanted."""

    floats: Tensor
    quantized: bool
    address: int                # of the descriptor
    keep: tuple[object, ...]


def make_rows(rows: int, width: int, quantized: bool) -> Rows:
    floats = torch.empty(rows, width, dtype=torch.float32)
    if not quantized:
        line = abi.words(floats.data_ptr(), 0, 0, 0, 0, 0, 0, width, width)
        return Rows(floats, False, abi.address(line), (line,))
    blocks = -(-width // abi.BLOCK)
    codes = torch.empty(rows, blocks * abi.BLOCK, dtype=torch.int8)
    numbers = torch.empty(rows * blocks * 7, dtype=torch.int32)            # scale, sum32, sum16 x 2, minus8, minus8_16 x 2
    at, step = numbers.data_ptr(), rows * blocks * 4
    line = abi.words(floats.data_ptr(), codes.data_ptr(), at, at + step, at + 2 * step, at + 4 * step, at + 5 * step, width,
                     blocks * abi.BLOCK)
    return Rows(floats, True, abi.address(line), (line, codes, numbers))


def describe_weight(weight: Tensor) -> tuple[int, tuple]:
    kept = weight.detach().to("cpu", torch.float32).contiguous()
    return kept.data_ptr(), (kept,)


def describe_spec(spec: AttentionSpec, paired: bool) -> tuple[int, tuple]:
    """``paired``: bfloat16 will do where the processor multiplies it; else float32 throughout."""
    if spec.head_dim > WIDEST_HEAD or spec.heads % spec.kv_heads or spec.heads // spec.kv_heads > MOST_QUERIES:
        raise NotSupported("The native kernels cannot run this attention.", heads=spec.heads, kv_heads=spec.kv_heads,
                           head_dim=spec.head_dim, remedy="Load the model with the kernels \"aten\" or \"ref\".")
    norms = tuple(None if norm is None else norm.detach().to("cpu", torch.float32).contiguous() for norm in (spec.q_norm,
        spec.k_norm))
    line = abi.words(spec.heads, spec.kv_heads, spec.head_dim, spec.window or 0, -1 if spec.rope is None else spec.rope,
                     *map(abi.pointer, norms), abi.bits(spec.scale), abi.bits(spec.softcap or 0.0), abi.bits(spec.norm_eps), int(paired))
    return abi.address(line), (line, norms)


def describe_kv(kv: KVLayer) -> tuple[int, tuple]:
    _, heads, page, width = kv.k.shape
    tensors = (kv.k, kv.v, kv.k_scale, kv.k_low, kv.v_scale, kv.v_low)
    if page != 16 or kv.k.dtype not in KV_TYPES or not all(t is None or t.is_contiguous() for t in tensors):
        raise NotSupported("The native kernels need contiguous KV pages of 16 tokens.", page=page,
                           type=kv.k.dtype)
    line = abi.words(*map(abi.pointer, tensors), KV_TYPES[kv.k.dtype], page, heads, width, kv.v.shape[3])
    return abi.address(line), (line,)


def fill_batch(line: array, batch: Batch) -> tuple[Tensor, ...]:
    """Write the batch's addresses and sizes into its descriptor; returns what must live as long as it is used."""
    kept = tuple(t if t.dtype == dtype and t.is_contiguous() else t.to(dtype).contiguous() for t, dtype in (
        (batch.positions, torch.int64), (batch.starts, torch.int32), (batch.lengths, torch.int32), (batch.pages,
            torch.int32),
        (batch.slots, torch.int64), (batch.cos, torch.float32), (batch.sin, torch.float32)))
    pages, cos = kept[3], kept[5]
    for i, tensor in enumerate(kept):
        line[i] = tensor.data_ptr()
    line[7], line[8], line[9], line[10] = pages.shape[0], kept[0].shape[0], pages.shape[1], cos.shape[-1]
    return kept
