"""One decoder layer from float to codes: stage by stage, each measured on what the stages before it now give.

Knows stages, folds and which method is asked for. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from backends.base import NotSupported
from backends.compress import awq, folds, gptq
from backends.compress.gram import Gram
from backends.compress.pack import fits
from backends.compress.skeleton import linears, matrix_of, set_matrix
from backends.compress.stream import Memo, Stream
from backends.kernels import QWeight
from backends.recipe import QuantizeOptions


@dataclass
class Layer:
    """``weights``: path in the layer → codes; ``errors``: relative squared output error; ``notes``: what
    was not as asked."""

    module: nn.Module
    index: int
    weights: dict[str, QWeight] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    blocks: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def settle(self, name: str, weight: QWeight) -> None:
        """From here on the layer computes with what the file will hold."""
        self.weights[name] = weight
        set_matrix(self.module.get_submodule(name), weight.dequantize())


class Method(Protocol):
    def stage(self, stream: Stream, layer: Layer, names: Sequence[str], gram: Tensor, memo: Memo) -> None:
        """Settle the matrices ``names``, which share the inputs of ``gram`` [K, K]."""

    def head(self, weight: Tensor, gram: Tensor) -> tuple[QWeight, float]:
        """The output head [V, H]."""


class Gptq:
    def __init__(self, options: QuantizeOptions) -> None:
        self.settings = options

    def stage(self, stream: Stream, layer: Layer, names: Sequence[str], gram: Tensor, memo: Memo) -> None:
        inputs = gptq.Inputs(gram, self.settings)
        if inputs.damp > self.settings.damp:
            layer.notes.append(f"{names[0]} was damped by {inputs.damp:g}: its inputs are nearly dependent.")
        for name in names:
            done = gptq.quantize(matrix_of(layer.module.get_submodule(name)).contiguous(), inputs, self.settings)
            layer.settle(name, done.weight)
            layer.errors[name] = done.error

    def head(self, weight: Tensor, gram: Tensor) -> tuple[QWeight, float]:
        done = gptq.quantize(weight, gptq.Inputs(gram, self.settings), self.settings)
        return done.weight, done.error


class Awq:
    def __init__(self, options: QuantizeOptions) -> None:
        self.settings = options
        # in the layer before: it saves trials, and decides nothing
        self._found: dict[tuple[str, ...], folds.Fold | None] = {}

    def stage(self, stream: Stream, layer: Layer, names: Sequence[str], gram: Tensor, memo: Memo) -> None:
        with memo.paused():
            fold = self._found[tuple(names)] = folds.find(stream, layer.index, names, self._found.get(tuple(names)))
        if fold is None:
            layer.notes.append(f"The inputs of {', '.join(names)} come from nowhere that a scale could be folded into.")
        else:
            gram = self._fold(layer, names, gram, fold, memo)
        for name in names:
            weight, error = awq.quantize(matrix_of(layer.module.get_submodule(name)).contiguous(), gram, self.settings)
            layer.settle(name, weight)
            layer.errors[name] = error

    def _fold(self, layer: Layer, names: Sequence[str], gram: Tensor, fold: folds.Fold, memo: Memo) -> Tensor:
        """Search the scale, hide it in the producer; the Gram matrix of the scaled inputs."""
        matrices = [matrix_of(layer.module.get_submodule(name)).contiguous() for name in names]
        tie = None if torch.equal(fold.channels, torch.arange(len(gram), device=gram.device)) else fold.channels
        scale = awq.search(matrices, gram, tie, self.settings)
        producer = layer.module.get_submodule(fold.producer)
        fold.scale_producer(layer.module, 1 / fold.of_producer(scale))
        if fold.producer in layer.weights:
            layer.settle(fold.producer, _scaled_rows(layer.weights[fold.producer], 1 / fold.of_producer(scale)))
            memo.renew(producer)
        else:
            round_floats(producer, layer.index)
        for name, matrix in zip(names, matrices):
            set_matrix(layer.module.get_submodule(name), matrix * scale)
        return gram / scale / scale[:, None]

    def head(self, weight: Tensor, gram: Tensor) -> tuple[QWeight, float]:
        return awq.quantize(weight, gram, self.settings)


METHODS = {"gptq": Gptq, "awq": Awq}


def _scaled_rows(weight: QWeight, factor: Tensor) -> QWeight:
    scale = (weight.scale.float() * factor[:, None]).to(torch.float16)
    return QWeight(weight.codes, scale, weight.zero, weight.bias, weight.bits, weight.group, weight.perm)


def quantize_layer(stream: Stream, index: int, options: QuantizeOptions, method: Method) -> Layer:
    """The layer is loaded, quantized, and every window taken through it; it stays loaded with its final weights."""
    layer = Layer(stream.skeleton.load(index), index)
    round_floats(layer.module, index)
    memo = Memo()
    stages = stream.stages(index)
    never = set(linears(layer.module)) - {name for stage in stages for name in stage}
    if never:
        layer.notes.append(f"Never used by the calibration text and left float: {', '.join(sorted(never))}.")
    stacked = [name for name, value in layer.module.named_parameters() if value.ndim == 3]
    if stacked:
        layer.notes.append(f"Experts are kept together in {', '.join(stacked)} and stay in 16 bits.")
    for stage in stages:
        names = [name for name in stage if _packable(layer, name, options)]
        if not names:
            continue
        module = layer.module.get_submodule(names[0])
        gram = Gram(matrix_of(module).shape[1], stream.device)
        stream.watch(index, module, gram.add, memo)
        method.stage(stream, layer, names, gram.finish(), memo)
        layer.blocks.append(names)
        _remember(layer, names, memo)
    stream.advance(index, memo)
    memo.clear()
    return layer


def _packable(layer: Layer, name: str, options: QuantizeOptions) -> bool:
    shape = tuple(matrix_of(layer.module.get_submodule(name)).shape)
    if fits(shape, options.bits):
        return True
    layer.notes.append(f"{name} {list(shape)} does not fill whole words of {options.bits}-bit codes and stays float.")
    return False


def _remember(layer: Layer, names: Sequence[str], memo: Memo) -> None:
    """Keep outputs of what will not change any more: a whole child of the layer once all its matrices are done,
    else the matrices themselves."""
    for child_name, child in layer.module.named_children():
        inside = {f"{child_name}.{name}" for name in linears(child)}
        if inside & set(names) and inside <= layer.weights.keys():
            memo.keep(child)
            names = [name for name in names if name not in inside]
    for name in names:
        memo.keep(layer.module.get_submodule(name))


@torch.no_grad()
def round_floats(module: nn.Module, index: int) -> None:
    """Everything that stays float as a float16 file will hold it. NotSupported where that overflows."""
    for name, value in module.named_parameters():
        rounded = value.to(torch.float16).float()
        if not torch.isfinite(rounded).all():
            raise NotSupported(f"{name} of layer {index} is too large for float16, the type of these files.", tensor=name)
        value.copy_(rounded)
