"""How fast a token could come here at best, and what stands in the way (Williams, Waterman and Patterson 2009).

A decode pass reads every weight once, the head included, and the cache of what came before. Nothing can be faster than that over
the measured bandwidth, except a pass that yields several tokens. Knows bytes and seconds; nothing of how a model works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from backends.base import ModelInfo

Bound = Literal["bandwidth", "compute", "overhead"]


@dataclass(frozen=True)
class Roofline:
    """``bytes``: read by a pass. ``ceiling``: tokens a second at most. ``share``: of it that was reached; above 1 where the
    weights lie in a cache. ``bound``: what takes the largest part of a pass; None where several answers share it, since how fast prompts
    were read side by side does not tell what a pass computes."""

    bytes: int
    bandwidth: float
    ceiling: float
    share: float
    bound: Bound | None


def roofline(info: ModelInfo, depth: float, bandwidth: float, decode: float | None, prefill: float | None,
             tokens_per_pass: float = 1.0, alone: bool = True) -> Roofline | None:
    """``depth``: mean tokens of context of a pass; ``bandwidth``: bytes a second; ``decode``, ``prefill``: measured tokens a second of one answer.
    None where the model's weights or speed are not known, as with a remote one."""
    if not info.weights_bytes or not decode or bandwidth <= 0:
        return None
    read = info.weights_bytes + round(depth * (info.kv_bytes_per_token or 0))
    ceiling = bandwidth / read * tokens_per_pass
    whole = tokens_per_pass / decode
    memory, compute = read / bandwidth, tokens_per_pass / prefill if prefill else 0.0
    parts: dict[Bound, float] = {"bandwidth": memory, "compute": compute, "overhead": whole - max(memory, compute)}
    return Roofline(read, bandwidth, ceiling, decode / ceiling, max(parts, key=parts.__getitem__) if alone else None)
