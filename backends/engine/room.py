"""How much context and KV cache a load gets: the wish, the model's limit, and the memory that is free after the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backends.base import InvalidRequest, LayerKV, OutOfMemory
from backends.engine.kv import PAGE, bytes_per_token

AUTOMATIC = 0.5              # of the free memory may go to the cache of a context that nobody asked for
MOST = 0.9                   # of it may be promised at all; it is taken only as sequences grow
UNKNOWN_CONTEXT = 2048       # where no file says how long the model was trained


@dataclass(frozen=True)
class Room:
    context: int             # tokens of one sequence
    pages: int
    notes: tuple[str, ...] = ()


def plan_room(layers: Sequence[LayerKV], kv_type: str, context: int, trained: int | None, streams: int, free: int) -> Room:
    """``context`` 0: the trained one, or less where ``streams`` of them would take more than half of ``free`` bytes.

    Raises OutOfMemory where not even one sequence of the context asked for fits; InvalidRequest where it is beyond the trained one, too.
    """
    page = max(1, bytes_per_token(layers, kv_type) * PAGE)
    most = int(free * MOST) // page
    wanted, notes = context or _automatic(page, trained or UNKNOWN_CONTEXT, streams, free), []
    need = -(-wanted // PAGE)
    if most < need:
        if trained and wanted > trained:
            raise InvalidRequest(f"The model's own context has {trained:,} tokens; {wanted:,} are beyond it, and do not fit the memory.",
                                 field="context", remedy=f"Choose {min(trained, most * PAGE):,} tokens at most.")
        raise OutOfMemory(f"A KV cache for {wanted:,} tokens does not fit.",
                          needed=need * page, free=free, largest_context=most * PAGE)
    if not context and wanted < (trained or 0):
        notes.append(f"Context {wanted:,} of the trained {trained:,}: more, for {streams} streams, would take over half of the "
                     "free memory")
    if trained and wanted > trained:
        notes.append(f"Context {wanted:,} is beyond the trained {trained:,}: answers may get worse there")
    pages = min(most, need * streams)
    if pages < need * streams:
        notes.append(f"KV cache for {pages * PAGE:,} tokens, shared by all streams; {streams} full contexts would need "
                     f"{need * streams * PAGE:,}")
    return Room(wanted, pages, tuple(notes))


def _automatic(page: int, trained: int, streams: int, free: int) -> int:
    fits = int(free * AUTOMATIC) // (page * streams) * PAGE
    return max(PAGE, min(trained, fits))
