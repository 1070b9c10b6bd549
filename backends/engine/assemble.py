"""Weights, kernels, pages and text made into one loaded model. Every local backend's `load` ends here.

It knows which parts there are and in what order they are made; what a file looks like, the backend's source knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from backends import kernels
from backends.base import (
    Cancel, ConfigConflict, LocalOptions, ModelDir, ModelInfo, NotSupported, Progress, ProgressFn, Vocab)
from backends.engine import arch as archs
from backends.engine.kv import PagedKV, bytes_per_token
from backends.engine.process import peak_growth
from backends.engine.room import plan_room
from backends.engine.runner import PagedDecoder
from backends.engine.weights import WeightSource
from backends.estimate import describe, estimate_facts
from backends.kernels import Ops, QWeight
from backends.memory import machine_memory

if TYPE_CHECKING:
    from backends.engine.local import LocalModel
    from backends.engine.text import TextCodec

QUIET = ("rotary_emb.inv_freq", "attention.bias", "masked_bias")      # buffers of old checkpoints that are recomputed anyway


def assemble(model: ModelDir, backend: str, format: str, source: WeightSource, text: Callable[[], TextCodec],
             options: LocalOptions, progress: ProgressFn, cancel: Cancel, notes: Iterable[str] = ()) -> LocalModel:
    """A model ready to generate. Closes ``source``, also when it fails. ``text`` makes the codec; it is called while weights
    are still on their way where the target reads them on threads of its own. ``notes`` are read last.

    Raises what the source raises, and ConfigConflict, OutOfMemory, NotSupported, MissingRequirement, Cancelled.
    """
    from backends.engine.local import LocalModel
    began = time.monotonic()
    try:
        facts = describe(model)
        expected = estimate_facts(facts, options)
        with peak_growth() as peak:
            made, codec = _make(model, source, text, options, progress, cancel)
    finally:
        source.close()
    made = made if made.parameters else replace(made, parameters=facts.parameters)       # the generic path reads by itself
    info = replace(_info(model, source.config, options, made, codec), backend=backend, format=format, estimate=expected,
                   notes=(*notes, *made.notes), peak_bytes=peak[0], load_seconds=time.monotonic() - began)
    return LocalModel(info, made.decoder, codec)


@dataclass(frozen=True)
class _Made:
    decoder: Any
    ops: Ops
    path: str
    weights_bytes: int
    parameters: int
    trained: int | None
    kv_type: str
    kv_bytes: int | None
    lossless: bool
    capabilities: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def kernels(self) -> str:
        """A transformers module with float weights uses none of ours, and says so."""
        own = getattr(getattr(self.decoder, "arch", self.decoder), "kernels", None)
        return own or f"{self.ops.name} {self.ops.detail}".strip()


def _make(model: ModelDir, source: WeightSource, text: Callable[[], TextCodec], options: LocalOptions, progress: ProgressFn,
          cancel: Cancel) -> tuple[_Made, TextCodec]:
    ops, passed = kernels.choose(options.kernels, options.device, _dtype(source.config, options.dtype), options.threads,
                                 options.activations)
    watched = Watched(source, progress, cancel)
    with _loading(ops):
        built = archs.build(watched, ops, _quiet, cancel)
        codec = text()
        vocab = codec.vocab
    cancel.raise_if_set("The load")
    if built is None:
        return _generic(model, watched, ops, vocab, options, passed, progress, cancel), codec
    vocab, notes = fit_vocab(vocab, built.plan.vocab)
    notes = (*passed, *ops.notes, *notes, *watched.unused())
    return _paged(built, watched, ops, vocab, options, "fused", notes), codec


def _loading(ops: Ops) -> AbstractContextManager[None]:
    return ops.loading() if hasattr(ops, "loading") else nullcontext()


def _generic(model: ModelDir, source: Watched, ops: Ops, vocab: Vocab, options: LocalOptions, passed: tuple[str, ...],
             progress: ProgressFn, cancel: Cancel) -> _Made:
    """transformers' own module, packed where it can be, else one sequence at a time."""
    from backends.engine.arch.generic import build_generic
    why = f"Generic path: {archs.plan(source.config)[1]}"
    rows = source.config.get("vocab_size")
    vocab, notes = fit_vocab(vocab, rows) if rows else (vocab, ())
    built = build_generic(model, source, ops, options, vocab, progress, cancel)
    notes = (why, *passed, *ops.notes, *notes, *built.notes)
    if built.path == "generic":
        return _paged(built, source, ops, vocab, options, built.path, notes)
    return _Made(built, ops, built.path, built.weights_bytes(), getattr(built, "parameters", source.parameters),
                 trained_context(source.config), "", None, False, ("logprobs",), notes)


def _paged(built: archs.Arch, source: Watched, ops: Ops, vocab: Vocab, options: LocalOptions, path: str,
           notes: tuple[str, ...]) -> _Made:
    kv_type, trained = _kv_type(options, ops, source.config), trained_context(source.config)
    room = plan_room(built.layers, kv_type, options.context, trained, options.streams, _free(ops.device))
    decoder = PagedDecoder(built, PagedKV(built.layers, room.pages, kv_type, ops.device), vocab, room.context,
                           device=ops.device, prefixes=options.prefix_cache)
    independent = getattr(built, "row_independent", ops.row_independent)
    capabilities = ("batch", "draft", "embeddings", "logprobs", *(("prefix",) if options.prefix_cache else ()),
                    *(("states",) if path == "fused" else ()))
    if getattr(built, "reads_states", False):
        capabilities = ("draft", "reads states")
    return _Made(decoder, ops, path, built.weights_bytes(), getattr(built, "parameters", source.parameters), trained,
                 kv_type, bytes_per_token(built.layers, kv_type), independent is None, capabilities, (*notes, *room.notes))


