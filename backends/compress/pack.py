"""Codes into the words of the two file formats: GPTQ v1 and AWQ gemm. The exact inverse of what the readers do.

Knows bits and words; nothing of files or models.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from backends.errors import UnsupportedTensor
from backends.kernels import QWeight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)        # which of eight neighbours is in a word's nibble 0, 1, …


def fits(shape: tuple[int, int], bits: int) -> bool:
    """Can a matrix [N, K] be packed: whole words along both sides?"""
    return shape[0] * bits % 32 == 0 and shape[1] * bits % 32 == 0


def words(values: Tensor, bits: int) -> Tensor:
    """int32 [K * bits / 32, N] of whole numbers [K, N] below 2**bits: one stream of bits down each column,
    low bits first."""
    values = values.cpu()
    rows, columns = values.shape
    if rows * bits % 32:
        raise UnsupportedTensor(f"{rows} values of {bits} bits do not fill whole words.", rows=rows, bits=bits)
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int64)[None, :, None]
        whole = (values.to(torch.int64).reshape(-1, 32 // bits, columns) << shifts).sum(1)
        return torch.from_numpy(whole.numpy().astype(np.uint32).view(np.int32))
    stream = (values.to(torch.uint8).numpy()[:, None, :] >> np.arange(bits, dtype=np.uint8)[None, :, None]) & 1
    packed = np.packbits(stream.reshape(rows * bits, columns), axis=0, bitorder="little")       # [rows * bits / 8, N]
    return torch.from_numpy(np.ascontiguousarray(packed.reshape(-1, 4, columns).transpose(0, 2, 1)).view("<i4")[..., 0].copy())


def gptq_v1(weight: QWeight) -> dict[str, Tensor]:
    """qweight int32 [K·bits/32, N], qzeros int32 [G, N·bits/32] (zero - 1), scales float16 [G, N], g_idx int32 [K]."""
    codes, index = weight.codes.cpu(), torch.arange(weight.shape[1], dtype=torch.int32) // weight.group
    if weight.perm is not None:
        perm = weight.perm.cpu()
        codes, index = torch.empty_like(codes), torch.empty_like(index)
        codes[:, perm] = weight.codes.cpu()
        index[perm] = torch.arange(len(perm), dtype=torch.int32) // weight.group
    # masked: a borrow must not run into neighbours
    stored = (weight.zero.to(torch.int64) - 1) & (2 ** weight.bits - 1)
    return {"qweight": words(codes.T, weight.bits), "qzeros": words(stored, weight.bits).T.contiguous(),
            "scales": weight.scale.to("cpu", torch.float16).T.contiguous(), "g_idx": index}


def awq_gemm(weight: QWeight) -> dict[str, Tensor]:
    """qweight int32 [K, N/8], qzeros int32 [G, N/8], scales float16 [G, N]; 4 bits, no permutation."""
    if weight.bits != 4 or weight.perm is not None:
        raise UnsupportedTensor("AWQ gemm files hold 4-bit codes in the order of the inputs.", bits=weight.bits)
    return {"qweight": _interleaved(weight.codes), "qzeros": _interleaved(weight.zero),
            "scales": weight.scale.to("cpu", torch.float16).T.contiguous()}


def from_gptq_v1(tensors: Mapping[str, Tensor], bits: int, group: int) -> QWeight:
    """The inverse of `gptq_v1`."""
    codes = unwords(tensors["qweight"], bits).T.contiguous()
    zero = (unwords(tensors["qzeros"].T, bits) + 1) & (2 ** bits - 1)
    index = tensors["g_idx"].to(torch.int64)
    group = group if group > 0 else len(index)
    perm = None if torch.equal(index, torch.arange(len(index)) // group) else torch.argsort(index, stable=True)
    scale = tensors["scales"].T.contiguous()
    return QWeight(codes if perm is None else codes[:, perm], scale, zero, None, bits, group, perm)


def from_awq_gemm(tensors: Mapping[str, Tensor], bits: int, group: int) -> QWeight:
    """The inverse of `awq_gemm`."""
    codes, zero = _straight(tensors["qweight"]), _straight(tensors["qzeros"])
    return QWeight(codes, tensors["scales"].T.contiguous(), zero, None, bits, group if group > 0 else codes.shape[1])


def unwords(packed: Tensor, bits: int) -> Tensor:
    """uint8 [K, N], the inverse of `words`."""
    columns = packed.shape[1]
    raw = np.ascontiguousarray(packed.numpy()).view(np.uint8).reshape(-1, columns, 4).transpose(0, 2, 1).reshape(-1, columns)
    stream = np.unpackbits(raw, axis=0, bitorder="little").reshape(-1, bits, columns)
    return torch.from_numpy((stream << np.arange(bits, dtype=np.uint8)[None, :, None]).sum(1, dtype=np.uint8))


def _straight(packed: Tensor) -> Tensor:
    """uint8 [N, K], the inverse of `_interleaved`."""
    eights = unwords(packed.T, 4).reshape(-1, 8, packed.shape[0])
    back = sorted(range(8), key=AWQ_ORDER.__getitem__)
    return eights[:, back].reshape(-1, packed.shape[0]).contiguous()


def _interleaved(values: Tensor) -> Tensor:
    """int32 [K, N / 8] of [N, K]: eight neighbouring rows in one word."""
    eights = values.T.reshape(values.shape[1], -1, 8)[:, :, list(AWQ_ORDER)]
    return words(eights.reshape(values.shape[1], -1).T, 4).T.contiguous()
