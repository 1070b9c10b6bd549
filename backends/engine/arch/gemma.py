"""Gemma 1, 2 and 3 (text): norm weights stored as w - 1, scaled embeddings; 2 and 3 norm after each block as well and
alternate windows; 2 caps its scores, 3 norms q and k and rotates sliding layers with a base of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.engine.arch.llama import QKVO
from backends.engine.arch.rope import standard
from backends.engine.arch.spec import Plan, Unfit, checked_rope, common, one_rope, windows


def _base(config: Mapping[str, Any], act_key: str, kv_heads: int) -> dict[str, Any]:
    if config.get("use_bidirectional_attention"):
        raise Unfit("bidirectional attention")
    base = common(config, head_dim=256, kv_heads=kv_heads, act_key=act_key, act="gelu_pytorch_tanh", tied=True)
    base["act"] = "gelu_tanh" if base["act"] == "gelu" else base["act"]     # the first releases said gelu and meant tanh
    biased = QKVO if config.get("attention_bias") else frozenset()
    return base | {"norm_offset": 1.0, "embed_scale": base["hidden"] ** 0.5, "biases": biased}


def gemma(config: Mapping[str, Any]) -> Plan:
    base = _base(config, "hidden_activation", 16)
    layers = base["layers"]
    return Plan(**base, ropes=(one_rope(config, base["head_dim"]),), rope_of=(0,) * layers, windows=(None,) * layers,
                scale=base["head_dim"] ** -0.5)


def gemma2(config: Mapping[str, Any]) -> Plan:
    base = _base(config, "hidden_activation", 4)
    layers = base["layers"]
    kinds = ["sliding_attention" if (layer + 1) % 2 else "full_attention" for layer in range(layers)]
    return Plan(**base, ropes=(one_rope(config, base["head_dim"]),), rope_of=(0,) * layers, post_norms=True,
                windows=windows(config, layers, kinds, config.get("sliding_window", 4096)),
                scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
                attention_softcap=config.get("attn_logit_softcapping", 50.0),
                logit_softcap=config.get("final_logit_softcapping", 30.0))


def gemma3(config: Mapping[str, Any]) -> Plan:
    base = _base(config, "hidden_activation", 4)
    layers, pattern = base["layers"], config.get("sliding_window_pattern") or 6
    kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]
    spans = windows(config, layers, kinds, config.get("sliding_window", 4096))
    ropes = tuple(checked_rope(rule, base["head_dim"]) for rule in _two_rules(config))
    return Plan(**base, ropes=ropes, rope_of=tuple(0 if span is None else 1 for span in spans), windows=spans,
                post_norms=True, scale=config.get("query_pre_attn_scalar", 256) ** -0.5, qk_norm=True,
                attention_softcap=config.get("attn_logit_softcapping"), logit_softcap=config.get("final_logit_softcapping"))


def _two_rules(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotation of the full layers, and of the sliding ones, from either form of the config."""
    given = config.get("rope_parameters") or {}
    full = dict(given.get("full_attention") or {}) | dict(config.get("rope_scaling") or {})
    sliding = dict(given.get("sliding_attention") or {})
    for rule, theta in ((full, config.get("rope_theta") or 1e6), (sliding, config.get("rope_local_base_freq") or 1e4)):
        rule.setdefault("rope_type", rule.pop("type", None) or "default")
        rule.setdefault("rope_theta", theta)
        standard(rule, config)
    return full, sliding


FAMILIES = {"gemma": gemma, "gemma2": gemma2, "gemma3_text": gemma3}
