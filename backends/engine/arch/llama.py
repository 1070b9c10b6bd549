"""Llama, Mistral and SmolLM3: pre-norm blocks, SiLU, one rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.engine.arch.spec import Plan, common, one_rope, windows

QKVO, MLP = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"}), frozenset({"gate_proj", "up_proj", "down_proj"})


def biases(config: Mapping[str, Any]) -> frozenset[str]:
    return (QKVO if config.get("attention_bias") else frozenset()) | (MLP if config.get("mlp_bias") else frozenset())


def llama(config: Mapping[str, Any]) -> Plan:
    base = common(config)
    layers = base["layers"]
    return Plan(**base, ropes=(one_rope(config, base["head_dim"]),), rope_of=(0,) * layers, windows=(None,) * layers,
                scale=base["head_dim"] ** -0.5, biases=biases(config))


def mistral(config: Mapping[str, Any]) -> Plan:
    base = common(config, kv_heads=8)
    layers = base["layers"]
    width = config.get("sliding_window", 4096)               # absent: the family's default; null: none
    return Plan(**base, ropes=(one_rope(config, base["head_dim"]),), rope_of=(0,) * layers, windows=(width,) * layers,
                scale=base["head_dim"] ** -0.5)


def smollm3(config: Mapping[str, Any]) -> Plan:
    """Every fourth layer is not rotated (a "NoPE" layer)."""
    base = common(config, kv_heads=4, tied=True)
    layers, interval = base["layers"], config.get("no_rope_layer_interval") or 4
    rotated = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    width = config.get("sliding_window") if config.get("use_sliding_window") else None
    kinds = ["full_attention" if has or width is None else "sliding_attention" for has in rotated]
    return Plan(**base, ropes=(one_rope(config, base["head_dim"], 2e6),),
                rope_of=tuple(0 if has else None for has in rotated), windows=windows(config, layers, kinds, width),
                scale=base["head_dim"] ** -0.5, biases=biases(config))


FAMILIES = {"llama": llama, "mistral": mistral, "smollm3": smollm3}
