"""AWQ layers as QWeight: the layouts gemm, gemv and gemv_fast, with and without zero points.

    gemm       qweight [K, N/8], qzeros [G, N/8]: eight neighbouring outputs in a word, interleaved; scales [G, N]
    gemv       qweight [N, K/8], qzeros [N, Z/8]: eight neighbouring inputs in a word, in order; scales [N, Z], Z ≥ G padded
    gemv_fast  qweight int16 [N/4, K]: four outputs in a word, inputs shuffled within 32; scales and -zero·scale [Z, N]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from backends.engine.bitfields import awq_fields, fields
from backends.engine.packed_files import Raw, expect, need
from backends.errors import BrokenFile, UnknownFormat, UnsupportedTensor
from backends.kernels import QWeight
from backends.quant_config import Quantization

MIDDLE = 8                                   # the zero of symmetric 4-bit codes


class AwqLayout:
    """UnknownFormat for another layout, by its name; UnsupportedTensor for other bits."""

    words, parts = "qweight", frozenset({"qweight", "qzeros", "scales", "scaled_zeros"})

    def __init__(self, quantization: Quantization) -> None:
        self.q = quantization
        name = quantization.layout or "gemm"
        if name not in LAYOUTS:
            raise UnknownFormat(f"The AWQ layout {name!r} is not read.", layout=name, known=", ".join(LAYOUTS),
                                files=", ".join(quantization.files))
        if quantization.bits != 4:
            raise UnsupportedTensor(f"AWQ layers of {quantization.bits} bits are not read, only those of 4.",
                                    bits=quantization.bits)
        self._read, self.zero_points = LAYOUTS[name], quantization.flag("zero points", True)

    def skipped(self) -> Iterable[str]:
        listed = self.q.data.get("modules_to_not_convert") or []
        return [name for name in listed if isinstance(name, str)]

    def notes(self) -> tuple[str, ...]:
        return ()

    def read(self, module: str, raw: Raw) -> QWeight:
        packed = need(raw, module, "qweight")
        if packed.ndim != 2 or packed.is_floating_point():
            raise UnsupportedTensor(f"{module}.qweight is no matrix of packed codes.", tensor=f"{module}.qweight",
                                    shape=list(packed.shape))
        return self._read(self, module, packed, raw)

    def groups(self, module: str, inputs: int) -> tuple[int, int]:
        """Inputs of a group, and how many groups there are."""
        group = inputs if self.q.group <= 0 else self.q.group
        if inputs % group:
            raise BrokenFile(f"{module} has {inputs} inputs, no whole number of groups of {group}.",
                             tensor=f"{module}.qweight", group=group)
        return group, inputs // group

    def zeros(self, module: str, raw: Raw, shape: tuple[int, int]) -> Tensor | None:
        """The packed zeros as stored; None for a file without zero points that stores none."""
        if not self.zero_points and raw("qzeros") is None:
            return None
        return expect(module, "qzeros", need(raw, module, "qzeros"), shape)


def _gemm(layout: AwqLayout, module: str, packed: Tensor, raw: Raw) -> QWeight:
    inputs, outputs = packed.shape[0], packed.shape[1] * 8
    group, groups = layout.groups(module, inputs)
    scale = expect(module, "scales", need(raw, module, "scales"), (groups, outputs))
    stored = layout.zeros(module, raw, (groups, outputs // 8))
    zero = _middle(scale) if stored is None else awq_fields(stored)
    return QWeight(awq_fields(packed).T.contiguous(), scale.T.contiguous(), zero.T.contiguous(), None, 4, group)


def _gemv(layout: AwqLayout, module: str, packed: Tensor, raw: Raw) -> QWeight:
    outputs, inputs = packed.shape[0], packed.shape[1] * 8
    group, groups = layout.groups(module, inputs)
    scale = need(raw, module, "scales")
    if scale.ndim != 2 or scale.shape[0] != outputs or not groups <= scale.shape[1]:
        expect(module, "scales", scale, (outputs, groups))
    stored = layout.zeros(module, raw, (outputs, -(-scale.shape[1] // 8)))
    zero = _middle(scale) if stored is None else fields(stored, 4)
    return QWeight(fields(packed, 4), scale[:, :groups].contiguous(), zero[:, :groups].contiguous(), None, 4, group)


def _gemv_fast(layout: AwqLayout, module: str, packed: Tensor, raw: Raw) -> QWeight:
    outputs, inputs = packed.shape[0] * 4, packed.shape[1]
    if packed.dtype != torch.int16 or inputs % 64:
        raise UnsupportedTensor(f"{module}.qweight is not laid out as gemv_fast does it.", tensor=f"{module}.qweight",
                                shape=list(packed.shape), dtype=packed.dtype)
    group, groups = layout.groups(module, inputs)
    scale, bias = need(raw, module, "scales"), raw("scaled_zeros")
    bias = need(raw, module, "qzeros") if bias is None else bias
    if scale.ndim != 2 or scale.shape[1] != outputs or scale.shape[0] < groups:
        expect(module, "scales", scale, (groups, outputs))
    expect(module, "zeros", bias, tuple(scale.shape))
    return QWeight(_unshuffled(packed), scale[:groups].T.contiguous(), None, bias[:groups].T.contiguous(), 4, group)


def _unshuffled(packed: Tensor) -> Tensor:
    """uint8 [N, K] of int16 [N/4, K]. A word's nibbles are one place of four neighbouring outputs; per output the 64 places
    of a block are laid over the four in turn; within 32 inputs, pairs are dealt out in fours and evens put before odds."""
    rows, inputs = packed.shape
    nibbles = fields(packed, 4).view(rows, inputs // 64, 256)                       # place by place, four nibbles each
    lanes = nibbles.view(rows, inputs // 64, 4, 64).transpose(1, 2).reshape(rows * 4, inputs)
    pairs = lanes.view(rows * 4, inputs // 32, 4, 2, 4).transpose(3, 4)             # evens and odds side by side again
    return pairs.transpose(2, 3).reshape(rows * 4, inputs).contiguous()


def _middle(scale: Tensor) -> Tensor:
    return torch.full(scale.shape, MIDDLE, dtype=torch.uint8)


LAYOUTS: dict[str, Callable[[AwqLayout, str, Tensor, Raw], QWeight]] = {
    "gemm": _gemm, "gemv": _gemv, "gemv_fast": _gemv_fast}
