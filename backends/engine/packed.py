"""Attention of a transformers module over our pages: the one function we put into transformers' attention interface.

Knows: packed ragged rows, KV pages, and how to find out what each attention call of a model is (heads, widths, window) by
watching one probe pass. The call's context lives on the model's own modules, so that two models never share one.
Refuses to know: model families, how a model is loaded, who hands out pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backends.base import LayerKV, NotSupported
from backends.kernels import Batch, KVLayer
from backends.kernels.ref import load_pages, store_rows

Given = dict[str, Any]                          # keyword arguments of an attention call
PAGED, PROBE = "gainz_paged", "gainz_probe"     # names in transformers' tables; only PROBE has masks built for it
CONTEXT = "gainz_attention"                     # attribute on every module of a model: who answers its attention calls
HONOURED = frozenset({"scaling", "softcap", "s_aux"})
# Fixed by the batch (positions), by the mask's rule (window, causality), or without effect in inference.
NEEDLESS = frozenset({"dropout", "is_causal", "sliding_window", "position_ids", "use_cache", "output_attentions",
                      "output_hidden_states", "return_dict", "cache_position", "layer_idx", "deterministic"})


class Answers(Protocol):
    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, given: Given) -> Tensor:
        """q [1, heads, R, key width], k, v [1, kv_heads, R, key or value width] → [1, R, heads, value width]."""


def register() -> None:
    """Put our two names into transformers' tables; harmless when repeated."""
    from transformers import AttentionInterface, AttentionMaskInterface
    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(PROBE, _attend)
    AttentionMaskInterface.register(PROBE, _rule_mask)


def bind(model: nn.Module, context: Answers | None) -> None:
    for module in model.modules():
        setattr(module, CONTEXT, context)


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
            **given: Any) -> tuple[Tensor, None]:
    return getattr(module, CONTEXT).attend(module, query, key, value, attention_mask, given), None


# ------------------------------------------------------------------------------------------ what a model's attention is
class RuleMask(Tensor):
    """A probe's mask that still carries the rule it was made from: (batch, head, q, kv) -> visible."""

    rule: Any = None


def _rule_mask(batch_size: int, q_length: int, kv_length: int, mask_function: Any, device: Any = "cpu", **_: Any) -> Tensor:
    q, kv = torch.arange(q_length, device=device)[:, None], torch.arange(kv_length, device=device)[None]
    mask = mask_function(torch.zeros((), dtype=torch.long, device=device), 0, q, kv).expand(1, 1, q_length, kv_length)
    mask = mask.as_subclass(RuleMask)
    mask.rule = mask_function
    return mask


def window_of(rule: Any, reach: int) -> int | None:
    """The sliding window of a mask rule, None for plain causal. Raises NotSupported for any other rule (chunks, blocks).
    Rows up to ``reach`` tokens are looked at."""
    first = torch.zeros((), dtype=torch.long)
    seen = lambda q: rule(first, 0, torch.tensor(q), torch.arange(q + 2)).expand(q + 2)  # noqa: E731
    last = max(reach - 1, 1)
    window = int(seen(last).sum())
    window = None if window == last + 1 else window
    near = () if window is None else (window - 1, window, window + 1, 2 * window + 1)
    for q in {0, 1, 2, 3, last // 3, last // 2, last, *near}:
        if 0 <= q <= last:
            kv = torch.arange(q + 2)
            expected = (kv <= q) if window is None else (kv <= q) & (kv > q - window)
            if not torch.equal(seen(q).to(torch.bool), expected):
                raise NotSupported("A layer's mask is neither causal nor a sliding window.", row=q, window=window)
    return window


@dataclass(frozen=True)
class Call:
    """One attention call of a pass, in the order in which the model makes them."""

    module: nn.Module
    heads: int
    kv: LayerKV


class Probe:
    """Answers a single sequence's calls with plain attention, and notes what they were. Raises NotSupported where a call
    asks for something that pages cannot give. ``reach``: tokens up to which a mask is examined."""

    def __init__(self, reach: int) -> None:
        self.reach, self.calls = reach, list[Call]()
        self._windows: dict[int, tuple[Any, int | None]] = {}

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, given: Given) -> Tensor:
        asked = {name for name, value in given.items() if value is not None and value is not False}
        if unknown := sorted(asked - HONOURED - NEEDLESS):
            raise NotSupported("The model's attention takes arguments that ours does not honour.", arguments=unknown)
        if k.shape[2] != q.shape[2] or q.shape[0] != 1:
            raise NotSupported("A layer attends to something other than its own tokens.", queries=tuple(q.shape),
                               keys=tuple(k.shape))
        if mask is None and given.get("is_causal") is False:
            raise NotSupported("A layer attends to later tokens too.")
        self.calls.append(Call(module, q.shape[1], LayerKV(k.shape[1], k.shape[3], v.shape[3], self._window(mask))))
        rows = torch.arange(q.shape[2], device=q.device)
        out = attention(q[0], k[0], v[0], rows, rows, self.calls[-1].kv.window, _arguments(q, given))
        return out.transpose(0, 1)[None]

    def _window(self, mask: Tensor | None) -> int | None:
        if mask is None:
            return None                        # none built: causal, as the check against the model's own attention confirms
        rule = getattr(mask, "rule", None)
        if rule is None:
            raise NotSupported("The model builds its attention mask itself.", shape=tuple(mask.shape))
        if id(rule) not in self._windows:
            self._windows[id(rule)] = rule, window_of(rule, self.reach)
        return self._windows[id(rule)][1]


