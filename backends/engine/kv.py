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
from backends.kernels.cpu_memory import HUGE, mapped

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
        self.layers = tuple(_layer(layer, pages, kv_type, torch.device(device)) for layer in layers)

    def copy_page(self, source: int, target: int) -> None:
        for layer in self.layers:
            for tensor in (layer.k, layer.v, layer.k_scale, layer.k_low, layer.v_scale, layer.v_low):
                if tensor is not None:
                    tensor[target] = tensor[source]


def _layer(layer: LayerKV, pages: int, kv_type: str, device: torch.device) -> KVLayer:
    dtype, shape = TYPES[kv_type], (pages, layer.heads, PAGE)
    k, v = _zeros((*shape, layer.key_width), dtype, device), _zeros((*shape, layer.value_width), dtype, device)
    if kv_type != "int8":
        return KVLayer(k, v)
    return KVLayer(k, v, *(_zeros(shape, torch.float32, device) for _ in range(4)))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    if size >= HUGE:                                          # then the first token of a sequence costs a huge page, not more
        return mapped(size)[:size].view(dtype).view(shape)
    raw = np.zeros(size + ALIGN, dtype=np.uint8)              # calloc: torch.zeros would write every byte
    start = -raw.ctypes.data % ALIGN
    return torch.from_numpy(raw[start:start + size]).view(dtype).view(shape)
