"""A draft's weights: layers and final norm of its own, embeddings and head rows from the model it was made from.

The two make one `WeightSource`. A head of few ids comes as ``lm_head.weight`` [n, H] with ``lm_head.ids`` [n], the ids of its
rows. Knows which tensors are borrowed, and by a digest whether they are still the ones that the draft was trained with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends.base import DraftParent, ModelDir
from backends.engine.gguf_text import text_of
from backends.engine.gguf_weights import GgufWeights
from backends.engine.text import TextCodec
from backends.engine.weights import SafetensorsSource, WeightSource
from backends.gguf_file import read_model
from backends.kernels import QWeight

EMBEDDINGS, HEAD, IDS = "model.embed_tokens", "lm_head", "lm_head.ids"
GROUP = 32              # inputs that share a scale where a head is rounded
RANGES = (1.0, 0.92, 0.84, 0.76)        # shares of a group's range that are tried

Weight = tuple[QWeight | Tensor, Tensor | None]


class DraftSource:
    """``own``: the draft's files; ``parent``: the model's. ``ids``: of the head's rows, rising; None: all. ``digest``: what
    `borrowed_digest` gave when the draft was made. Raises DraftParent."""

    def __init__(self, own: WeightSource, parent: WeightSource, ids: Sequence[int] | None, digest: str, name: str) -> None:
        if (found := borrowed_digest(parent)) != digest:
            raise DraftParent(f"{name!r} is not the model that this draft was made from: its embeddings or head differ.",
                                     parent=name, expected=digest[:16], found=found[:16])
        self._own, self._parent = own, parent
        self._ids = None if ids is None else torch.tensor(ids, dtype=torch.int64)
        self.config: Mapping[str, Any] = own.config
        lent = [f"{EMBEDDINGS}.weight", *([IDS] if ids is not None else [])]
        if ids is not None or not tied(parent):
            lent.append(f"{HEAD}.weight")
        self._names = {*own.names(), *lent}

    def names(self) -> Collection[str]:
        return self._names

    def tensor(self, name: str) -> Tensor:
        if name == IDS and self._ids is not None:
            return self._ids
        return self._own.tensor(name)

    def linear(self, module: str) -> Weight:
        if module == EMBEDDINGS:
            return self._parent.linear(EMBEDDINGS)[0], None
        if module != HEAD:
            return self._own.linear(module)
        weight, bias = self._parent.linear(EMBEDDINGS if tied(self._parent) else HEAD)
        return (weight, bias) if self._ids is None else (rows_of(weight, self._ids), bias if bias is None else bias[self._ids])

    def close(self) -> None:
        self._own.close()
        self._parent.close()


def tied(parent: WeightSource) -> bool:
    return f"{HEAD}.weight" not in parent.names()


def rows_of(weight: QWeight | Tensor, ids: Tensor) -> QWeight:
    """Some rows in 4 bits, since reading them is the largest part of a guess: as they are where they have no more, else rounded."""
    if isinstance(weight, Tensor):
        return four_bits(weight[ids].float())
    pick = lambda value: None if value is None else value[ids].contiguous()  # noqa: E731
    picked = QWeight(weight.codes[ids].contiguous(), pick(weight.scale), pick(weight.zero), pick(weight.bias), weight.bits,
                     weight.group, weight.perm)
    return picked if picked.bits <= 4 else four_bits(picked.dequantize())


def four_bits(rows: Tensor) -> QWeight:
    """float32 [N, K] to 16 levels with offsets, for each `GROUP` neighbours (a ragged end has zeros behind it) over that part of
    their range, of `RANGES`, which leaves the smallest squared error."""
    count, width = rows.shape
    groups = -(-width // GROUP)
    padded = torch.zeros(count, groups * GROUP)
    padded[:, :width] = rows
    parts = padded.view(count, groups, GROUP)
    low, span = parts.amin(-1), parts.amax(-1) - parts.amin(-1)
    tried = [((span * part / 15).clamp_min(2.0 ** -24).half(), (low + span * (1 - part) / 2).half()) for part in RANGES]
    best = torch.stack([_error(parts, *grid) for grid in tried]).argmin(0, keepdim=True)
    scale, bias = (torch.stack(each).gather(0, best)[0] for each in zip(*tried))
    codes = _levels(parts, scale, bias).to(torch.uint8).view(count, -1)[:, :width].contiguous()
    return QWeight(codes, scale, None, bias, 4, GROUP)


def _levels(parts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """The nearest of 16, as floats."""
    return ((parts - bias.float()[..., None]) / scale.float()[..., None]).round_().clamp_(0, 15)


def _error(parts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Squared, summed over each group."""
    return (_levels(parts, scale, bias) * scale.float()[..., None] + bias.float()[..., None] - parts).square().sum(-1)


def borrowed_digest(parent: WeightSource) -> str:
    """SHA-256 over the embeddings and the head as the parent's files store them."""
    digest = hashlib.sha256()
    for module in (EMBEDDINGS,) if tied(parent) else (EMBEDDINGS, HEAD):
        for value in parent.linear(module):
            for part in (value.codes, value.scale, value.zero, value.bias) if isinstance(value, QWeight) else (value,):
                if part is not None:
                    digest.update(f"{module} {list(part.shape)} {part.dtype}\n".encode())
                    digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def open_parent(model: ModelDir, gguf: Path | None) -> tuple[WeightSource, TextCodec]:
    """The parent's weights, and its tokenizer, which is the draft's: a float folder, or its GGUF file, of a family that is
    read natively."""
    if gguf is None:
        return SafetensorsSource(model), TextCodec.from_folder(model.folder)
    file = read_model(gguf)
    return GgufWeights(file), text_of(file)[0]
