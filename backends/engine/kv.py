"""Page storage: one pair of tensors a layer, in float32, float16, bfloat16 or int8.

It knows shapes and bytes; which page belongs to whom is `blocks.py`, what is written into one is the kernels' business.
Layout: see `backends.kernels.KVLayer`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from backends.base import LayerKV
from backends.kernels import KVLayer
from backends.kernels.cpu_memory import HUGE, mapped, untouched

PAGE = 16                    # tokens
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.uint8}
ALIGN = 64                   # bytes: a cache line, and a full vector register


def bytes_per_token(layers: Sequence[LayerKV], kv_type: str) -> int:
    """Bytes one token takes over all layers; int8 adds a float32 scale and low for each of key and value and head."""
    size, extra = TYPES[kv_type].itemsize, 16 if kv_type == "int8" else 0
    return sum(layer.heads * ((layer.key_width + layer.value_width) * size + extra) for layer in layers)


class PagedKV:
    """``pages`` pages for every layer. Memory is asked for as zeros that the system provides on first touch: what no sequence
    has written costs none. Large tensors lie in huge pages where the system gives them, and are touched 2 MiB at a time."""

    def __init__(self, layers: Sequence[LayerKV], pages: int, kv_type: str, device: torch.device | str = "cpu") -> None:
        self.kv_type, self.pages = kv_type, pages
        self.bytes_per_token = bytes_per_token(layers, kv_type)
        make = _Zeros(torch.device(device), sum(pages * PAGE * bytes_per_token((layer,), kv_type) + 6 * ALIGN for layer in layers))
        self.layers = tuple(_layer(layer, pages, kv_type, make) for layer in layers)

    def copy_page(self, source: int, target: int) -> None:
        for layer in self.layers:
            for tensor in (layer.k, layer.v, layer.k_scale, layer.k_low, layer.v_scale, layer.v_low):
                if tensor is not None:
                    tensor[target] = tensor[source]


def _layer(layer: LayerKV, pages: int, kv_type: str, make: _Zeros) -> KVLayer:
    dtype, shape = TYPES[kv_type], (pages, layer.heads, PAGE)
    k, v = make((*shape, layer.key_width), dtype), make((*shape, layer.value_width), dtype)
    if kv_type != "int8":
        return KVLayer(k, v)
    return KVLayer(k, v, *(make(shape, torch.float32) for _ in range(4)))


class _Zeros:
    """Zeros on a device. On the CPU small tensors come from one piece of ``most`` bytes, whose pages nobody touches before
    they are written to: sixty small allocations would be filled by hand."""

    def __init__(self, device: torch.device, most: int) -> None:
        self._device, self._most, self._used = device, most, 0
        self._raw: Tensor | None = None

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self._device)
        size = int(np.prod(shape)) * dtype.itemsize
        if size >= HUGE:                                      # then the first token of a sequence costs a huge page, not more
            return mapped(size)[:size].view(dtype).view(shape)
        if self._raw is None:
            self._raw = untouched(self._most)
        start, self._used = self._used, self._used + -(-size // ALIGN) * ALIGN
        return self._raw[start:start + size].view(dtype).view(shape)
