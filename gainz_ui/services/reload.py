"""What is said about options before a model is loaded or given up for them: do they fit, and what differs.

Knows estimates and option values; refuses to know where a model lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from backends.base import MemoryEstimate, OutOfMemory


def values(options: Any) -> dict[str, Any]:
    """The fields of an options dataclass by name."""
    return {item.name: getattr(options, item.name) for item in fields(options)}


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """For people: "streams 2 → 3"."""
    return ", ".join(f"{key} {old.get(key)} → {value}" for key, value in new.items() if old.get(key) != value)


def refuse_if_too_big(name: str, expected: MemoryEstimate) -> None:
    """OutOfMemory with what would fit."""
    if expected.fits:
        return
    fits = f"At most {expected.largest_context:,} tokens of context would fit." if expected.largest_context else \
        "Not even its weights fit: unload a model, or choose a smaller quantization."
    raise OutOfMemory(f"{name} does not fit the free memory.", remedy=fits, needed=expected.total, free=expected.free,
                      weights=expected.weights, kv=expected.kv, context=expected.context,
                      largest_context=expected.largest_context)
