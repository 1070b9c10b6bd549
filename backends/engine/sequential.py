"""One sequence at a time, with the model's own cache: for models whose sequences cannot share a pass.

Knows: how a transformers module continues from its cache, and how to forget tokens again: by cropping where the cache can,
else by feeding the kept tokens once more. Refuses to know: attention, pages, samplers. No prefix is reused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from backends.base import ContextTooLong, LayerKV, NotSupported, Step, Vocab
from backends.engine import hf_modules
from backends.engine.kv import PAGE

Feed = Literal["chunk", "single", "whole"]
FEEDS: tuple[Feed, ...] = ("chunk", "single", "whole")   # from the fastest to the surest
STATE_NAMES = ("cache", "past_key_values", "cache_params", "state")   # what transformers calls it, newest name first


class SequentialSlot:
    """``length`` tokens are held, logically; ``fed`` of them are in ``state``, the model's own cache."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.state: Any = None
        self.fed = 0
        self.open = True

    @property
    def length(self) -> int:
        return len(self.tokens)


class SequentialDecoder:
    """A `Decoder` over a transformers causal LM. Steps run one after the other, each slot in its own cache.

    feed    "chunk": any number of tokens begin and continue a cache; "single": two or more begin it, one at a time continues
            it; "whole": the cache is no use, every step computes its sequence from the start. Which one holds is found by
            the check at load.
    room    tokens that all slots together may hold
    """

    path = "generic-sequential"
    prefix = drafts = False             # what the engine must not ask for

    def __init__(self, model: nn.Module, vocab: Vocab, context: int, room: int | None = None, feed: Feed = "chunk",
                 notes: Sequence[str] = ()) -> None:
        self.model, self.vocab, self.context, self.feed = model, vocab, context, feed
        self.room = room or context
        self.notes, self.parameters, self.kernels = tuple(notes), hf_modules.parameters(model), hf_modules.foreign_kernels(model)
        parameters = inspect.signature(model.forward).parameters
        self._state_name = next((name for name in STATE_NAMES if name in parameters), None)
        self._keeps = "logits_to_keep" in parameters
        self._device = next(model.parameters()).device
        self._slots: list[SequentialSlot] = []
        self._steps = 0
        if self._state_name is None:
            self.feed = "whole"

    # ------------------------------------------------------------------------------------------ Decoder
    def open(self, tokens: Sequence[int], *, reuse: bool = True) -> SequentialSlot:
        slot = SequentialSlot()
        self._slots.append(slot)
        return slot

    def reserve(self, slot: SequentialSlot, n: int) -> bool:
        self._fits(slot.length + n)
        return self._used() + n <= self.room

    def extend(self, steps: Sequence[Step]) -> list[Tensor]:
        self._steps += 1
        return [self._extend(step.slot, list(step.tokens), step.want) for step in steps]

    def truncate(self, slot: SequentialSlot, length: int) -> None:
        del slot.tokens[length:]
        extra = slot.fed - length
        if extra <= 0:
            return
        if length and _croppable(slot.state):
            slot.state.crop(-extra)
            slot.fed = length
        else:
            slot.state, slot.fed = None, 0       # the kept tokens are fed again when the slot next goes on

    def release(self, slot: SequentialSlot) -> None:
        slot.open, slot.state, slot.fed = False, None, 0
        slot.tokens.clear()
        self._slots = [other for other in self._slots if other is not slot]

    def stats(self) -> Mapping[str, int]:
        total = -(-self.room // PAGE)
        used = sum(-(-slot.length // PAGE) for slot in self._slots)
        return {"pages_total": total, "pages_free": max(0, total - used), "pages_cached": 0, "pages_used": used,
                "page_size": PAGE, "steps": self._steps}

    def close(self) -> None:
        for slot in list(self._slots):
            self.release(slot)

    def weights_bytes(self) -> int:
        return hf_modules.weights_bytes(self.model)

    def measure(self, ids: Sequence[int]) -> tuple[LayerKV, ...]:
        """What the model's cache keeps for each token, layer by layer; () where it grows with no token, or is not used."""
        slot = self.open(ids)
        self.extend([Step(slot, ids, 0)])
        layers = getattr(slot.state, "layers", ())
        self.release(slot)
        held = [(layer.keys, layer.values) for layer in layers if isinstance(getattr(layer, "keys", None), Tensor)]
        return tuple(LayerKV(k.shape[1], k.shape[-1], v.shape[-1]) for k, v in held if k.dim() == 4)

    # ------------------------------------------------------------------------------------------ one slot
    def _used(self) -> int:
        return sum(slot.length for slot in self._slots)

    def _fits(self, length: int) -> None:
        if length > self.context:
            raise ContextTooLong(f"{length} tokens do not fit the context of {self.context}.", tokens=length,
                                 context=self.context)

    def _extend(self, slot: SequentialSlot, tokens: list[int], want: int) -> Tensor:
        self._fits(slot.length + len(tokens))
        slot.tokens += tokens
        uncached = self.feed == "whole" or (self.feed == "single" and slot.length == 1)
        rows = self._whole(slot.tokens, want) if uncached else self._feed(slot, want)
        return rows[:, :self.vocab.size]

    def _feed(self, slot: SequentialSlot, want: int) -> Tensor:
        rows: list[Tensor] = []
        while slot.fed < slot.length:
            one_by_one = self.feed == "single" and slot.fed > 0
            chunk = slot.tokens[slot.fed:slot.fed + 1] if one_by_one else slot.tokens[slot.fed:]
            fed, state = slot.fed, slot.state if slot.fed else self._fresh()
            slot.fed, slot.state = 0, None          # of a pass that fails, with its cache half written, nothing is kept
            logits, slot.state = self._forward(chunk, state, want)
            slot.fed = fed + len(chunk)
            rows.append(logits)
        return torch.cat(rows)[-want:] if want else rows[0][:0]

    def _whole(self, tokens: list[int], want: int) -> Tensor:
        return self._forward(tokens, None, want, cached=False)[0]

    def _fresh(self) -> Any:
        """An empty cache where the model takes transformers' own kind; others make theirs on the first pass."""
        if not self.model._supports_default_dynamic_cache() or self._state_name == "state":
            return None
        from transformers import DynamicCache
        return DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def _forward(self, tokens: list[int], state: Any, want: int, cached: bool = True) -> tuple[Tensor, Any]:
        """float32 logits of the last min(want, len(tokens)) tokens, and the state after them."""
        want = min(want, len(tokens))
        arguments: dict[str, Any] = {"input_ids": torch.tensor([tokens], device=self._device), "use_cache": cached}
        if state is not None:
            arguments[self._state_name] = state
        if self._keeps:
            arguments["logits_to_keep"] = max(want, 1)
        out = self.model(**arguments)
        if cached:
            state = getattr(out, self._state_name, None) or state
            if state is None:
                raise NotSupported("The model returns no cache to continue from.", argument=self._state_name)
        return out.logits[0, out.logits.shape[1] - want:].to(torch.float32), state


def _croppable(state: Any) -> bool:
    """Whether `crop` takes tokens back without a trace. A layer with ``record_past`` (sliding, convolution, recurrent) has
    already dropped what it would need again."""
    return bool(getattr(state, "is_croppable", False)) and not any(hasattr(layer, "record_past") for layer in state.layers)
