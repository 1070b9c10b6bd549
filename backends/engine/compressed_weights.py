"""Layers of compressed-tensors in the format pack-quantized (what llm-compressor writes for W4A16 and W8A16) as QWeight.

A layer: weight_packed int32 [N, K·bits/32] packed along the inputs, weight_scale [N, G], weight_shape (N, K); asymmetric
ones weight_zero_point, packed along the outputs or as int8; weight_g_idx [K] where inputs were reordered. Codes and zeros
are stored shifted by 2^(bits - 1), which cancels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from backends.engine.bitfields import fields
from backends.engine.gptq_weights import grouped
from backends.engine.packed_files import Raw, expect, need
from backends.errors import BrokenFile, NotSupported, UnknownFormat, UnsupportedTensor
from backends.kernels import QWeight
from backends.quant_config import Quantization

BITS = (2, 4, 8)


class CompressedLayout:
    """UnknownFormat for another format, NotSupported for quantized activations, UnsupportedTensor for other numbers."""

    words = "weight_packed"
    parts = frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
                       "weight_global_scale"})

    def __init__(self, quantization: Quantization) -> None:
        self.data = quantization.data
        if self.data.get("format") != "pack-quantized":
            raise UnknownFormat(f"compressed-tensors' format {self.data.get('format')!r} is not read, only pack-quantized.",
                                files=", ".join(quantization.files))
        if self.data.get("transform_config"):
            raise NotSupported("The checkpoint was made with rotations (transform_config) that activations need too.")
        groups = self.data.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise BrokenFile("The quantization settings have no config_groups.", file=quantization.files[0])
        self._groups = [(_targets(group), _scheme(name, group)) for name, group in groups.items()]
        self._notes = ("The cache scheme of the settings is not used.",) if self.data.get("kv_cache_scheme") else ()

    def skipped(self) -> Iterable[str]:
        return [name for name in self.data.get("ignore") or [] if isinstance(name, str) and not name.startswith("re:")]

    def notes(self) -> tuple[str, ...]:
        return self._notes

    def scheme(self, module: str) -> Mapping[str, Any]:
        """The weights' settings of the group that names the module, else of the one for every Linear."""
        for targets, scheme in self._groups:
            if any(_names(target, module) for target in targets):
                return scheme
        for targets, scheme in self._groups:
            if "Linear" in targets:
                return scheme
        raise BrokenFile(f"{module} is stored quantized, but no group of the settings is for it.", module=module)

    def read(self, module: str, raw: Raw) -> QWeight:
        scheme = self.scheme(module)
        bits, packed = scheme["num_bits"], need(raw, module, "weight_packed")
        outputs, inputs = self._shape(module, packed, raw("weight_shape"), bits)
        group = scheme.get("group_size") or inputs
        group = inputs if scheme.get("strategy") == "channel" or group == -1 else group
        groups = -(-inputs // group)
        scale = expect(module, "weight_scale", need(raw, module, "weight_scale"), (outputs, groups)).contiguous()
        index = raw("weight_g_idx")
        if index is not None:
            index = expect(module, "weight_g_idx", index, (inputs,)).to(torch.int64)
            if int(index.min()) < -1 or int(index.max()) >= groups:
                raise BrokenFile(f"{module}.weight_g_idx names a group that is not there.", tensor=f"{module}.weight_g_idx",
                                 groups=groups)
            index = None if int(index.min()) == -1 else index            # -1: never filled in
        return grouped(fields(packed, bits)[:, :inputs], scale, self._zero(module, raw, scheme, (outputs, groups)), bits,
                       group, index)

    def _shape(self, module: str, packed: Tensor, stored: Tensor | None, bits: int) -> tuple[int, int]:
        if packed.ndim != 2 or packed.dtype != torch.int32:
            raise UnsupportedTensor(f"{module}.weight_packed is no matrix of int32 words.", tensor=f"{module}.weight_packed",
                                    shape=list(packed.shape), dtype=packed.dtype)
        outputs, inputs = packed.shape[0], packed.shape[1] * 32 // bits
        if stored is not None:
            said = tuple(int(n) for n in stored.flatten().tolist())
            if len(said) != 2 or said[0] != outputs or not inputs - 32 // bits < said[1] <= inputs:
                raise BrokenFile(f"{module}.weight_shape does not fit the packed codes.", tensor=f"{module}.weight_shape",
                                 said=said,
                                 packed=(outputs, inputs))
            inputs = said[1]
        return outputs, inputs

    def _zero(self, module: str, raw: Raw, scheme: Mapping[str, Any], shape: tuple[int, int]) -> Tensor:
        """uint8 [N, G]"""
        bits, middle = scheme["num_bits"], 1 << scheme["num_bits"] - 1
        if scheme.get("symmetric", True):
            return torch.full(shape, middle, dtype=torch.uint8)
        stored = need(raw, module, "weight_zero_point")
        if stored.dtype == torch.int32 and tuple(stored.shape) != shape:
            expect(module, "weight_zero_point", stored, (-(-shape[0] * bits // 32), shape[1]))
            return fields(stored.T, bits)[:, :shape[0]].T.contiguous()
        return (expect(module, "weight_zero_point", stored, shape).to(torch.int16) + middle).to(torch.uint8)


def _targets(group: Any) -> list[str]:
    return [target for target in group.get("targets") or [] if isinstance(target, str)] if isinstance(group, Mapping) else []


def _names(target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return target == module
    try:
        return re.match(target[3:], module) is not None
    except re.error as error:
        raise BrokenFile("A target of the settings is no regular expression.", target=target, reason=error) from error


def _scheme(name: str, group: Any) -> Mapping[str, Any]:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise BrokenFile(f"The group {name} of the settings says nothing about weights.", group=name)
    for part in ("input_activations", "output_activations"):
        if group.get(part):
            raise NotSupported(f"The group {name} quantizes activations, which is not done here.", group=name, part=part)
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if kind != "int" or bits not in BITS or weights.get("strategy", "group") not in ("group", "channel"):
        raise UnsupportedTensor(f"Weights of {name} are {bits}-bit {kind} by {weights.get('strategy')}: not read.",
                                group=name, bits=bits, type=kind, strategy=weights.get("strategy"))
    return weights
