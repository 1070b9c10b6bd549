"""Transformers modules from a folder, or from a stream of tensors whose quantized matrices stay packed.

Knows: how to build a causal LM that transformers has a class for, and what may be missing or left over. Never runs code that
comes with a checkpoint, never reads pickles, never goes to the network.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backends.base import BrokenFile, Cancel, ConfigConflict, LoadError, NotSupported, Progress, ProgressFn, UnsafeFile
from backends.engine.hf_modules import NARROW, PackedEmbedding, PackedLinear, foreign_kernels, pack_floats, plain_shape
from backends.engine.weights import WeightSource
from backends.kernels import Ops, QWeight

Loaded = tuple[nn.Module, tuple[str, ...]]      # the model and notes


# ---------------------------------------------------------------------------------------------- what can be loaded
def causal_config(config: Mapping[str, Any]) -> Any:
    """The transformers config of a causal LM. Raises NotSupported where transformers has no class of its own for it."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        own = " It brings its own code, which Gainz does not run." if "auto_map" in config else ""
        raise NotSupported(f"The installed transformers does not know the model type {kind!r}.{own}", model_type=kind,
                           remedy="Use a conversion of this model to a type that transformers knows, or its GGUF file.")
    built = CONFIG_MAPPING[kind].from_dict({key: value for key, value in config.items() if key != "quantization_config"})
    if type(built) not in AutoModelForCausalLM._model_mapping.keys():
        raise NotSupported(f"Models of type {kind!r} are not causal language models.", model_type=kind,
                           remedy="Choose a text-generation model.")
    return built


def load_folder(folder: Path, config: Any, ops: Ops, progress: ProgressFn, cancel: Cancel) -> Loaded:
    """The model of a float safetensors folder, and notes. Raises LoadError and its kin.

    A target that keeps float matrices in a type of their own (`Ops.weight_dtype`) packs those of plain layers; the rest is
    in the type that the target computes in."""
    model, notes = _from_folder(folder, config, ops.weight_dtype or "auto", progress, cancel)
    if ops.weight_dtype != ops.dtype:
        notes += pack_floats(model, ops)
        if foreign_kernels(model) is None and not _runs(model):
            model, notes = _from_folder(folder, config, ops.dtype, progress, cancel)
            kind = str(ops.dtype).removeprefix("torch.")
            notes += (f"All weights are held in {kind}: the model's code reads its matrices by itself.",)
    return _ready(model, ops), notes


@torch.inference_mode()
def _runs(model: nn.Module) -> bool:
    """Does a short pass go through? Code that reaches for the weights of packed layers fails at once."""
    try:
        model.eval()(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
        return True
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
        return False


def _from_folder(folder: Path, config: Any, dtype: torch.dtype | str, progress: ProgressFn, cancel: Cancel) -> Loaded:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    if not any(folder.glob("*.safetensors")):
        raise UnsafeFile("The folder holds no *.safetensors file.", folder=folder.name)
    progress(Progress("read", note=f"transformers, {config.model_type}"))
    try:
        with _no_bars():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, config=copy.deepcopy(config), dtype=dtype, local_files_only=True, trust_remote_code=False,
                use_safetensors=True, output_loading_info=True)
    except SafetensorError as error:
        raise BrokenFile("A weight file cannot be read.", folder=folder.name, reason=error) from error
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:     # documented by transformers, or seen
        raise LoadError("transformers could not load the folder.", folder=folder.name, reason=_first_line(error)) from error
    cancel.raise_if_set("The load")
    _refuse_missing(report["missing_keys"], folder.name)
    return model, _left_over(report["unexpected_keys"])


@contextmanager
def _no_bars() -> Iterator[None]:
    """Progress is ours to show; transformers would draw its own into the log."""
    from transformers.utils import logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _refuse_missing(names: Any, where: str) -> None:
    if names:
        first = ", ".join(sorted(map(str, names))[:4])
        raise BrokenFile(f"{len(names)} tensors of the model are missing.", first=first, where=where)


def _left_over(names: Any) -> tuple[str, ...]:
    shown = ", ".join(sorted(map(str, names))[:3])
    return (f"{len(names)} tensors in the file are not part of the model and were not read: {shown} …",) if names else ()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _ready(model: nn.Module, ops: Ops) -> nn.Module:
    return model.to(ops.device).eval().requires_grad_(False)


# ---------------------------------------------------------------------------------------------- from a source
def load_source(source: WeightSource, config: Any, ops: Ops, progress: ProgressFn, cancel: Cancel) -> Loaded:
    """The model of a `WeightSource`: quantized matrices packed, everything else in the target's type. Raises BrokenFile for
    missing tensors, ConfigConflict for shapes that the config does not give, UnsupportedTensor."""
    from transformers import AutoModelForCausalLM
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=ops.dtype)
    return _Filler(model, source, ops, progress, cancel).fill()


EXPERTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}


