"""Decoders built from the op table. `build` finds the family that knows a ``model_type``; no family, no fused decoder.

A family file turns a config into a `Plan` (spec.py) and knows nothing of weights or kernels; decoder.py turns plan and
weights into a model. A config that asks for something its family's plan cannot express also gets None here: the generic
path then runs it as transformers does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from backends.base import Cancel, LayerKV, ProgressFn
from backends.engine.arch import gemma, llama, qwen
from backends.engine.arch.decoder import FusedDecoder
from backends.engine.arch.spec import Plan, Unfit
from backends.engine.weights import WeightSource
from backends.kernels import Batch, KVLayer, Ops


class Arch(Protocol):
    """A model between token ids and logits. ``layers`` says what each layer keeps in the KV cache."""

    layers: tuple[LayerKV, ...]
    hidden: int

    def rotation(self, positions: Tensor, last: int, run: bool = False) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [T, R, rot/2], for positions int64 [R], the largest of which is ``last``; T = 0 where the model
        does without. ``run``: they follow one another."""

    def forward(self, batch: Batch, kv: Sequence[KVLayer]) -> Tensor:
        """The residual stream after the last block, [R, H]."""

    def logits(self, rows: Tensor) -> Tensor:
        """float32 [W, V] of rows [W, H] of `forward`: final norm and head."""

    def states(self, rows: Tensor) -> Tensor:
        """float32 [W, H] of rows [W, H] of `forward`: what the head reads, after the final norm."""

    def weights_bytes(self) -> int: ...


FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], Plan]] = {**llama.FAMILIES, **qwen.FAMILIES, **gemma.FAMILIES}


def plan(config: Mapping[str, Any]) -> tuple[Plan | None, str]:
    """The plan for a config, or None and the reason why there is no fused decoder for it."""
    read = FAMILIES.get(str(config.get("model_type")))
    if read is None:
        return None, f"no fused decoder for model type {config.get('model_type')!r}"
    try:
        return read(config), ""
    except Unfit as reason:
        return None, f"the fused decoder for {config['model_type']} cannot express {reason}"


def build(source: WeightSource, ops: Ops, progress: ProgressFn, cancel: Cancel) -> Arch | None:
    """The fused decoder for ``source``, its weights packed for ``ops``; None where there is none for this model."""
    found, _ = plan(source.config)
    return None if found is None else FusedDecoder(found, source, ops, progress, cancel)
