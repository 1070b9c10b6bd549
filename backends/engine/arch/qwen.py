"""Qwen2 (biases on q, k, v) and Qwen3 (norms on each head's q and k); both may slide a window over their upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.engine.arch.llama import biases
from backends.engine.arch.spec import Plan, common, one_rope, windows


def _plan(config: Mapping[str, Any], base: dict[str, Any], **extra: Any) -> Plan:
    layers = base["layers"]
    width = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    kinds = ["sliding_attention" if width is not None and layer >= first else "full_attention" for layer in range(layers)]
    return Plan(**base, ropes=(one_rope(config, base["head_dim"]),), rope_of=(0,) * layers,
                windows=windows(config, layers, kinds, width), scale=base["head_dim"] ** -0.5, **extra)


def qwen2(config: Mapping[str, Any]) -> Plan:
    return _plan(config, common(config, kv_heads=32), biases=frozenset({"q_proj", "k_proj", "v_proj"}))


def qwen3(config: Mapping[str, Any]) -> Plan:
    return _plan(config, common(config, kv_heads=32, head_dim=128), qk_norm=True, biases=biases(config))


FAMILIES = {"qwen2": qwen2, "qwen3": qwen3}
