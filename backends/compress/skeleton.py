"""A transformers model whose decoder layers come and go: what is outside them is in memory, a layer while it is worked on.

Knows how a causal LM is put together and how its tensors come from a `WeightSource`. Knows nothing of rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from backends.base import BrokenFile, ConfigConflict, NotSupported
from backends.engine.hf_load import causal_config
from backends.engine.weights import WeightSource


class Skeleton:
    """``model``: the module, without memory until `fill`; its layers on the meta device until `load`.
    ``layers``: them; ``prefix``: their path, "model.layers".

    Raises NotSupported where the decoder layers cannot be told apart."""

    def __init__(self, source: WeightSource, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM
        self.source, self.device = source, device
        self.config = causal_config(source.config)
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        self.model.eval().requires_grad_(False)
        self.prefix, self.layers = _layers(self.model)
        self._names = _Names(source.names(), self.model.base_model_prefix)

    def missing(self) -> list[str]:
        """Tensors of the model that the source has under no name that we know."""
        tied = self.model.all_tied_weights_keys
        return [name for name, _, _ in self._wanted(self.model, "") if self._names.get(name) is None and name not in tied]

    def fill(self) -> None:
        """Read everything that belongs to no layer. BrokenFile naming tensors that the source lacks."""
        if missing := self.missing():
            raise BrokenFile(f"{len(missing)} tensors of the model are missing, or its file names them in a way of its own.",
                             first=", ".join(missing[:4]))
        self._fill(self.model, "", skip=self.prefix + ".")
        self._finish()

    def sizes(self) -> tuple[int, int, int]:
        """Numbers of weights: outside the layers (a shared matrix once), in all layers, in the largest one."""
        every = {id(tensor): tensor.numel() for tensor in self.model.parameters()}
        inside = [sum(tensor.numel() for tensor in layer.parameters()) for layer in self.layers]
        twice = self.tied and self.head.weight is not self.model.get_input_embeddings().weight     # not tied yet on meta
        tied = self.head.weight.numel() if twice else 0
        return sum(every.values()) - sum(inside) - tied, sum(inside), max(inside)

    @property
    def tied(self) -> bool:
        """Does the head share the embedding's matrix?"""
        return self.head is not None and self.path(self.head) + ".weight" in self.model.all_tied_weights_keys

    @property
    def head(self) -> nn.Module | None:
        return self.model.get_output_embeddings()

    def path(self, module: nn.Module) -> str:
        return next(name for name, found in self.model.named_modules() if found is module)

    def layer_path(self, index: int) -> str:
        return f"{self.prefix}.{index}"

    def load(self, index: int) -> nn.Module:
        """The layer's own weights, as the source has them, in float32."""
        layer = self.layers[index]
        self._fill(layer, self.layer_path(index) + ".")
        return layer

    def put(self, index: int, values: Mapping[str, Tensor]) -> nn.Module:
        """The layer with these tensors (names as in the model); what is not given comes from the source."""
        layer = self.load(index)
        for name, value in values.items():
            layer.get_parameter(name.removeprefix(self.layer_path(index) + ".")).copy_(value)
        return layer

    def drop(self, index: int) -> None:
        """Give the layer's memory back; buffers that are computed stay, since nobody would compute them again."""
        for _, owner, leaf in list(self._wanted(self.layers[index], "")):
            if leaf in owner._parameters:
                owner._parameters[leaf] = nn.Parameter(owner._parameters[leaf].to("meta"), requires_grad=False)
            else:
                owner._buffers[leaf] = owner._buffers[leaf].to("meta")

    # ---- filling
    def _wanted(self, root: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str]]:
        """(full name, owner, leaf) of parameters and of buffers that are stored."""
        for path, module in root.named_modules():
            full = prefix + path + ("." if path else "")
            for leaf in module._parameters:
                if module._parameters[leaf] is not None:
                    yield full + leaf, module, leaf
            for leaf in module._buffers:
                if module._buffers[leaf] is not None and leaf not in module._non_persistent_buffers_set:
                    yield full + leaf, module, leaf

    def _fill(self, root: nn.Module, prefix: str, skip: str = "\0") -> None:
        for name, owner, leaf in list(self._wanted(root, prefix)):
            if name.startswith(skip) or self._names.get(name) is None:
                continue
            value = self._read(name, owner._parameters.get(leaf, owner._buffers.get(leaf)))
            if leaf in owner._parameters:
                owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
            else:
                owner._buffers[leaf] = value
            value = owner._parameters.get(leaf, owner._buffers.get(leaf))
            value._is_hf_initialized = True

    def _read(self, name: str, place: Tensor) -> Tensor:
        value = self.source.tensor(self._names.get(name))
        if tuple(value.shape) != tuple(place.shape):
            raise ConfigConflict("A tensor has not the shape that the config gives.", tensor=name, file=tuple(value.shape),
                                 config=tuple(place.shape))
        return value.to(self.device, torch.float32 if value.is_floating_point() else value.dtype, copy=True)

    def _finish(self) -> None:
        """Buffers that are computed, not stored (rotation tables), and tied weights: transformers' own steps."""
        for tensor in self.model.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True
        self.model._move_missing_keys_from_meta_to_device(set(), None, None, None)
        self.model._initialize_missing_keys(False)
        self.model.tie_weights(recompute_mapping=False)
        for module in self.model.modules():
            for leaf, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[leaf] = buffer.to(self.device)


class _Names:
    """Name in the model → name in the source: the same, or with or without the base model's prefix."""

    def __init__(self, names, base: str) -> None:
        self._known, self._base = set(names), base + "."

    def get(self, name: str) -> str | None:
        for candidate in (name, name.removeprefix(self._base), self._base + name):
            if candidate in self._known:
                return candidate
        return None


def _layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers: the outermost ModuleList with as many entries as the config has layers."""
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
             and len(module) == count]
    if not found:
        raise NotSupported(f"The decoder layers of {type(model).__name__} cannot be told apart.", layers=count,
                           remedy="Choose a model with a plain stack of decoder layers.")
    return min(found, key=lambda item: item[0].count("."))


# ---------------------------------------------------------------------------------------------- matrices of a layer
def matrix_of(module: nn.Module) -> Tensor | None:
    """[N, K] of a layer that is a plain product with one matrix; None for every other layer. A view where the module keeps
    it the other way round."""
    from transformers.pytorch_utils import Conv1D
    if type(module) is nn.Linear:
        return module.weight
    return module.weight.T if type(module) is Conv1D else None


def set_matrix(module: nn.Module, value: Tensor) -> None:
    matrix_of(module).copy_(value)


def linears(root: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in root.named_modules() if name and matrix_of(module) is not None}

