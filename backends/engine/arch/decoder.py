"""A Llama-shaped decoder: a `Plan`, weights packed for one target, and a forward pass that is nothing but ops.

q, k, v are one matrix, gate and up are one, wherever their quantization allows; else they stay apart and their products
are put side by side, which gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backends.base import BrokenFile, Cancel, ConfigConflict, LayerKV, Progress, ProgressFn
from backends.engine.arch.rope import tables
from backends.engine.arch.spec import Plan
from backends.engine.weights import WeightSource
from backends.kernels import Act, AttentionSpec, Batch, KVLayer, Linear, Ops, QWeight

Weight = tuple[QWeight | Tensor, Tensor | None]
JOIN = "gainz_join"             # of a draft that reads its verifier's states: the matrix that leads them into its own stream
TABLE = 1 << 14                 # positions whose rotation is kept; beyond, it is computed anew


@dataclass
class _Block:
    """One layer. ``qkv`` and ``gate_up`` are one matrix each, or several whose products stand side by side."""

    spec: AttentionSpec
    norm_attention: Tensor
    norm_mlp: Tensor
    qkv: tuple[Linear, ...]
    out: Linear
    gate_up: tuple[Linear, ...]
    down: Linear
    post_attention: Tensor | None = None
    post_mlp: Tensor | None = None


class FusedDecoder:
    """See `backends.engine.arch.Arch`."""

    def __init__(self, plan: Plan, source: WeightSource, ops: Ops, progress: ProgressFn, cancel: Cancel) -> None:
        self.plan, self.ops, self.hidden = plan, ops, plan.hidden
        self._replay = ops.replay() if hasattr(ops, "replay") else None
        self._gated = getattr(ops, "gated", None)
        self.layers = tuple(LayerKV(plan.kv_heads, plan.head_dim, plan.head_dim, window) for window in plan.windows)
        made = [rope.frequencies() for rope in plan.ropes]
        self._frequencies = torch.stack([frequency for frequency, _ in made]).to(ops.device)
        self._factors = torch.tensor([factor for _, factor in made], device=ops.device)
        self._angles = tables(torch.arange(0, device=ops.device), self._frequencies, self._factors)
        read = _Reader(plan, source, ops)
        self._table = ops.pack_table(read.matrix("model.embed_tokens", plan.vocab, plan.hidden, bias=False)[0])
        self._blocks = []
        for layer in range(plan.layers):
            cancel.raise_if_set("The load")
            progress(Progress("read", layer, plan.layers, f"layer {layer + 1} of {plan.layers}"))
            self._blocks.append(read.block(layer))
        self._norm = read.norm("model.norm")
        # A draft's head may have the rows of some ids only; then "lm_head.ids" says which.
        self._ids = source.tensor("lm_head.ids").to(ops.device) if "lm_head.ids" in source.names() else None
        rows = plan.vocab if self._ids is None else len(self._ids)
        whole = plan.tied and self._ids is None
        self._head = self._table if whole else ops.pack(*read.matrix("lm_head", rows, plan.hidden))
        joins = f"{JOIN}.weight" in source.names()
        self._join = ops.pack(*read.matrix(JOIN, plan.hidden, plan.hidden, bias=False)) if joins else None
        progress(Progress("read", plan.layers, plan.layers))

    def rotation(self, positions: Tensor, last: int, run: bool = False) -> tuple[Tensor, Tensor]:
        """On the CPU from tables that grow with the longest sequence so far: cosines cost more than reading them."""
        if positions.device.type != "cpu" or last >= TABLE:
            return tables(positions, self._frequencies, self._factors)
        self._turn_to(last)
        cos, sin = self._angles
        if run and len(cos) == 1:                            # of several ropes a run is not contiguous
            rows = len(positions)
            return cos.narrow(1, last + 1 - rows, rows), sin.narrow(1, last + 1 - rows, rows)
        return cos.index_select(1, positions), sin.index_select(1, positions)

    def _turn_to(self, last: int) -> None:
        if last >= self._angles[0].shape[1]:
            size = min(TABLE, 1 << max(9, (last + 1).bit_length()))
            self._angles = tables(torch.arange(size), self._frequencies, self._factors)

    def turns(self, places: int) -> tuple[Tensor, Tensor] | None:
        """cos and sin, float32 [at least ``places``, rot/2], of a model with one rope; None where they are not kept."""
        if places > TABLE:
            return None
        self._turn_to(places - 1)
        return self._angles[0][0], self._angles[1][0]

    def chain(self, kv: Sequence[KVLayer], columns: int) -> Any:
        """Few rows of one sequence, and ids guessed ahead, of the head's first ``columns``, in one call each over this cache
        (`cpu_chain.py`); None: not on this target."""
        if self._replay is None or not hasattr(self.ops, "chain") or len(self._frequencies) != 1:
            return None
        return self.ops.chain(self._replay, kv, self.narrow, self.hidden, self.turns, self._ids, columns)

    def forward(self, batch: Batch, kv: Sequence[KVLayer]) -> Tensor:
        return self._pass(batch, kv) if self._replay is None else self._replay.run(self._pass, batch, kv)

    def _pass(self, batch: Batch, kv: Sequence[KVLayer]) -> Tensor:
        """Ops and nothing else, so that a target may record it."""
        x = self.ops.embed(self._table, batch.ids, self.plan.embed_scale)
        if self._join is not None:
            self.ops.matmul_add(self.ops.norm(batch.states, self._norm, self.plan.eps), self._join, x)
        for block, pages in zip(self._blocks, kv):
            self._attention(block, pages, batch, x)
            self._mlp(block, x)
        return x

    @property
    def sets_up(self) -> bool:
        """Does the first pass of some number of rows cost more than the next?"""
        return self._replay is not None

    @property
    def reads_states(self) -> bool:
        return self._join is not None

    @property
    def columns(self) -> Tensor | None:
        """The ids, rising, that the head has rows of; None: all."""
        return self._ids

    def logits(self, rows: Tensor) -> Tensor:
        found = self.narrow(rows)
        if self._ids is None:
            return found
        return found.new_full((len(found), self.plan.vocab), -torch.inf).index_copy_(1, self._ids, found)

    def narrow(self, rows: Tensor) -> Tensor:
        """float32 [W, columns]: of the ids that the head has rows of."""
        return self.ops.logits(self.ops.norm(rows, self._norm, self.plan.eps), self._head, self.plan.logit_softcap)

    def states(self, rows: Tensor) -> Tensor:
        """In float32, not through the ops: those hand a norm's rows on in the type that products want."""
        rows = rows.float()
        scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.plan.eps)
        return rows * scale * self._norm.float()

    def weights_bytes(self) -> int:
        linears = [w for b in self._blocks for w in (*b.qkv, b.out, *b.gate_up, b.down)] + [self._table]
        linears += [self._join] if self._join is not None else []
        return sum(w.nbytes for w in linears) + (0 if self._head is self._table else self._head.nbytes)

    def pass_bytes(self) -> int:
        """What a pass of one row reads of the weights: of a table that is no head, next to nothing."""
        return self.weights_bytes() - (0 if self._head is self._table else self._table.nbytes)

    def _attention(self, block: _Block, pages: KVLayer, batch: Batch, x: Tensor) -> None:
        qkv = self._product(self.ops.norm(x, block.norm_attention, self.plan.eps), block.qkv)
        self._add(self.ops.attend(qkv, block.spec, pages, batch), block.out, block.post_attention, x)

    def _mlp(self, block: _Block, x: Tensor) -> None:
        a = self.ops.norm(x, block.norm_mlp, self.plan.eps)
        if self._gated and len(block.gate_up) == 1:
            inner = self._gated(a, block.gate_up[0], self.plan.act)
        else:
            inner = self.ops.glu(self._product(a, block.gate_up), self.plan.act)
        self._add(inner, block.down, block.post_mlp, x)

    def _product(self, a: Act, parts: tuple[Linear, ...]) -> Tensor:
        if len(parts) == 1:
            return self.ops.matmul(a, parts[0])
        width, out = 0, torch.empty(0)
        for part in parts:                                   # copied at once: the next product may reuse the workspace
            product = self.ops.matmul(a, part)
            if not width:
                out = product.new_empty(product.shape[0], sum(p.rows for p in parts))
            out[:, width:width + part.rows] = product
            width += part.rows
        return out

    def _add(self, a: Act, w: Linear, norm: Tensor | None, x: Tensor) -> None:
        if norm is None:
            self.ops.matmul_add(a, w, x)
        else:
            self.ops.norm_add(self.ops.matmul(a, w), norm, self.plan.eps, x)


