"""Which layers a model can do without, and the model without them.

A layer's influence is the rise of the mean cross-entropy over calibration windows when it is left out; layers go one after
another, each time the one with the least influence on what is left. Where that costs too much, one pass decides: block
influence, 1 - cos(input, output) of a layer (Men et al. 2024, "ShortGPT"). (The other way round, layers added one after another
by the least loss, was tried: it leaves out the first layers, without which nothing is worth much, and keeps the last ones.)
A draft that reads states keeps the first layers: those know embeddings, which is what it reads beside a state that has everything
else. Knows layers; nothing of training or of files.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from backends.base import InvalidRequest, Progress, ProgressFn
from backends.compress.stream import Stream
from backends.engine.weights import WeightSource
from backends.kernels import QWeight

GREEDY_WORK = 2e12     # parameters · tokens of layer passes that the greedy choice may take: some minutes of two cores


@dataclass(frozen=True)
class Choice:
    """``kept``: layers that stay, rising. ``loss``: mean cross-entropy in nats a token on the windows, of the whole model
    and of the pruned one. ``order``: (layer, loss without it) as they went, (layer, block influence), or none."""

    kept: tuple[int, ...]
    method: str                         # "greedy", "block", "first"
    whole_loss: float
    loss: float
    order: tuple[tuple[int, float], ...]

    @property
    def perplexities(self) -> tuple[float, float]:
        return math.exp(min(self.whole_loss, 80)), math.exp(min(self.loss, 80))


def choose(stream: Stream, keep: int, method: str, progress: ProgressFn) -> Choice:
    """The layers that stay when ``keep`` do. ``stream``: begun, its skeleton without layers in memory; "auto" counts the work.

    InvalidRequest where ``keep`` is not from 1 to one less than there are."""
    count = len(stream.skeleton.layers)
    if not 1 <= keep < count:
        raise InvalidRequest(f"This model has {count} layers: from 1 to {count - 1} can be kept.", field="layers", layers=keep)
    if method == "auto":
        method = "greedy" if greedy_work(stream, keep) <= GREEDY_WORK else "block"
    return {"greedy": _greedy, "block": _by_block, "first": _first}[method](stream, keep, progress)


def greedy_work(stream: Stream, keep: int) -> float:
    """Parameters · tokens of the layer passes that the greedy choice takes: each candidate of each round from its place on."""
    _, inside, _ = stream.skeleton.sizes()
    count = len(stream.skeleton.layers)
    passes = sum(left * left / 2 for left in range(keep + 1, count + 1))
    return inside / count * passes * sum(hidden.shape[1] for hidden in stream.hidden)


# ---------------------------------------------------------------------------------------------- one layer after another
def _greedy(stream: Stream, keep: int, progress: ProgressFn) -> Choice:
    every = range(len(stream.skeleton.layers))
    for index in every:
        stream.skeleton.load(index)
    try:
        layers, order = list(every), []
        whole = loss = stream.loss(_through(stream, stream.hidden, layers))
        for number in range(len(every) - keep):
            progress(Progress("prune", number, len(every) - keep, f"{len(layers)} layers left, loss {loss:.3f}"))
            layer, loss = _least(stream, layers)
            layers.remove(layer)
            order.append((layer, loss))
    finally:
        for index in every:
            stream.skeleton.drop(index)
    return Choice(tuple(layers), "greedy", whole, loss, tuple(order))


def _least(stream: Stream, layers: Sequence[int]) -> tuple[int, float]:
    """The layer whose absence costs least. What comes before a candidate is computed once for all of them."""
    before, best = list(stream.hidden), (layers[0], math.inf)
    for place, layer in enumerate(layers):
        stream.cancel.raise_if_set("The job")
        loss = stream.loss(_through(stream, before, layers[place + 1:]))
        if loss < best[1]:
            best = layer, loss
        before = _through(stream, before, [layer])
    return best


def _through(stream: Stream, hidden: Sequence[Tensor], layers: Sequence[int]) -> list[Tensor]:
    out = list(hidden)
    for layer in layers:
        out = [stream.run(layer, state) for state in out]
    return out


# ---------------------------------------------------------------------------------------------- one pass
def _by_block(stream: Stream, keep: int, progress: ProgressFn) -> Choice:
    start, count, influence = list(stream.hidden), len(stream.skeleton.layers), []
    for index in range(count):
        progress(Progress("prune", index, count, f"layer {index + 1} of {count}"))
        stream.skeleton.load(index)
        before = list(stream.hidden)
        stream.advance(index)
        stream.skeleton.drop(index)
        influence.append((index, float(torch.cat([1 - cosine_similarity(a[0], b[0], dim=-1)
                                                  for a, b in zip(before, stream.hidden)]).mean())))
    whole = stream.loss(stream.hidden)
    ranked = sorted(influence, key=lambda item: item[1])
    kept = tuple(sorted(index for index, _ in ranked[count - keep:]))
    stream.hidden = start
    return Choice(kept, "block", whole, _loss_of(stream, kept), tuple(ranked[:count - keep]))


# ---------------------------------------------------------------------------------------------- those at the beginning
def _first(stream: Stream, keep: int, progress: ProgressFn) -> Choice:
    progress(Progress("prune", note=f"the first {keep}"))
    every = tuple(range(len(stream.skeleton.layers)))
    return Choice(every[:keep], "first", _loss_of(stream, every), _loss_of(stream, every[:keep]), ())


def _loss_of(stream: Stream, layers: Sequence[int]) -> float:
    """The mean cross-entropy with these layers alone; the stream stands at the beginning before and after."""
    start = list(stream.hidden)
    for index in layers:
        stream.skeleton.load(index)
        stream.advance(index)
        stream.skeleton.drop(index)
    loss, stream.hidden = stream.loss(stream.hidden), start
    return loss


# ---------------------------------------------------------------------------------------------- the model without them
class Pruned:
    """A `WeightSource` with only the ``kept`` layers of another, numbered from 0. ``prefix``: where layers are, "model.layers"."""

    def __init__(self, source: WeightSource, kept: Sequence[int], prefix: str) -> None:
        self._source, self._places = source, {layer: place for place, layer in enumerate(kept)}
        self.config: Mapping[str, Any] = pruned_config(source.config, kept)
        self._layer = re.compile(rf"((?:.*\.)?{re.escape(prefix.rpartition('.')[2])})\.(\d+)\.(.+)")
        self._names = {new: name for name in source.names() if (new := self._renamed(name)) is not None}
        self._modules = {new.rpartition(".")[0]: name.rpartition(".")[0] for new, name in self._names.items()}

    def _renamed(self, name: str) -> str | None:
        match = self._layer.fullmatch(name)
        if match is None:
            return name
        place = self._places.get(int(match[2]))
        return None if place is None else f"{match[1]}.{place}.{match[3]}"

    def names(self) -> Collection[str]:
        return self._names.keys()

    def tensor(self, name: str) -> Tensor:
        return self._source.tensor(self._names[name])

    def linear(self, module: str) -> tuple[QWeight | Tensor, Tensor | None]:
        return self._source.linear(self._modules[module])

    def close(self) -> None:
        """The other source is its owner's to close."""


def pruned_config(config: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """The config with fewer layers: their number, and of every list with one entry a layer the entries that stay."""
    out = copy.deepcopy(dict(config))
    inner = out["text_config"] if isinstance(out.get("text_config"), dict) else out
    count = next((inner[key] for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if key in inner), None)
    for key, value in inner.items():
        if isinstance(value, (list, tuple)) and len(value) == count:
            inner[key] = [value[layer] for layer in kept]
        elif key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            inner[key] = len(kept)
    return out
