"""The weights of a GGUF file as a `WeightSource`: its own codes, under the names that transformers uses.

Knows where a tensor lies, how its type unpacks and what llama.cpp's converter did to it (interleaved q and k rows, an offset
on Gemma's norms), which it undoes. Refuses to know decoders and targets. Data is read tensor by tensor when asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backends.engine import gguf_blocks
from backends.engine.gguf_config import FAMILIES, check_shapes, config_of, names_of, unread
from backends.errors import BrokenFile, UnknownFormat, UnsupportedTensor
from backends.gguf_file import TYPES, GgufFile, TensorInfo
from backends.kernels import FileRows, QWeight

BLOCKS = {name: (weights, size) for name, weights, size in TYPES.values()}
READABLE = gguf_blocks.QUANTIZED.keys() | gguf_blocks.FLOATS.keys()


class GgufWeights:
    """A `WeightSource` over one model. Raises when made: UnknownFormat (architecture), UnsupportedTensor (a type, or a
    tensor that the architecture has no place for), BrokenFile (a tensor missing or of the wrong shape)."""

    def __init__(self, file: GgufFile) -> None:
        if file.architecture not in FAMILIES:
            raise UnknownFormat(f"The GGUF architecture {file.architecture!r} is not read natively.", file=file.path.name,
                                known=", ".join(FAMILIES))
        check_types(file)
        self._file, self._family = file, FAMILIES[file.architecture]
        self.config: Mapping[str, Any] = config_of(file, self._factors)
        self._names = names_of(file)
        check_shapes(file, self.config, self._names)
        self.notes: tuple[str, ...] = tuple(f"The file's key {key} is not used." for key in unread(file))

    def names(self) -> Collection[str]:
        return self._names.keys()

    def tensor(self, name: str) -> Tensor:
        """A float tensor in the type it is stored in, or float32 where it is quantized."""
        info = self._info(name)
        if info.type in gguf_blocks.QUANTIZED:
            return self._quantized(info).dequantize()
        return self._float(info)

    def linear(self, module: str) -> tuple[QWeight | Tensor, Tensor | None]:
        """Weight [N, K] and bias [N] of a module, "model.layers.0.mlp.down_proj" say."""
        info = self._info(f"{module}.weight")
        weight = self._quantized(info) if info.type in gguf_blocks.QUANTIZED else self._float(info)
        return weight, self.tensor(f"{module}.bias") if f"{module}.bias" in self._names else None

    def close(self) -> None:
        """Nothing stays open between two reads."""

    # ---- one tensor
    def _info(self, name: str) -> TensorInfo:
        if name not in self._names:
            raise BrokenFile(f"{self._file.path.name} has no tensor for {name}.", tensor=name)
        return self._file.tensors[self._names[name]]

    def _factors(self, name: str) -> list[float]:
        return self._float(self._file.tensors[name]).float().tolist()

    def _rows(self, info: TensorInfo, width: int) -> np.ndarray:
        """uint8 [rows, width], the rows in the order of transformers."""
        rows, heads = read_bytes(info).reshape(-1, width), self._paired_heads(info.name)
        # llama.cpp turns neighbours (2j, 2j + 1) where transformers turns the halves (j, j + d/2) of a head
        return rows.reshape(heads, -1, 2, width).swapaxes(1, 2).reshape(-1, width) if heads else rows

    def _paired_heads(self, name: str) -> int:
        kind = name.split(".")[-2] if self._family.paired else ""
        field = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(kind)
        return self.config[field] if field else 0

    def _quantized(self, info: TensorInfo) -> QWeight:
        """Its data stays in the file until a target asks for it."""
        weights, size = BLOCKS[info.type]
        width = info.shape[-1] // weights * size
        rows = FileRows(info.name, info.path, info.offset, (info.bytes // width, width), self._paired_heads(info.name),
                        lambda: torch.from_numpy(self._rows(info, width)))
        return gguf_blocks.stored(info.type, rows, info.shape[-1], size)

    def _float(self, info: TensorInfo) -> Tensor:
        row = gguf_blocks.FLOATS[info.type].itemsize * (info.shape[-1] if len(info.shape) > 1 else 1)
        values = gguf_blocks.floats(info.type, self._rows(info, row).reshape(-1)).reshape(info.shape)
        return values - self._family.offset if self._family.offset and info.name.endswith("norm.weight") else values


def check_types(file: GgufFile) -> None:
    """UnsupportedTensor naming the first tensor of a type that is not read, and how many there are."""
    bad = [tensor for tensor in file.tensors.values() if tensor.type not in READABLE]
    if bad:
        raise UnsupportedTensor(f"{file.path.name}: the tensor {bad[0].name!r} is of type {bad[0].type}, which is not read.",
                                tensor=bad[0].name, type=bad[0].type, tensors_of_such_types=len(bad),
                                remedy=f"Use a file of one of the types {', '.join(sorted(READABLE))}.")


def read_bytes(info: TensorInfo) -> np.ndarray:
    """uint8 [bytes]. Tensors are read, not mapped: a file that shrinks under us is then an error, not a signal."""
    out, done = np.empty(info.bytes, np.uint8), 0
    with open(info.path, "rb", buffering=0) as file:
        file.seek(info.offset)
        while done < info.bytes:
            count = file.readinto(memoryview(out)[done:])
            if not count:
                raise BrokenFile(f"{info.path.name} ended inside the tensor {info.name!r}.", tensor=info.name,
                                 file=info.path.name)
            done += count
    return out