# ------------------------------------------------------------------------------------------ over pages
class Pass:
    """Answers the calls of packed passes: writes K and V into the pages, reads them back. One object a model."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)
        self._next = 0

    def begin(self, batch: Batch, kv: Sequence[KVLayer]) -> None:
        self._batch, self._kv, self._next = batch, kv, 0
        starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
        self._spans = [(first, end, length) for first, end, length in zip(starts, starts[1:], lengths)]

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, given: Given) -> Tensor:
        call, pages = self.calls[self._next], self._kv[self._next]
        assert call.module is module, "the model made its attention calls in another order than in the probe"
        self._next += 1
        store_rows(pages.k, self._batch.slots, k[0].transpose(0, 1).to(torch.float32), pages.k_scale, pages.k_low)
        store_rows(pages.v, self._batch.slots, v[0].transpose(0, 1).to(torch.float32), pages.v_scale, pages.v_low)
        arguments = _arguments(q, given)
        out = q.new_empty(q.shape[2], q.shape[1], v.shape[3])
        for s, (first, end, length) in enumerate(self._spans):
            if end > first:
                out[first:end] = self._sequence(s, q[0, :, first:end], length, pages, call.kv.window, arguments)
        return out[None]

    def _sequence(self, s: int, q: Tensor, length: int, pages: KVLayer, window: int | None, arguments: Arguments) -> Tensor:
        """q [heads, n, width] of one sequence with ``length`` tokens in the cache → [n, heads, value_width]."""
        size, n = pages.k.shape[2], q.shape[1]
        first_page = 0 if window is None else max(0, length - n - window + 1) // size
        table = self._batch.pages[s:s + 1, first_page:-(-length // size)].long()
        k = load_pages(pages.k, table, pages.k_scale, pages.k_low)[0].flatten(1, 2)
        v = load_pages(pages.v, table, pages.v_scale, pages.v_low)[0].flatten(1, 2)
        k, v = (part[:, :length - first_page * size].to(q.dtype) for part in (k, v))
        rows = torch.arange(length - n, length, device=q.device)
        columns = torch.arange(first_page * size, length, device=q.device)
        return attention(q, k, v, rows, columns, window, arguments).transpose(0, 1)


@dataclass(frozen=True)
class Arguments:
    scale: float
    softcap: float | None
    sinks: Tensor | None                # float [heads]: a logit per head that takes part in the softmax and has no value


def _arguments(q: Tensor, given: dict[str, Any]) -> Arguments:
    scale = given.get("scaling")
    return Arguments(q.shape[-1] ** -0.5 if scale is None else float(scale), given.get("softcap"), given.get("s_aux"))


def attention(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, window: int | None,
              arguments: Arguments) -> Tensor:
    """Causal attention of one sequence, grouped heads.

    q [heads, n, width], k [kv_heads, L, width], v [kv_heads, L, value_width]; rows [n] and columns [L] are positions.
    Returns [heads, n, value_width]. Scores are float32 where a softcap or sinks need them by hand.
    """
    heads, n, width = q.shape
    groups = heads // k.shape[0]
    mask = columns <= rows[:, None]
    if window is not None:
        mask &= columns > rows[:, None] - window
    grouped = q.reshape(k.shape[0], groups * n, width)      # query heads of one KV head become rows: K is never repeated
    mask = mask.repeat(groups, 1)
    if arguments.softcap is None and arguments.sinks is None:
        out = F.scaled_dot_product_attention(grouped[None], k[None], v[None], attn_mask=mask, scale=arguments.scale)[0]
    else:
        out = _by_hand(grouped, k, v, mask, arguments, n)
    return out.reshape(heads, n, v.shape[2])


def _by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arguments: Arguments, n: int) -> Tensor:
    scores = torch.matmul(q, k.transpose(1, 2)).to(torch.float32) * arguments.scale
    if arguments.softcap is not None:
        scores = torch.tanh(scores / arguments.softcap) * arguments.softcap
    scores = scores.masked_fill(~mask, -math.inf)
    if arguments.sinks is None:
        return torch.matmul(scores.softmax(-1).to(v.dtype), v)
    sinks = arguments.sinks.to(torch.float32).reshape(k.shape[0], -1, 1).repeat_interleave(n, dim=1)    # [kv_heads, rows, 1]
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(v.dtype), v)
