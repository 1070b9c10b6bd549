"""Where weights come from: the seam that every file format fills, and safetensors behind it.

A source speaks the tensor names and the conventions of transformers whatever the file calls them. It knows nothing of
kernels. Nothing that could run code is ever opened: a pickle is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from backends.base import BrokenFile, ModelDir, UnknownFormat, UnsafeFile, UnsupportedTensor, read_json
from backends.kernels import QWeight

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class WeightSource(Protocol):
    """Names are the transformers names of the architecture, whatever the file calls them."""

    config: Mapping[str, Any]            # in the form of config.json, model_type included

    def names(self) -> Collection[str]:
        """Every tensor there is, "model.layers.0.self_attn.q_proj.weight" …"""

    def tensor(self, name: str) -> Tensor:
        """A float tensor. Raises UnsupportedTensor or BrokenFile naming it."""

    def linear(self, module: str) -> tuple[QWeight | Tensor, Tensor | None]:
        """Weight [N, K] and bias [N] of "model.layers.0.mlp.down_proj"."""

    def close(self) -> None: ...


class SafetensorsSource:
    """The *.safetensors files of a folder, read tensor by tensor and copied, so that the files may change afterwards.

    Raises UnsafeFile (pickles only), UnknownFormat (no weights), BrokenFile (cut, damaged, a shard that is missing).
    """

    def __init__(self, model: ModelDir) -> None:
        self.config = model.config
        self._where = locate(model)
        self._files = {name: _open(model.folder / name) for name in sorted(set(self._where.values()))}
        self._alias = _aliases(self._where)

    def names(self) -> Collection[str]:
        return self._alias.keys()

    def raw(self, name: str) -> Tensor:
        """The tensor as stored, whatever its type: packed words of a quantized checkpoint are integers."""
        if name not in self._alias:
            raise BrokenFile(f"The model's files lack the tensor {name}.", tensor=name)
        stored = self._alias[name]
        file = self._where[stored]
        try:
            return self._files[file].get_tensor(stored).clone()
        except SafetensorError as error:
            raise BrokenFile(f"{name} cannot be read from {file}.", tensor=name, file=file, reason=error) from error

    def tensor(self, name: str) -> Tensor:
        found = self.raw(name)
        if found.dtype not in FLOATS:
            raise UnsupportedTensor(f"{name} is stored as {found.dtype}, not as a float type.", tensor=name,
                                    dtype=found.dtype, shape=list(found.shape), file=self._where[self._alias[name]])
        return found

    def linear(self, module: str) -> tuple[QWeight | Tensor, Tensor | None]:
        bias = f"{module}.bias"
        return self.tensor(f"{module}.weight"), self.tensor(bias) if bias in self._alias else None

    def close(self) -> None:
        self._files.clear()


def locate(model: ModelDir) -> dict[str, str]:
    """Tensor name → file name. The index is believed where there is one, and must be complete."""
    files = model.ending(".safetensors")
    if not files:
        pickles = [name for name in model.files if name.lower().endswith(PICKLES)]
        if pickles:
            raise UnsafeFile("The weights are there only as pickles, which can run code when opened.",
                             files=", ".join(pickles[:4]))
        raise UnknownFormat("The folder holds no *.safetensors file.", folder=model.folder)
    if INDEX in model.files:
        return _indexed(model)
    chosen = (SINGLE,) if SINGLE in files else tuple(name for name in files if "/" not in name) or files
    where: dict[str, str] = {}
    for file in chosen:
        for name in _open(model.folder / file).keys():
            if name in where:
                raise BrokenFile(f"{name} is in two files, and no index says which one counts.",
                                 first=where[name], second=file)
            where[name] = file
    return where


def _indexed(model: ModelDir) -> dict[str, str]:
    table = read_json(model.folder / INDEX).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise BrokenFile(f"{INDEX} has no weight_map.", file=INDEX)
    missing = sorted(set(table.values()) - set(model.files))
    if missing:
        raise BrokenFile(f"{len(missing)} of {len(set(table.values()))} shards are missing.",
                         missing=", ".join(missing[:8]), index=INDEX)
    for file in sorted(set(table.values())):
        absent = {name for name, where in table.items() if where == file} - set(_open(model.folder / file).keys())
        if absent:
            raise BrokenFile(f"{file} lacks tensors that {INDEX} places there.",
                             file=file, tensors=", ".join(sorted(absent)[:4]))
    return dict(table)


def _open(path: Path) -> Any:
    """The header is checked against the file's size first, so that the message can say what is wrong."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise BrokenFile(f"{path.name} is cut: its header is longer than the file.",
                             file=path.name, bytes=size, header=length)
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            end = 8 + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise BrokenFile(f"{path.name} has no readable header.", file=path.name, reason=error) from error
    if end != size:
        raise BrokenFile(f"{path.name} has {size} bytes where its header describes {end}.",
                         file=path.name, bytes=size, expected=end)
    try:
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise BrokenFile(f"{path.name} is no valid safetensors file.", file=path.name, reason=error) from error


def _aliases(where: Mapping[str, str]) -> dict[str, str]:
    """Public name → stored name. A checkpoint of the bare decoder stack lacks the "model." in front of its names."""
    if any(name.startswith("model.") for name in where) or "embed_tokens.weight" not in where:
        return {name: name for name in where}
    return {name if name.startswith("lm_head.") else f"model.{name}": name for name in where}
