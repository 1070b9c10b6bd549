"""Which numbers of a config or of a GGUF header can be: refused before anything is counted, allocated or listed by them.

The bounds are far beyond any model there is; a billion layers would otherwise be a billion entries in somebody's memory. Light.
"""

from __future__ import annotations

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
LEAST = {"kv_heads": 0, "inner": 0, "context": 0}       # 0: a layer without attention or feed-forward; no limit known; else 1


def check_config(config: Mapping[str, Any]) -> None:
    """BrokenFile naming the first number of config.json (its text part too) that no model can have."""
    inner = config.get("text_config")
    for part in (config, inner) if isinstance(inner, Mapping) else (config,):
        for kind, names in NAMES.items():
            for name in names:
                _check("config.json", name, kind, part.get(name))


def check_gguf(file: Any) -> None:
    """The same for the metadata of a `GgufFile`."""
    for kind, keys in GGUF.items():
        for key in keys:
            _check(file.path.name, f"{file.architecture}.{key}", kind, file.get(key))


def _check(file: str, name: str, kind: str, value: Any) -> None:
    low, high = LEAST.get(kind, 1), MOST[kind]
    for item in _each(value):
        if isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high:
            raise BrokenFile(f"{file}: {name} is {_short(item)}; it must be a whole number from {low} to {high:,}.", file=file, key=name,
                             remedy="Correct the number, or fetch the file again.")


def _each(value: Any) -> Iterator[Any]:
    """One number, or one for each layer; nothing where the file does not say."""
    if value is None:
        return iter(())
    return iter((value,)) if isinstance(value, (bool, int, float, str, Mapping)) else iter(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
