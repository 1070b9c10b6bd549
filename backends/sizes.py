"""Which numbers of a config or of a GGUF header can be: refused before anything is counted, allocated or listed by them.

The bounds are far beyond any model there is; a billion layers would otherwise be a billion entries in somebody's memory. Light.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from backends.errors import BrokenFile

NAMES = {  # the same size under the names that families gave it
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "inner": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff"),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length"),
    "vocab": ("vocab_size",), "head_dim": ("head_dim", "attention_head_dim")}
GGUF = {"layers": ("block_count",), "hidden": ("embedding_length",), "inner": ("feed_forward_length",), "heads": ("attention.head_count",),
        "kv_heads": ("attention.head_count_kv",), "head_dim": ("attention.key_length", "attention.value_length"),
        "context": ("context_length",)}
MOST = {"layers": 1000, "hidden": 1 << 20, "heads": 1 << 14, "kv_heads": 1 << 14, "inner": 1 << 24, "context": 1 << 30, "vocab": 1 << 24,
        "head_dim": 1 << 16}
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon")
BASES = ("rope_theta", "rope_local_base_freq")
GGUF_NUMBERS = {"attention.layer_norm_rms_epsilon": 1.0, "attention.layer_norm_epsilon": 1.0, "rope.freq_base": math.inf}
LEAST = {"kv_heads": 0, "inner": 0, "context": 0}       # 0: a layer without attention or feed-forward; no limit known; else 1


def check_config(config: Mapping[str, Any]) -> None:
    """BrokenFile naming the first number of config.json (its text part too) that no model can have."""
    inner = config.get("text_config")
    for part in (config, inner) if isinstance(inner, Mapping) else (config,):
        for kind, names in NAMES.items():
            for name in names:
                _check("config.json", name, kind, part.get(name))
        _check_numbers(part)
        _check_ends(part, part.get("vocab_size"))


def _check_numbers(part: Mapping[str, Any]) -> None:
    """Numbers that a weight is divided by or that a rotation grows from: none of them can be 0, negative or a text."""
    for name in EPSILONS:
        _check_positive("config.json", name, part.get(name), 1.0)
    rules = [rule for key in ("rope_parameters", "rope_scaling") if isinstance(rule := part.get(key), Mapping)]
    rules += [inner for rule in rules for inner in rule.values() if isinstance(inner, Mapping)]    # one for each kind of layer
    for rule, names in ((part, BASES), *((rule, (*BASES, "factor")) for rule in rules)):
        for name in names:
            _check_positive("config.json", name, rule.get(name), math.inf)


def _check_ends(part: Mapping[str, Any], vocab: Any) -> None:
    """An end id that no token has is never sampled: every answer would run to the end of the context."""
    for item in _each(part.get("eos_token_id")) if isinstance(vocab, int) else ():
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab:
            raise BrokenFile(f"config.json: eos_token_id is {_short(item)}; the model has the tokens 0 to {vocab - 1:,}.",
                             file="config.json", key="eos_token_id", vocab_size=vocab,
                             remedy="Correct the id, or fetch the file again.")


def check_gguf(file: Any) -> None:
    """The same for the metadata of a `GgufFile`."""
    for kind, keys in GGUF.items():
        for key in keys:
            _check(file.path.name, f"{file.architecture}.{key}", kind, file.get(key))
    for key, most in GGUF_NUMBERS.items():
        _check_positive(file.path.name, f"{file.architecture}.{key}", file.get(key), most)


def _check(file: str, name: str, kind: str, value: Any) -> None:
    low, high = LEAST.get(kind, 1), MOST[kind]
    for item in _each(value):
        if isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high:
            raise BrokenFile(f"{file}: {name} is {_short(item)}; it must be a whole number from {low} to {high:,}.", file=file, key=name,
                             remedy="Correct the number, or fetch the file again.")


def _check_positive(file: str, name: str, value: Any, most: float) -> None:
    for item in _each(value):
        number = isinstance(item, (int, float)) and not isinstance(item, bool)
        if not number or not math.isfinite(item) or not 0 < item <= most:
            high = f" and at most {most:g}" if math.isfinite(most) else ""
            raise BrokenFile(f"{file}: {name} is {_short(item)}; it must be a number above 0{high}.", file=file, key=name,
                             remedy="Correct the number, or fetch the file again.")


def _each(value: Any) -> Iterator[Any]:
    """One number, or one for each layer; nothing where the file does not say."""
    if value is None:
        return iter(())
    return iter((value,)) if isinstance(value, (bool, int, float, str, Mapping)) else iter(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
