"""Any causal LM that transformers knows, behind the same `Arch` and `Decoder` as ours.

Packed where the model allows it (its attention goes through transformers' interface, it keeps no other state, and a check at
load shows packed equal to alone), else one sequence at a time. Knows no model family: what a model's attention is gets found
out by watching it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from backends.base import Cancel, LayerKV, LoadError, LocalOptions, ModelDir, NotSupported, Progress, ProgressFn, Vocab
from backends.engine import hf_load, hf_modules, packed
from backends.engine.kv import PAGE, PagedKV
from backends.engine.packable import refusal
from backends.engine.room import UNKNOWN_CONTEXT, plan_room
from backends.engine.runner import PagedDecoder
from backends.engine.sequential import FEEDS, SequentialDecoder
from backends.engine.verify import agree, plain_rows, prompts, served_rows
from backends.estimate import free_memory
from backends.kernels import Batch, KVLayer, Ops

# What a model's own code was seen to raise on a pass it is not made for. It is then served in another way, or refused.
FOREIGN = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, NotImplementedError, AssertionError)


def build_generic(model: ModelDir, source: Any, ops: Ops, options: LocalOptions, vocab: Vocab, progress: ProgressFn,
                  cancel: Cancel) -> GenericArch | SequentialDecoder:
    """A transformers causal LM as an `Arch` for the paged decoder, or else a whole `SequentialDecoder`.

    ``source`` None, or a float safetensors folder: transformers reads the folder itself; else tensors come from the
    `WeightSource`, quantized ones packed by ``ops``. Both results have ``path``, ``notes`` and ``weights_bytes()``.
    Raises NotSupported (no class of transformers' own), LoadError and its kin.
    """
    plain = source is None or _float_folder(model)
    config = hf_load.causal_config(model.config if plain else source.config)
    _quiet(config)
    if plain:
        module, notes = hf_load.load_folder(model.folder, config, ops, progress, cancel)
    else:
        module, notes = hf_load.load_source(source, config, ops, progress, cancel)
    return serve(module, ops.dtype, vocab, options.context, options.streams, progress, cancel, notes,
                 exact=plain and hf_modules.foreign_kernels(module) is not None)


def _float_folder(model: ModelDir) -> bool:
    quantized = "quantization_config" in model.config or "quantize_config.json" in model.files
    return model.path.is_dir() and bool(model.config) and bool(model.ending(".safetensors")) and not quantized


def serve(module: nn.Module, dtype: torch.dtype, vocab: Vocab, context: int, streams: int, progress: ProgressFn,
          cancel: Cancel, notes: Sequence[str] = (), *, exact: bool = True) -> GenericArch | SequentialDecoder:
    """The loaded module behind the best path that passes its check. ``context`` 0: the trained one. ``exact``: its weights
    are float, so that two ways to the same row differ by rounding only."""
    longest = context or trained_context(module.config) or UNKNOWN_CONTEXT
    progress(Progress("check", note="packed against alone"))
    reason = refusal(module, longest)
    if reason is None:
        try:
            return _packed(module, dtype, longest, vocab, tuple(notes), exact)
        except NotSupported as error:
            reason = _words(error)
        except FOREIGN as error:
            reason = f"its code refused a packed pass: {_raised(error)}"
    cancel.raise_if_set("The load")
    module.set_attn_implementation(_own_attention(module))
    return _sequential(module, dtype, context, streams, vocab, (*notes, f"One sequence at a time: {reason}"), exact)


def _words(error: NotSupported) -> str:
    return " ".join((error.cause, *(f"({key}={value})" for key, value in error.evidence.items())))


def _quiet(config: Any) -> None:
    """Training-time outputs off: router logits and the like are never asked for."""
    for part in (config, config.get_text_config(decoder=True)):
        for name in ("output_router_logits", "output_attentions", "output_hidden_states"):
            if getattr(part, name, False):
                setattr(part, name, False)


def trained_context(config: Any) -> int | None:
    text = config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length")
    return next((int(getattr(text, name)) for name in names if getattr(text, name, None)), None)


def _own_attention(module: nn.Module) -> str:
    return "sdpa" if module._supports_sdpa else "eager"


# ---------------------------------------------------------------------------------------------- packed
def _packed(module: nn.Module, dtype: torch.dtype, context: int, vocab: Vocab, notes: tuple[str, ...],
            exact: bool) -> GenericArch:
    """Raises NotSupported, or whatever the model's code raises, where the packed path does not hold."""
    asked = prompts(vocab, context)
    module.set_attn_implementation("eager")
    expected = [plain_rows(module, ids) for ids in asked]
    packed.register()
    arch = GenericArch(module, _watch(module, asked[0], context), notes)
    agree(expected, served_rows(_decoder(arch, vocab, context, dtype), asked), dtype, exact, "packed and alone differ")
    return arch


def _decoder(arch: GenericArch, vocab: Vocab, context: int, dtype: torch.dtype) -> PagedDecoder:
    device = next(arch.module.parameters()).device
    kv = PagedKV(arch.layers, 8, str(dtype).removeprefix("torch."), device)
    return PagedDecoder(arch, kv, vocab, context, device=device, prefixes=False)


class _Watched:
    """What one probe pass shows: the attention calls, and the body: the first module that the causal LM calls."""

    def __init__(self, module: nn.Module, ids: Tensor, positions: Tensor, probe: packed.Probe) -> None:
        self.path, self.arguments, self.output = "", dict[str, Any](), None
        self._names = {id(part): name for name, part in module.named_modules() if name}
        parts = [part for part in module.modules() if part is not module]
        hooks = [part.register_forward_pre_hook(self._before, with_kwargs=True) for part in parts]
        hooks += [part.register_forward_hook(self._after) for part in parts]
        try:
            module(input_ids=ids, position_ids=positions, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        self.calls = tuple(probe.calls)
        given = {"input_ids": ids, "position_ids": positions}
        tensors = {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}
        strange = [name for name, value in tensors.items() if value is not given.get(name)]
        if strange or "input_ids" not in self.arguments or "position_ids" not in self.arguments:
            raise NotSupported("The model prepares its inputs before its body runs.", body=self.path, inputs=strange)

    def _before(self, part: nn.Module, given: tuple, named: dict[str, Any]) -> None:
        if not self.path:
            self.path = self._names[id(part)]
            names = list(inspect.signature(part.forward).parameters)
            self.arguments = {**dict(zip(names, given)), **named}

    def _after(self, part: nn.Module, given: tuple, output: Any) -> None:
        if self._names[id(part)] == self.path:
            self.output = output


@torch.inference_mode()
def _watch(module: nn.Module, ids: Sequence[int], context: int) -> _Watched:
    probe = packed.Probe(context)
    packed.bind(module, probe)
    module.set_attn_implementation(packed.PROBE)
    rows = torch.tensor([list(ids)], device=next(module.parameters()).device)
    watched = _Watched(module, rows, torch.arange(rows.shape[1], device=rows.device)[None], probe)
    if not watched.calls:
        raise NotSupported("The model's attention does not go through transformers' interface.")
    return watched


class _Rows(nn.Module):
    """Stands where the body was and answers with the rows in hand: the model's own head (scales, softcaps) does the rest."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.like, self.rows = like, torch.empty(0)

    def forward(self, *given: Any, **named: Any) -> Any:
        if isinstance(self.like, tuple):
            return (self.rows, *(None for _ in self.like[1:]))
        return self.like(last_hidden_state=self.rows)


def _headed(module: nn.Module, path: str, stand_in: nn.Module) -> nn.Module:
    """A shallow copy of ``module`` with ``stand_in`` at ``path``; every other part is shared."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    name, _, rest = path.partition(".")
    twin._modules[name] = _headed(module._modules[name], rest, stand_in) if rest else stand_in
    return twin


class GenericArch:
    """A transformers causal LM over packed rows and our pages. See `Arch` in docs/architecture.md.

    ``forward`` returns the body's last hidden state: what the model's head (or a pooler) reads, after any final norm.
    """

    path = "generic"
    row_independent: int | None = 0     # vendor matrix products: a row's bits may depend on how many rows there are

    def __init__(self, module: nn.Module, watched: _Watched, notes: Sequence[str] = ()) -> None:
        self.module, self.notes = module, tuple(notes)
        self.parameters, self.kernels = hf_modules.parameters(module), hf_modules.foreign_kernels(module)
        self.layers: tuple[LayerKV, ...] = tuple(call.kv for call in watched.calls)
        output = watched.output
        self.hidden = output[0].shape[-1]
        self._arguments, self._body = watched.arguments, module.get_submodule(watched.path)
        self._pass = packed.Pass(watched.calls)
        self._stand_in = _Rows((None,) * len(output) if isinstance(output, tuple) else type(output))
        self._head = _headed(module, watched.path, self._stand_in)
        packed.bind(module, self._pass)
        module.set_attn_implementation(packed.PAGED)

    def rotation(self, positions: Tensor, last: int, run: bool = False) -> tuple[Tensor, Tensor]:
        """No tables: the model rotates by itself."""
        nothing = torch.empty(0, positions.shape[0], 0, device=positions.device)
        return nothing, nothing

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: Sequence[KVLayer]) -> Tensor:
        """[R, hidden] in the model's type; K and V of the rows are in the pages afterwards."""
        self._pass.begin(batch, kv)
        named = {**self._arguments, "input_ids": batch.ids[None], "position_ids": batch.positions[None]}
        return self._body(**named)[0][0]

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """float32 [W, V] of rows [W, hidden]."""
        self._stand_in.rows = rows[None]
        ids = torch.zeros(1, rows.shape[0], dtype=torch.long, device=rows.device)
        return self._head(input_ids=ids, use_cache=False).logits[0].to(torch.float32)

    def states(self, rows: Tensor) -> Tensor:
        return rows.to(torch.float32)

    def weights_bytes(self) -> int:
        return hf_modules.weights_bytes(self.module)


# ---------------------------------------------------------------------------------------------- one at a time
def _sequential(module: nn.Module, dtype: torch.dtype, context: int, streams: int, vocab: Vocab, notes: tuple[str, ...],
                exact: bool) -> SequentialDecoder:
    """The fastest way to feed the model's cache that gives what the model gives without one."""
    longest = context or trained_context(module.config) or UNKNOWN_CONTEXT
    asked = prompts(vocab, longest)
    failed: list[str] = []
    try:
        expected = [plain_rows(module, ids) for ids in asked]
    except FOREIGN as error:
        raise LoadError("The model cannot run as a causal language model.", reason=_raised(error)) from error
    for feed in FEEDS:
        decoder = SequentialDecoder(module, vocab, longest, longest * len(asked), feed)
        try:
            agree(expected, served_rows(decoder, asked), dtype, exact, f"feeding by {feed} and the plain pass differ")
        except NotSupported as error:
            failed.append(f"Slower feeding: {_words(error)}")
        except FOREIGN as error:
            failed.append(f"Slower feeding: by {feed} its code failed with {_raised(error)}")
        else:
            return _with_room(decoder, asked[0], dtype, context, streams, (*notes, *failed))
    raise LoadError("The model gives different logits for the same tokens however they are fed.", tried="; ".join(failed))


def _with_room(decoder: SequentialDecoder, ids: Sequence[int], dtype: torch.dtype, context: int, streams: int,
               notes: Sequence[str]) -> SequentialDecoder:
    """As many tokens as the memory left takes, by what the model's own cache holds for each. Raises OutOfMemory."""
    trained, device = trained_context(decoder.model.config), next(decoder.model.parameters()).device
    room = plan_room(decoder.measure(ids), str(dtype).removeprefix("torch."), context, trained, streams,
                     free_memory(device.type))
    decoder.context, decoder.room, decoder.notes = room.context, room.pages * PAGE, (*notes, *room.notes)
    return decoder


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
