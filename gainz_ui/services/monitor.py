"""How the server does, in one value: what the monitor tab draws, `/monitor` tells and the diagnostics keep.

Knows the studio's snapshot and its meter; computes rates, shares and percentiles. Refuses to know how they are drawn. A look costs
no round trip to the engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gainz_ui.services.gpu import GpuUse, GpuWatch
from gainz_ui.services.meter import Ended, Moment, percentile
from gainz_ui.services.snapshot import Memory

WINDOW = 300.0                          # seconds that percentiles and shares are taken over
NOW = 5.0                               # seconds that "now" means for a rate
SHOWN = 20                              # requests in the table


@dataclass(frozen=True)
class Spread:
    """Of so many values; seconds, None of nothing."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True)
class ModelUse:
    """One loaded model. Bytes; pages of its KV cache: used by running requests, kept as a prefix that may be found again (and given up
    where room is needed), or free. The three make up all."""

    name: str
    backend: str
    resting: bool
    weights: int
    page_bytes: int
    pages_total: int
    pages_used: int
    pages_free: int
    pages_cached: int
    tokens: int                         # generated since the server began


@dataclass(frozen=True)
class Figures:
    status: str
    reason: str
    uptime: float
    memory: Memory
    running: int
    waiting: int
    queue_limit: int
    tokens_per_second: float            # generated, over the last seconds
    prompt_tokens_per_second: float
    window: float                       # seconds that the following are taken over
    requests: int                       # ended within it
    ttft: Spread
    tpot: Spread
    acceptance: float | None            # of drafted tokens, None = nothing was drafted
    cache_hits: float | None            # share of prompt tokens found in the prefix cache
    errors: tuple[tuple[str, int], ...]                     # since the server began, by code, most frequent first
    models: tuple[ModelUse, ...]
    gpus: tuple[GpuUse, ...]
    moments: tuple[Moment, ...]         # the last minutes, oldest first
    recent: tuple[Ended, ...]           # newest first


class Monitor:
    """One for an installation. ``gpus``: asks what the devices do."""

    def __init__(self, studio: Any, gpus: Callable[[], tuple[GpuUse, ...]] | None = None) -> None:
        self._studio, self._gpus = studio, gpus or GpuWatch().use

    def look(self) -> Figures:
        self._studio.mark()
        now, meter = self._studio.snapshot(), self._studio.meter
        seen, moments = meter.recent(WINDOW), meter.moments()
        errors: Counter[str] = Counter()
        for (_, code), count in meter.errors().items():
            errors[code] += count
        return Figures(
            now.status, now.reason, now.uptime, now.memory, now.running, now.waiting, now.queue_limit, rate(moments, "tokens"),
            rate(moments, "prompt_tokens"), WINDOW, len(seen), spread(one.ttft for one in seen), spread(one.tpot for one in seen),
            share(sum(one.accepted for one in seen), sum(one.drafted for one in seen)),
            share(sum(one.cached_tokens or 0 for one in seen), sum(one.prompt_tokens or 0 for one in seen if one.kind == "generate")),
            tuple(errors.most_common()), tuple(model_uses(now, meter.counts("tokens"))), self._gpus(), moments, meter.recent()[:SHOWN])

    def plain(self) -> dict[str, Any]:
        """`look` as JSON; the moments with their age in place of a clock that nobody else has."""
        found = asdict(self.look())
        clock = time.monotonic()
        found["moments"] = [{**one, "at": round(one["at"] - clock, 1)} for one in found["moments"]]
        return found


def rate(moments: tuple[Moment, ...], name: str) -> float:
    """Of a total, a second, over the last `NOW` seconds."""
    if len(moments) < 2:
        return 0.0
    last = moments[-1]
    first = next((one for one in reversed(moments[:-1]) if last.at - one.at >= NOW), moments[0])
    grown, seconds = getattr(last, name) - getattr(first, name), last.at - first.at
    return grown / seconds if seconds > 0 else 0.0


def rates(moments: tuple[Moment, ...], name: str) -> list[tuple[float, float]]:
    """(seconds of the clock, what a total grew a second) between each two moments."""
    return [(now.at, (getattr(now, name) - getattr(before, name)) / (now.at - before.at))
            for before, now in zip(moments, moments[1:]) if now.at > before.at]


def spread(values: Iterable[float | None]) -> Spread:
    there = [value for value in values if value is not None]
    return Spread(len(there), *(percentile(there, part) for part in (0.5, 0.9, 0.99)))


def share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def model_uses(now: Any, tokens: Mapping[str, int]) -> Iterable[ModelUse]:
    """What each loaded model holds, from the snapshot; a resting one holds nothing."""
    for info in now.models:
        resting = info.name in now.resting
        cache = {} if resting else now.counters.get("models", {}).get(info.name, {}).get("cache", {})
        page = (info.kv_bytes_per_token or 0) * cache.get("page_size", 0)
        yield ModelUse(info.name, info.backend, resting, 0 if resting else info.weights_bytes or 0, page,
                       *(cache.get(f"pages_{kind}", 0) for kind in ("total", "used", "free", "cached")), tokens.get(info.name, 0))
