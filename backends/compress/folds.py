"""Where a scale of input channels can be hidden: in the norm or the matrix that produces them. Found by trying, not by names.

A producer's output channels are multiplied by known factors; if the consumers' input changes by just these factors, channel
by channel, and undoing them in the consumers leaves the layer's output as it was, the fold is sound for whatever the layer is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backends.compress.skeleton import linears, matrix_of, set_matrix
from backends.compress.stream import Stream

CLOSE = 2e-3            # relative: float32 passes differ by some 1e-6, a fold that is none by far more
MOST = 6                # producers tried for one input


@dataclass(frozen=True)
class Fold:
    """``producer``: path in the layer. ``channels`` int64 [K]: the producer's channel behind each input channel.
    ``offset``: what
    the norm adds to its weight (Gemma: 1)."""

    producer: str
    channels: Tensor
    offset: float = 0.0

    def scale_producer(self, layer: nn.Module, factor: Tensor) -> None:
        """Multiply the producer's output channels by ``factor`` [channels of the producer]."""
        module = layer.get_submodule(self.producer)
        matrix = matrix_of(module)
        if matrix is not None:
            set_matrix(module, matrix * factor[:, None])
        else:
            module.weight.copy_((module.weight + self.offset) * factor - self.offset)
        if getattr(module, "bias", None) is not None:
            module.bias.mul_(factor)

    def of_producer(self, scale: Tensor) -> Tensor:
        """A scale of input channels [K] as one of the producer's channels."""
        out = scale.new_ones(int(self.channels.max()) + 1)
        out[self.channels] = scale
        return out


@torch.no_grad()
def find(stream: Stream, index: int, consumers: Sequence[str], hint: Fold | None = None) -> Fold | None:
    """A sound fold for the common input of ``consumers`` in a loaded layer, or None. The layer is left as it was.

    ``hint``: what was found in another layer; it is tried first, and like any other."""
    layer = stream.skeleton.layers[index]
    trial = _Trial(stream, index, layer, consumers)
    tries = [(name, offset) for name in trial.candidates()
             for offset in ((0.0, 1.0) if matrix_of(layer.get_submodule(name)) is None else (0.0,))]
    if hint is not None:
        tries.sort(key=lambda one: one != (hint.producer, hint.offset))
    return next((found for one in tries if (found := trial.attempt(*one)) is not None), None)


class _Trial:
    def __init__(self, stream: Stream, index: int, layer: nn.Module, consumers: Sequence[str]) -> None:
        self.stream, self.index, self.layer, self.consumers = stream, index, layer, consumers
        self.width = matrix_of(layer.get_submodule(consumers[0])).shape[1]
        self.order: list[str] = []
        self.input, self.output = self._pass(note=True)
        self.reference = self.output.norm()

    def candidates(self) -> list[str]:
        """Producers that ran before the consumers, the latest first: norms of this width, matrices that may feed it."""
        before = self.order[:self.order.index(self.consumers[0])]
        return [name for name in reversed(before) if self._fits(self.layer.get_submodule(name))][:MOST]

    def _fits(self, module: nn.Module) -> bool:
        matrix = matrix_of(module)
        if matrix is not None:
            return self.width % matrix.shape[0] == 0
        weight = getattr(module, "weight", None)
        return isinstance(weight, Tensor) and weight.shape == (self.width,)

    def attempt(self, name: str, offset: float) -> Fold | None:
        module = self.layer.get_submodule(name)
        kept = {key: value.clone() for key, value in module.named_parameters(recurse=False)}
        count = self.width if matrix_of(module) is None else matrix_of(module).shape[0]
        draw = torch.Generator().manual_seed(1)
        factor = torch.linspace(0.5, 1.5, count)[torch.randperm(count, generator=draw)].to(self.input.device)
        try:
            Fold(name, torch.arange(count), offset).scale_producer(self.layer, factor)
            changed, _ = self._pass()
            channels = self._channels(changed, factor)
            if channels is None:
                return None
            fold = Fold(name, channels, offset)
            return fold if self._undone(factor[channels]) else None
        finally:
            for key, value in kept.items():
                module.get_parameter(key).copy_(value)

    def _channels(self, changed: Tensor, factor: Tensor) -> Tensor | None:
        """Which factor each input channel shows; None where one shows none of them."""
        energy = self.input.square().sum(0)
        shown = (self.input * changed).sum(0) / energy.clamp_min(1e-30)
        if (changed - self.input * shown).norm() > CLOSE * self.input.norm():
            return None
        sorted_, order = factor.sort()
        place = torch.searchsorted(sorted_, shown).clamp(1, len(factor) - 1) if len(factor) > 1 else torch.zeros_like(shown,
            dtype=torch.int64)
        lower = (place - 1).clamp_min(0)
        nearest = torch.where((shown - sorted_[lower]).abs() < (sorted_[place] - shown).abs(), lower, place)
        channels = order[nearest]
        silent = energy == 0
        if silent.any():                                    # nothing to see there: only the plain order can be meant
            if len(factor) != self.width:
                return None
            channels = torch.where(silent, torch.arange(self.width, device=channels.device), channels)
        wrong = ((factor[channels] - shown).abs() > 0.1 / len(factor)) & ~silent
        return None if wrong.any() else channels

    def _undone(self, factor: Tensor) -> bool:
        """With the consumers' columns divided by the factors, is the layer's output what it was?"""
        kept = {name: matrix_of(self.layer.get_submodule(name)).clone() for name in self.consumers}
        try:
            for name, matrix in kept.items():
                set_matrix(self.layer.get_submodule(name), matrix / factor)
            _, output = self._pass()
            return bool((output - self.output).norm() <= CLOSE * self.reference)
        finally:
            for name, matrix in kept.items():
                set_matrix(self.layer.get_submodule(name), matrix)

    def _pass(self, note: bool = False) -> tuple[Tensor, Tensor]:
        """Input of the consumers [rows, K] and output of the layer, in float32 whatever the calibration passes use."""
        seen: list[Tensor] = []
        hooks = [self.layer.get_submodule(self.consumers[0]).register_forward_pre_hook(
            lambda _, args: seen.append(args[0].reshape(-1, self.width).float().clone()))]
        if note:
            for name, module in self.layer.named_modules():
                if name and (name in linears(self.layer) or isinstance(getattr(module, "weight", None), Tensor)):
                    hooks.append(module.register_forward_pre_hook(lambda _, args, name=name: self.order.append(name)))
        precision, self.stream.precision = self.stream.precision, "float32"
        try:
            output = self.stream.run(self.index, self.stream.hidden[0])
        finally:
            self.stream.precision = precision
            for hook in hooks:
                hook.remove()
        return seen[0], output