class _Filler:
    def __init__(self, model: nn.Module, source: WeightSource, ops: Ops, progress: ProgressFn, cancel: Cancel) -> None:
        self.model, self.source, self.ops, self.progress, self.cancel = model, source, ops, progress, cancel
        self.names = set(source.names())
        self.taken: set[str] = set()
        self.packed: dict[str, Any] = {}
        self.dense = self.dense_experts = 0

    def fill(self) -> Loaded:
        tied = self.model.all_tied_weights_keys
        self._pack_matrices()
        wanted = [(name, tensor) for name, tensor in self.model.state_dict(keep_vars=True).items() if tensor.is_meta]
        missing = []
        for done, (name, tensor) in enumerate(wanted):
            self.cancel.raise_if_set("The load")
            self.progress(Progress("read", done, len(wanted), name))
            value = self._value(name)
            if value is not None:
                self._put(name, tensor, value)
            elif name not in tied:
                missing.append(name)
        _refuse_missing(missing, "model file")
        self._finish()
        return _ready(self.model, self.ops), self._notes()

    def _pack_matrices(self) -> None:
        for name, module in list(self.model.named_modules()):
            shape = plain_shape(module)
            if shape is not None and any(key.startswith(name + ".") for key in self.names):
                self.cancel.raise_if_set("The load")
                self._pack(name, shape, isinstance(module, nn.Embedding))
        self._share_tied()

    def _pack(self, name: str, shape: tuple[int, int], embedding: bool) -> None:
        weight, bias = self.source.linear(name)
        narrow = not isinstance(weight, QWeight) and weight.dtype in NARROW and self.ops.weight_dtype != self.ops.dtype
        if not isinstance(weight, QWeight) and not narrow:
            return
        if tuple(weight.shape) != shape:
            raise ConfigConflict("A matrix has not the shape that the config gives.", tensor=name, file=weight.shape,
                                 config=shape)
        matrix = self.ops.pack(weight, bias)
        layer = PackedEmbedding(self.ops, matrix) if embedding else PackedLinear(self.ops, matrix, bias is not None)
        self._replace(name, layer)

    def _share_tied(self) -> None:
        """A head without a matrix of its own uses the packed embedding's. Either may be the one that is stored."""
        for target, origin in self.model.all_tied_weights_keys.items():
            one, two = target.removesuffix(".weight"), origin.removesuffix(".weight")
            if (one in self.packed) != (two in self.packed):
                stored, other = (one, two) if one in self.packed else (two, one)
                embedding = isinstance(self.model.get_submodule(other), nn.Embedding)
                shared = self.packed[stored].matrix
                self._replace(other, PackedEmbedding(self.ops, shared) if embedding else PackedLinear(self.ops, shared))

    def _replace(self, name: str, module: nn.Module) -> None:
        self.model.set_submodule(name, module)
        self.packed[name] = module
        self.taken |= {key for key in self.names if key.startswith(name + ".")}

    def _value(self, name: str) -> Tensor | None:
        if name in self.names:
            self.taken.add(name)
            return self.source.tensor(name)
        module, _, leaf = name.rpartition(".")
        stored = any(key.startswith(module + ".") and not key.endswith(".bias") for key in self.names)
        if leaf == "weight" and stored and isinstance(self.model.get_submodule(module), nn.Linear):
            self.dense += 1                     # a layer with a way of its own: it needs the matrix itself
            return self._dense(module)
        return self._experts(name)

    def _experts(self, name: str) -> Tensor | None:
        """transformers keeps a layer's experts in one tensor [E, …]; files keep them one by one."""
        base, _, last = name.rpartition(".")
        for projections in EXPERTS.get(last, ()):
            if any(key.startswith(f"{base}.0.{projections[0]}.") for key in self.names):
                count = len({key[len(base) + 1:].split(".")[0] for key in self.names if key.startswith(base + ".")})
                self.dense_experts += 1
                return torch.stack([torch.cat([self._dense(f"{base}.{e}.{p}") for p in projections]) for e in range(count)])
        return None

    def _dense(self, module: str) -> Tensor:
        weight, _ = self.source.linear(module)       # a bias is a tensor of its own in the model, and is asked for as such
        self.taken |= {key for key in self.names if key.startswith(module + ".") and not key.endswith(".bias")}
        return weight.dequantize(self.ops.dtype) if isinstance(weight, QWeight) else weight.to(self.ops.dtype)

    def _put(self, name: str, tensor: Tensor, value: Tensor) -> None:
        if tuple(value.shape) != tuple(tensor.shape):
            raise ConfigConflict("A tensor has not the shape that the config gives.", tensor=name, file=tuple(value.shape),
                                 config=tuple(tensor.shape))
        module, _, leaf = name.rpartition(".")
        owner = self.model.get_submodule(module)
        value = value.to(tensor.dtype).contiguous()
        value._is_hf_initialized = True
        if leaf in owner._parameters:
            value = nn.Parameter(value, requires_grad=False)
            value._is_hf_initialized = True     # transformers must not draw it anew
            owner._parameters[leaf] = value
        else:
            owner._buffers[leaf] = value

    def _finish(self) -> None:
        """Buffers that are computed, not stored (rotation tables), and tied weights: transformers' own steps."""
        self.model._move_missing_keys_from_meta_to_device(set(), None, None, None)
        self.model._initialize_missing_keys(False)
        tied = {target: origin for target, origin in self.model.all_tied_weights_keys.items()
                if not {target.removesuffix(".weight"), origin.removesuffix(".weight")} & self.packed.keys()}
        self.model.all_tied_weights_keys = tied
        self.model.tie_weights(recompute_mapping=False)
        left = [name for name, tensor in self.model.state_dict(keep_vars=True).items() if tensor.is_meta]
        _refuse_missing(left, "model file")

    def _notes(self) -> tuple[str, ...]:
        notes, kind = _left_over(self.names - self.taken), str(self.ops.dtype).removeprefix("torch.")
        if self.dense_experts:
            notes += (f"The experts of {self.dense_experts // 2} layers are held in {kind}, not quantized.",)
        if self.dense:
            notes += (f"{self.dense} quantized matrices are held in {kind}: their layers are not plain linear ones.",)
        return notes
