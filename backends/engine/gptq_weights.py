"""GPTQ layers as QWeight: v1 and v2 zeros, 2, 3, 4 and 8 bits, act-order as a permutation, any group, ragged ends.

A layer: qweight [K·bits/32, N] packed along the inputs, qzeros [G, N·bits/32], scales [G, N], g_idx [K]: input k belongs to
group g_idx[k]. v1 stores zero - 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from backends.engine.bitfields import fields
from backends.engine.packed_files import Raw, expect, need
from backends.errors import BrokenFile, UnknownFormat, UnsupportedTensor
from backends.kernels import QWeight
from backends.quant_config import Quantization

LAYOUTS = {"": 1, "gptq": 1, "gptq_v2": 2}    # name: version of the zeros
BITS = (2, 3, 4, 8)


class GptqLayout:
    """UnknownFormat for a layout that is none of `LAYOUTS`, UnsupportedTensor for other bits."""

    words, parts = "qweight", frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, quantization: Quantization) -> None:
        self.q, self.data = quantization, quantization.data
        marlin = self.data.get("is_marlin_format") is True
        if quantization.layout not in LAYOUTS or marlin:
            raise UnknownFormat(f"The GPTQ layout {'marlin' if marlin else quantization.layout!r} is not read.",
                                files=", ".join(quantization.files),
                                remedy="Use the checkpoint in the format gptq or gptq_v2.")
        self.version = LAYOUTS[quantization.layout]
        self.symmetric, self.act_order = quantization.flag("symmetric"), bool(quantization.flag("act-order", False))
        self._rules: Mapping[str, Any] = self.data.get("dynamic") or {}
        self._notes: dict[str, None] = {}
        if self.data.get("adapter"):
            self._notes["The settings name an adapter; it is not applied."] = None

    def skipped(self) -> Iterable[str]:
        listed = self.data.get("modules_to_not_convert") or []
        return [name for name in listed if isinstance(name, str)]

    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def settings(self, module: str) -> tuple[int, int]:
        """Bits and group of a layer: the file's, or those of the first of GPTQModel's dynamic rules that match it."""
        bits, group = self.q.bits, self.q.group
        for pattern, change in self._rules.items():
            if isinstance(change, Mapping) and _matches(pattern.removeprefix("+:").removeprefix("-:"), module):
                bits, group = change.get("bits", bits), change.get("group_size", group)
                break
        if bits not in BITS:
            raise UnsupportedTensor(f"{module} has {bits} bits; GPTQ layers of 2, 3, 4 and 8 bits are read.",
                                    tensor=f"{module}.qweight", bits=bits)
        return bits, group

    def read(self, module: str, raw: Raw) -> QWeight:
        bits, group = self.settings(module)
        packed, index = need(raw, module, "qweight"), raw("g_idx")
        width = packed.element_size() * 8
        if packed.ndim != 2 or packed.is_floating_point() or packed.shape[0] * width % bits:
            raise UnsupportedTensor(f"{module}.qweight is no matrix of packed {bits}-bit codes.", tensor=f"{module}.qweight",
                                    shape=list(packed.shape), dtype=packed.dtype)
        inputs, outputs = packed.shape[0] * width // bits, packed.shape[1]
        if index is not None and inputs - width < len(index) <= inputs:
            inputs = len(index)                          # the last word may be filled with nothing
        group = inputs if group in (-1, 0) else group
        groups = -(-inputs // group)
        scale = expect(module, "scales", need(raw, module, "scales"), (groups, outputs))
        zero = self._zeros(module, need(raw, module, "qzeros"), bits, (groups, outputs))
        codes = fields(packed.T, bits)[:, :inputs]
        return grouped(codes, scale.T.contiguous(), zero.T.contiguous(), bits, group,
                       self._index(module, index, inputs, group))

    def _zeros(self, module: str, packed: Tensor, bits: int, shape: tuple[int, int]) -> Tensor:
        """uint8 [G, N]. Some tools tag v2 content as v1, or the reverse; in a symmetric file every zero shows it."""
        width = packed.element_size() * 8
        expect(module, "qzeros", packed, (shape[0], -(-shape[1] * bits // width)))
        stored, middle = fields(packed, bits)[:, :shape[1]], 1 << bits - 1
        version = self.version
        if self.symmetric and bits > 2 and bool((stored == stored[0, 0]).all()):
            found = {middle: 2, middle - 1: 1}.get(int(stored[0, 0]), version)
            if found != version:
                self._notes[f"Tagged as GPTQ v{version}, but its zero points are v{found}: read as v{found}."] = None
            version = found
        return stored if version == 2 else stored + 1 & (1 << bits) - 1     # 15 + 1 is 0: it was 0 - 1

    def _index(self, module: str, index: Tensor | None, inputs: int, group: int) -> Tensor | None:
        """int64 [K], or None where input k belongs to group k // group."""
        if index is None:
            if self.act_order and group < inputs:
                raise BrokenFile(f"{module} was quantized in act-order, but its g_idx is missing.", tensor=f"{module}.g_idx")
            return None
        index = expect(module, "g_idx", index, (inputs,)).to(torch.int64)
        groups = -(-inputs // group)
        if int(index.min()) < 0 or int(index.max()) >= groups:
            raise BrokenFile(f"{module}.g_idx names a group that is not there.", tensor=f"{module}.g_idx", groups=groups,
                             largest=int(index.max()))
        if torch.equal(index, torch.arange(inputs) // group):
            return None
        if not index.any() and not self.act_order:       # older tools left it empty where it said nothing
            self._notes["g_idx is empty: inputs belong to groups in their order."] = None
            return None
        return index


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise BrokenFile("A dynamic rule of the settings is no regular expression.", rule=pattern, reason=error) from error


def grouped(codes: Tensor, scale: Tensor, zero: Tensor, bits: int, group: int, index: Tensor | None) -> QWeight:
    """codes [N, K], scale and zero [N, G], index [K] or None → QWeight whose columns lie group by group."""
    if index is None:
        return QWeight(codes.contiguous(), scale, zero, None, bits, group)
    inputs = len(index)
    perm = torch.argsort(index, stable=True)
    order = index[perm]
    in_order = torch.equal(perm, torch.arange(inputs))
    if not torch.equal(order, torch.arange(inputs) // group):
        # Groups of unequal size: what divides all their sizes becomes the group, its scales repeated.
        group = math.gcd(*torch.bincount(order).tolist())
        scale, zero = scale[:, order[::group]].contiguous(), zero[:, order[::group]].contiguous()
    return QWeight(codes.contiguous() if in_order else codes[:, perm].contiguous(), scale, zero, None, bits, group,
                   None if in_order else perm)