class _Reader:
    """Weights of a source, checked against the plan and packed."""

    def __init__(self, plan: Plan, source: WeightSource, ops: Ops) -> None:
        self.plan, self.source, self.ops = plan, source, ops

    def block(self, layer: int) -> _Block:
        plan, at = self.plan, f"model.layers.{layer}"
        q, k, v, o = (f"{at}.self_attn.{name}_proj" for name in "qkvo")
        width, keys = plan.heads * plan.head_dim, plan.kv_heads * plan.head_dim
        qkv = [self.matrix(q, width, plan.hidden), self.matrix(k, keys, plan.hidden), self.matrix(v, keys, plan.hidden)]
        gate_up = [self.matrix(f"{at}.mlp.{name}_proj", plan.inner, plan.hidden) for name in ("gate", "up")]
        before_mlp = "pre_feedforward_layernorm" if plan.post_norms else "post_attention_layernorm"
        return _Block(
            self._attention(layer), self.norm(f"{at}.input_layernorm"), self.norm(f"{at}.{before_mlp}"),
            self._fuse(qkv), self.ops.pack(*self.matrix(o, plan.hidden, width)),
            self._fuse(gate_up), self.ops.pack(*self.matrix(f"{at}.mlp.down_proj", plan.hidden, plan.inner)),
            self.norm(f"{at}.post_attention_layernorm") if plan.post_norms else None,
            self.norm(f"{at}.post_feedforward_layernorm") if plan.post_norms else None)

    def norm(self, module: str, width: int | None = None) -> Tensor:
        name = f"{module}.weight"
        weight = self.source.tensor(name).to(self.ops.device, torch.float32)
        self._check(name, tuple(weight.shape), (self.plan.hidden if width is None else width,))
        return weight + self.plan.norm_offset

    def matrix(self, module: str, rows: int, columns: int, *, bias: bool = True) -> Weight:
        weight, offset = self.source.linear(module)
        self._check(f"{module}.weight", tuple(weight.shape), (rows, columns))
        if offset is None and module.rsplit(".", 1)[-1] in self.plan.biases:
            raise BrokenFile(f"The model's files lack {module}.bias, which its config asks for.", tensor=f"{module}.bias")
        if offset is not None:
            self._check(f"{module}.bias", tuple(offset.shape), (rows,))
        return weight, offset if bias else None

    def _attention(self, layer: int) -> AttentionSpec:
        plan, at = self.plan, f"model.layers.{layer}.self_attn"
        norms = [self.norm(f"{at}.{name}_norm", plan.head_dim) if plan.qk_norm else None for name in "qk"]
        return AttentionSpec(layer, plan.heads, plan.kv_heads, plan.head_dim, plan.scale, plan.windows[layer],
                             plan.attention_softcap, plan.rope_of[layer], norms[0], norms[1], plan.eps)

    def _fuse(self, parts: Sequence[Weight]) -> tuple[Linear, ...]:
        weights = [weight for weight, _ in parts]
        if all(isinstance(weight, Tensor) for weight in weights):
            whole = torch.cat(weights)
        elif all(isinstance(weight, QWeight) for weight in weights):
            whole = QWeight.cat(weights)
        else:
            whole = None
        if whole is None:
            return tuple(self.ops.pack(*part) for part in parts)
        return (self.ops.pack(whole, _cat_biases(parts)),)

    def _check(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            raise ConfigConflict(f"{name} does not have the shape that the model's config gives it.", tensor=name,
                                 in_file=list(found), by_config=list(wanted))


def _cat_biases(parts: Sequence[Weight]) -> Tensor | None:
    if all(bias is None for _, bias in parts):
        return None
    return torch.cat([torch.zeros(weight.shape[0]) if bias is None else bias.float() for weight, bias in parts])
