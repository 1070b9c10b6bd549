"""How much context and KV cache a load gets: the wish, the model's limit, and the memory that is free after the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from backends.base import LayerKV, OutOfMemory
from backends.engine.kv import PAGE, bytes_per_token

SHARE = 0.7                  # of the free memory may be promised to the cache; it is taken only as sequences grow
UNKNOWN_CONTEXT = 4096       # where no file says how long the model was trained


@dataclass(frozen=True)
class Room:
    context: int             # tokens of one sequence
    pages: int
    notes: tuple[str, ...] = ()


def free_bytes() -> int:
    """What the machine, or the container's limit where that is lower, has left."""
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used + int(stat.get("inactive_file", 0))))


def plan_room(layers: Sequence[LayerKV], kv_type: str, context: int, trained: int | None, streams: int, free: int) -> Room:
    """``context`` 0: as much as fits, at most ``trained``. Raises OutOfMemory where what was asked for does not fit."""
    token = max(1, bytes_per_token(layers, kv_type))
    most = int(free * SHARE) // (token * PAGE)
    wanted = context or trained or UNKNOWN_CONTEXT
    need = -(-wanted // PAGE)
    notes = []
    if most < (need if context else 1):
        raise OutOfMemory(f"A KV cache for {wanted} tokens does not fit.", needed=need * PAGE * token, free=free,
                          largest_context=most * PAGE)
    if most < need:
        wanted, need = most * PAGE, most
        notes.append(f"Context {wanted} of the trained {trained}: more does not fit the free memory")
    if trained and wanted > trained:
        notes.append(f"Context {wanted} is beyond the trained {trained}: answers may get worse there")
    pages = min(most, need * streams)
    if pages < need * streams:
        notes.append(f"KV cache for {pages * PAGE} tokens, shared by all streams; {streams} full contexts would need {need * streams * PAGE}")
    return Room(wanted, pages, tuple(notes))