def _quiet(_: Progress) -> None:
    """Progress by layer is coarser than that by tensor, and would make the bar jump."""


# ---------------------------------------------------------------------------------------------- choices
def check_options(model: ModelDir, options: LocalOptions) -> None:
    """Raises what `assemble` would raise about device, kernels, types and threads: MissingRequirement, InvalidRequest,
    NotSupported. Reads no weight, and leaves torch's threads as other models have them. Room is the estimate's business."""
    threads = torch.get_num_threads()
    try:
        ops, _ = kernels.choose(options.kernels, options.device, _dtype(model.config, options.dtype), options.threads,
                                options.activations)
        _kv_type(options, ops, model.config)
    finally:
        torch.set_num_threads(threads)


def _dtype(config: Mapping[str, Any], asked: str) -> str:
    """Weights that are stored as float32 are computed in float32 unless told otherwise; else the kernels choose."""
    if asked != "auto":
        return asked
    stored = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return "float32" if stored == "float32" and "quantization_config" not in config else "auto"


def _kv_type(options: LocalOptions, ops: Ops, config: Mapping[str, Any]) -> str:
    """"auto" is the kernels' favourite, except that whoever computes in float32 gets a cache in float32 too."""
    if options.kv_type == "auto":
        return "float32" if _dtype(config, options.dtype) == "float32" and "float32" in ops.kv_types else ops.kv_types[0]
    if options.kv_type not in ops.kv_types:
        raise NotSupported(f"The {ops.name} kernels cannot keep the KV cache as {options.kv_type}.", kv_type=options.kv_type,
                           known=", ".join(ops.kv_types))
    return options.kv_type


def _free(device: torch.device) -> int:
    """Bytes left on the device now that the weights are there, with what torch's allocator holds for nothing."""
    if device.type != "cuda":
        return machine_memory()[1]
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def trained_context(config: Mapping[str, Any]) -> int | None:
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx"):
            if part.get(key):
                return int(part[key])
    return None


def fit_vocab(vocab: Vocab, rows: int) -> tuple[Vocab, tuple[str, ...]]:
    """The tokenizer's ids that the model has rows for. Raises ConfigConflict where an end-of-text id is not among them."""
    if vocab.size <= rows:
        return vocab, ()
    if vocab.eos_ids and not any(token < rows for token in vocab.eos_ids):
        raise ConfigConflict("The tokenizer does not belong to this model: its end of text has no row in the embeddings.",
                             tokenizer=vocab.size, embeddings=rows)
    note = f"The tokenizer knows {vocab.size} tokens, the model only the first {rows}; the others cannot be used"
    return replace(vocab, size=rows, eos_ids=frozenset(token for token in vocab.eos_ids if token < rows)), (note,)


def _info(model: ModelDir, config: Mapping[str, Any], options: LocalOptions, made: _Made, text: TextCodec) -> ModelInfo:
    vocab, hidden = made.decoder.vocab, getattr(getattr(made.decoder, "arch", None), "hidden", None)
    architecture = (config.get("architectures") or [config.get("model_type") or ""])[0]
    return ModelInfo(
        model.name, "", "", architecture, made.path, made.kernels, str(made.ops.device),
        str(made.ops.dtype).removeprefix("torch."), made.weights_bytes * 8 / made.parameters if made.parameters else None,
        made.parameters or None, made.decoder.context, made.trained, hidden, vocab.size, vocab.fingerprint,
        tuple(sorted(vocab.eos_ids)),
        getattr(text, "template", None) is not None, made.kv_type, made.kv_bytes, options.streams, torch.get_num_threads(),
        made.weights_bytes, revision=model.manifest.get("revision"), lossless=made.lossless, capabilities=made.capabilities,
        options=tuple(asdict(options).items()))


# ---------------------------------------------------------------------------------------------- the source, watched
class Watched:
    """A source that reports progress by tensor, stops when told to, and remembers what was never asked for."""

    def __init__(self, source: WeightSource, progress: ProgressFn, cancel: Cancel) -> None:
        self._source, self._progress, self._cancel = source, progress, cancel
        self.config = source.config
        self._left = set(source.names())
        self._total = len(self._left)
        self._of: dict[str, set[str]] = {}
        for name in self._left:
            self._of.setdefault(name.rpartition(".")[0], set()).add(name)
        self.parameters = 0

    def names(self) -> Collection[str]:
        return self._source.names()

    def tensor(self, name: str) -> Tensor:
        self._step({name})
        found = self._source.tensor(name)
        self.parameters += found.numel()
        return found

    def linear(self, module: str) -> tuple[QWeight | Tensor, Tensor | None]:
        self._step(self._of.get(module, set()))
        weight, bias = self._source.linear(module)
        rows, columns = weight.shape
        self.parameters += rows * columns + (0 if bias is None else bias.numel())
        return weight, bias

    def close(self) -> None:
        self._source.close()

    def unused(self) -> tuple[str, ...]:
        """A note on tensors that the model has no place for, as transformers would ignore them too."""
        left = sorted(name for name in self._left if not name.endswith(QUIET))
        if not left:
            return ()
        return (f"{len(left)} tensors of the file are not used: {', '.join(left[:4])}{' …' if len(left) > 4 else ''}",)

    def _step(self, names: set[str]) -> None:
        self._cancel.raise_if_set("The load")
        self._left -= names
        done = self._total - len(self._left)
        self._progress(Progress("read", done, self._total, next(iter(sorted(names)), "")))
