"""What a fused decoder needs to know about a model: values only, read from a config by a family file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.base import BrokenFile
from backends.engine.arch.rope import Rope, parameters, rope

ACTS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


class Unfit(Exception):
    """This config asks for something that a plan cannot express; the text says what. Never leaves `arch.plan`."""


@dataclass(frozen=True)
class Plan:
    """A Llama-shaped decoder. ``windows`` and ``rope_of`` have one entry a layer (None: full attention; no rotation)."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    act: str
    eps: float
    tied: bool
    ropes: tuple[Rope, ...]
    rope_of: tuple[int | None, ...]
    windows: tuple[int | None, ...]
    scale: float
    biases: frozenset[str] = frozenset()  # linear modules that must have one ("q_proj" …); others may
    qk_norm: bool = False
    norm_offset: float = 0.0             # what is added to every norm weight: 1 for Gemma
    post_norms: bool = False             # Gemma 2 and 3: norms after attention and MLP too
    embed_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None


def need(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise BrokenFile(f"The model's config lacks {key!r}.", model_type=config.get("model_type"))
    return config[key]


def common(config: Mapping[str, Any], *, head_dim: int | None = None, kv_heads: int | None = None,
           act_key: str = "hidden_act", act: str = "silu", eps: float = 1e-6, tied: bool = False) -> dict[str, Any]:
    """The fields that every family reads alike; keyword arguments are the family's defaults for absent keys."""
    heads, hidden = need(config, "num_attention_heads"), need(config, "hidden_size")
    name = config.get(act_key) or config.get("hidden_act") or act
    if name not in ACTS:
        raise Unfit(f"the activation {name!r}")
    return {
        "hidden": hidden, "inner": need(config, "intermediate_size"), "layers": need(config, "num_hidden_layers"),
        "heads": heads, "kv_heads": config.get("num_key_value_heads") or kv_heads or heads,
        "head_dim": config.get("head_dim") or head_dim or hidden // heads, "vocab": need(config, "vocab_size"),
        "act": ACTS[name], "eps": config.get("rms_norm_eps") or eps,
        "tied": tied if config.get("tie_word_embeddings") is None else bool(config["tie_word_embeddings"]),
    }


def one_rope(config: Mapping[str, Any], head_dim: int, theta: float = 10000.0) -> Rope:
    """The rotation of a model that has one kind for all its layers."""
    return checked_rope(parameters(config, theta), head_dim, config.get("partial_rotary_factor") or 1.0)


def checked_rope(rule: Mapping[str, Any], head_dim: int, partial: float = 1.0) -> Rope:
    found = rope(rule, head_dim, partial)
    if found is None:
        raise Unfit(f"the rope type {rule['rope_type']!r}")
    return found


def windows(config: Mapping[str, Any], layers: int, default: Sequence[str], width: int | None) -> tuple[int | None, ...]:
    """One window a layer, from ``layer_types`` where the config has them, else from ``default``."""
    kinds = config.get("layer_types") or default
    if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise Unfit(f"the layer types {sorted(set(kinds))} in {layers} layers")
    return tuple(width if kind == "sliding_attention" else None for kind in kinds)
