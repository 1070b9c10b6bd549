"""The gate of the packed path: what a module itself says, before anything is run.

Knows: the flags and caches by which transformers tells that sequences cannot share a pass. Whether they really can is found
by the check at load (verify.py).
"""

from __future__ import annotations

import inspect

from torch import nn

MOVING_ROPE = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}


def refusal(module: nn.Module, context: int) -> str | None:
    """Why the module cannot even be tried packed, in words for people; None: try."""
    if module._is_stateful:
        return "it carries a state from token to token, which sequences in one pass would share."
    if not module._supports_attention_backend:
        return "its attention cannot be replaced by ours."
    if "position_ids" not in inspect.signature(module.forward).parameters:
        return "it takes no position ids."
    return _other_state(module) or _moving_rope(module, context)


def _other_state(module: nn.Module) -> str | None:
    """transformers' own cache for it shows whether layers keep more than keys and values (convolutions, indexes)."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, DummyLayer
    plain = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
    odd = sorted({type(layer).__name__ for layer in DynamicCache(config=module.config).layers if type(layer) not in plain})
    return f"its layers keep more than keys and values ({', '.join(odd)})." if odd else None


def _moving_rope(module: nn.Module, context: int) -> str | None:
    """Rotations that depend on the longest sequence of a pass would let neighbours change each other."""
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            limit = _rope_limit(part, MOVING_ROPE.get(kind))
            if limit is not None and context > limit:
                return (f"its {kind} rotation changes beyond {limit} tokens; load it with context {limit} or less for the "
                        f"packed path.")
    return None


def _rope_limit(part: nn.Module, key: str | None) -> int | None:
    if key is None:
        return None
    rope = getattr(part.config, "rope_parameters", None) or {}
    return getattr(part.config, key, None) or rope.get(key) or 0
