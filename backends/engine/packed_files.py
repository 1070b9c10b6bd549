"""A safetensors checkpoint with packed layers as a `WeightSource`. The layout of a layer is a `Layout`, one per format.

Knows which tensors belong to a packed layer, skipped modules, and a head that is packed although it is tied. Refuses to know
bits. A layer that is stored as floats stays floats, whatever the settings say of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from torch import Tensor

from backends.base import ModelDir
from backends.engine.weights import SafetensorsSource
from backends.errors import BrokenFile
from backends.kernels import QWeight

Raw = Callable[[str], "Tensor | None"]        # "qweight" → the layer's tensor of that name, or None


class Layout(Protocol):
    """How one format stores a layer."""

    words: str                                # the tensor that a packed layer always has: "qweight"
    parts: frozenset[str]                     # everything that a packed layer may have, but for its bias

    def read(self, module: str, raw: Raw) -> QWeight:
        """BrokenFile, UnsupportedTensor naming the layer and the tensor."""

    def skipped(self) -> Iterable[str]:
        """Names, or parts of names, of modules that the settings say are left as floats."""

    def notes(self) -> tuple[str, ...]:
        """What was found odd while reading, for people."""


class PackedFiles:
    """Raises UnknownFormat where no layer is packed; the notes are complete when everything has been read."""

    def __init__(self, model: ModelDir, layout: Layout) -> None:
        self.config: dict[str, Any] = dict(model.config)
        self._layout, self._files = layout, SafetensorsSource(model)
        stored = set(self._files.names())
        ending = "." + layout.words
        self._modules = {name.removesuffix(ending) for name in stored if name.endswith(ending)}
        if not self._modules:
            raise BrokenFile(f"The folder says it is quantized, but no tensor is called *.{layout.words}.",
                             folder=model.folder.name)
        self._notes = [*self._tied_head(), *self._check_skipped(stored)]
        self._names = {name for name in stored if not self._is_part(name)} | {f"{module}.weight" for module in self._modules}

    def _is_part(self, name: str) -> bool:
        module, _, part = name.rpartition(".")
        dropped = module == "lm_head" and bool(self.config.get("tie_word_embeddings")) and "lm_head" in self._dropped
        return dropped or module in self._modules and (part in self._layout.parts or part == "weight")

    def _tied_head(self) -> list[str]:
        """Some tools store a packed head beside a tied embedding. It is not used: the embedding is the head."""
        self._dropped = {"lm_head"} & self._modules if self.config.get("tie_word_embeddings") else set()
        self._modules -= self._dropped
        note = "The file also holds a quantized lm_head; it is tied to the embedding, so the stored one is not used."
        return [note] if self._dropped else []

    def _check_skipped(self, stored: Collection[str]) -> list[str]:
        modules = {name.rpartition(".")[0] for name in stored}
        notes = []
        for name in self._layout.skipped():
            of_it = {module for module in modules if f".{name}." in f".{module}." or name in module}
            if not of_it:
                notes.append(f"The settings skip {name!r}, but the model has no such module.")
            elif of_it <= self._modules:
                notes.append(f"The settings skip {name!r}, but it is stored quantized, and is used as stored.")
        return notes

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self._notes, *self._layout.notes())

    def names(self) -> Collection[str]:
        return self._names

    def tensor(self, name: str) -> Tensor:
        module, _, part = name.rpartition(".")
        if part == "weight" and module in self._modules:
            return self._packed(module).dequantize()
        return self._files.tensor(name)

    def linear(self, module: str) -> tuple[QWeight | Tensor, Tensor | None]:
        if module not in self._modules:
            return self._files.linear(module)
        bias = f"{module}.bias"
        return self._packed(module), self._files.tensor(bias) if bias in self._names else None

    def close(self) -> None:
        self._files.close()

    def _packed(self, module: str) -> QWeight:
        stored = self._files.names()
        return self._layout.read(module, lambda part: self._files.raw(f"{module}.{part}") if f"{module}.{part}" in stored
                                 else None)


def need(raw: Raw, module: str, part: str) -> Tensor:
    """BrokenFile naming the tensor that is not there."""
    found = raw(part)
    if found is None:
        raise BrokenFile(f"The model's files lack {module}.{part}.", tensor=f"{module}.{part}")
    return found


def expect(module: str, part: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """BrokenFile naming the tensor and both shapes."""
    if tuple(tensor.shape) != shape:
        raise BrokenFile(f"{module}.{part} has the shape {list(tensor.shape)} where {list(shape)} is needed.",
                         tensor=f"{module}.{part}",
                         shape=list(tensor.shape), expected=list(shape))
    return tensor
