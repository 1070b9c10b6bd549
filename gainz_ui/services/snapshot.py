"""How things stand at one moment, in values that a page, /health and the monitor can show. Knows nothing of how they come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from backends.base import ModelInfo, Progress


@dataclass(frozen=True)
class Loading:
    """A load in progress."""

    name: str
    progress: Progress
    seconds: float                      # since it began


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    total: int                          # of this machine, or of the limit it runs under
    available: int                      # without swapping
    engine: int                         # resident in the engine process, 0 = none runs
    front: int                          # resident in this process


@dataclass(frozen=True)
class Snapshot:
    """How things stand, for the page's header, /health and the monitor. Costs no round trip to the engine."""

    status: Literal["starting", "loading", "ready", "idle", "dead", "stuck", "stopping"]
    reason: str                         # why it is not ready, "" = it is
    healthy: bool                       # what /health answers: True = 200
    models: tuple[ModelInfo, ...]       # by name
    loading: tuple[Loading, ...]
    engine: str                         # "idle" | "starting" | "ready" | "dead"
    running: int                        # requests being computed
    waiting: int                        # requests in the queue
    queue_limit: int
    memory: Memory
    step_age: float | None              # seconds since the engine's last step while it has work, else None
    uptime: float                       # seconds
    counters: Mapping[str, Any]         # the engine's own, as of its last heartbeat
    resting: tuple[str, ...] = ()       # of the models, those that gave their memory back until they are asked for
    missing: tuple[str, ...] = ()       # and those whose files are gone: they cannot come back


def pages(counters: Mapping[str, Any]) -> tuple[int, int]:
    """Pages of the KV caches of all models: used, and in all."""
    caches = [model.get("cache", {}) for model in counters.get("models", {}).values()]
    return sum(cache.get("pages_used", 0) for cache in caches), sum(cache.get("pages_total", 0) for cache in caches)
