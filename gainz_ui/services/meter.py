"""What this server has been asked since it began: totals that only grow, distributions, the last requests, the last minutes.

The one home of these figures: /metrics, the monitor tab and the diagnostics read them here. It is told of every request's end
(`records.py`) and of every heartbeat of the engine (`studio.py`), and holds no prompt, no answer and no key. Refuses to know
how figures are shown.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)        # seconds
TPOT_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
TOTAL_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
KEPT, MOMENTS = 1000, 300               # requests and moments remembered
APART = 1.0                             # seconds between two moments
COUNTED = ("requests", "prompt_tokens", "tokens", "cached_tokens", "drafted", "accepted", "preemptions", "steps")


@dataclass(frozen=True)
class Ended:
    """One request that is over, or was refused. Seconds; None = it did not come to that."""

    at: float                           # seconds since 1970
    id: str
    model: str
    kind: str                           # "generate" | "embed"
    key: str                            # label of the API key, "" = none was asked for
    finish: str                         # "stop", "length" …; of several choices joined by "/"
    error: str                          # code, "" = none
    draft: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    drafted: int = 0
    accepted: int = 0
    queue: float | None = None
    ttft: float | None = None
    tpot: float | None = None           # seconds a token after the first
    total: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class Moment:
    """How things stood. ``at``: seconds of the monotonic clock; tokens: since the server began; memory in bytes."""

    at: float
    tokens: int
    prompt_tokens: int
    running: int
    waiting: int
    pages_used: int
    pages_total: int
    engine: int
    front: int


class Histogram:
    """Counts by upper bound, as Prometheus has them: a value belongs to the first bound that is not below it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[next((i for i, bound in enumerate(self.bounds) if value <= bound), len(self.bounds))] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, int]]:
        """(upper bound, how many are not above it); the last is +Inf with all of them."""
        total, out = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            out.append((bound, total))
        return out


class EngineTotals:
    """The engine's counts by model, summed over loads and lives of the engine: an unload or a death takes nothing away."""

    def __init__(self) -> None:
        self.sums: dict[str, Counter[str]] = {}
        self._last: dict[str, dict[str, int]] = {}

    def take(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        for name, counts in models.items():
            now = {key: counts[key] for key in COUNTED if isinstance(counts.get(key), int)}
            last = self._last.get(name, {})
            # a count that fell belongs to a model that was loaded anew
            grown = {key: value - last.get(key, 0) if value >= last.get(key, 0) else value for key, value in now.items()}
            self.sums.setdefault(name, Counter()).update(grown)
        self._last = {name: dict(counts) for name, counts in models.items()}

    def sum(self, key: str) -> int:
        return sum(counts[key] for counts in self.sums.values())


class Meter:
    """Thread-safe; one for each studio."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine = EngineTotals()
        self._finished: Counter[tuple[str, str]] = Counter()
        self._errors: Counter[tuple[str, str]] = Counter()
        self._statuses: Counter[int] = Counter()
        self._times: dict[tuple[str, str], Histogram] = {}
        self._recent: deque[Ended] = deque(maxlen=KEPT)
        self._moments: deque[Moment] = deque(maxlen=MOMENTS)

    # ------------------------------------------------------------------------------------------ told
    def ended(self, facts: Mapping[str, Any]) -> None:
        """A line of the request log."""
        one = _ended(facts)
        model = one.model if facts.get("backend") else ""       # a name that is no model's makes no series of its own
        with self._lock:
            self._recent.append(one)
            self._finished.update((model, finish) for finish in facts["finish"])
            if one.error:
                self._errors[model, one.error] += 1
            for name, value, bounds in (("ttft", one.ttft, TTFT_BOUNDS), ("tpot", one.tpot, TPOT_BOUNDS), ("request", one.total, TOTAL_BOUNDS),
                                        ("queue", one.queue, TTFT_BOUNDS)):
                if value is not None:
                    self._times.setdefault((name, model), Histogram(bounds)).add(value)

    def failed(self, code: str) -> None:
        """A fault of ours outside every request that has a record."""
        with self._lock:
            self._errors["", code] += 1

    def answered(self, status: int) -> None:
        """An HTTP answer has begun, refusals at the door among them."""
        with self._lock:
            self._statuses[status] += 1

    def heard(self, counters: Mapping[str, Any]) -> None:
        """A heartbeat of the engine."""
        with self._lock:
            self._engine.take(counters.get("models", {}))

    def due(self) -> bool:
        """Is the last moment old enough for another one?"""
        return not self._moments or time.monotonic() - self._moments[-1].at >= APART

    def mark(self, running: int, waiting: int, pages: tuple[int, int], engine: int, front: int) -> None:
        """Remember this moment. ``pages``: of the KV cache, used and in all."""
        with self._lock:
            self._moments.append(Moment(time.monotonic(), self._engine.sum("tokens"), self._engine.sum("prompt_tokens"), running, waiting,
                                        *pages, engine, front))

    # ------------------------------------------------------------------------------------------ asked
    def recent(self, seconds: float | None = None) -> tuple[Ended, ...]:
        """Newest first; of the last so many seconds."""
        since = time.time() - seconds if seconds else 0.0
        with self._lock:
            return tuple(one for one in reversed(self._recent) if one.at >= since)

    def moments(self) -> tuple[Moment, ...]:
        """Oldest first."""
        with self._lock:
            return tuple(self._moments)

    def counts(self, key: str) -> dict[str, int]:
        """One of `COUNTED` by model."""
        with self._lock:
            return {name: counts[key] for name, counts in self._engine.sums.items()}

    def finished(self) -> dict[tuple[str, str], int]:
        """Choices by (model, why they ended)."""
        with self._lock:
            return dict(self._finished)

    def errors(self) -> dict[tuple[str, str], int]:
        """Requests by (model, code of the error)."""
        with self._lock:
            return dict(self._errors)

    def statuses(self) -> dict[int, int]:
        with self._lock:
            return dict(self._statuses)

    def times(self, name: str) -> dict[str, tuple[list[tuple[str, int]], float]]:
        """By model: `Histogram.buckets` and sum of "ttft", "tpot", "request" or "queue"."""
        with self._lock:
            return {model: (one.buckets(), one.sum) for (kind, model), one in self._times.items() if kind == name}


def _ended(facts: Mapping[str, Any]) -> Ended:
    speed = facts.get("decode_tps")
    return Ended(time.time(), facts.get("id") or "", facts.get("model") or "", facts.get("kind") or "generate", facts.get("key") or "",
                 "/".join(dict.fromkeys(facts["finish"])), facts.get("error") or "", facts.get("draft") or "", facts.get("prompt_tokens"),
                 facts.get("completion_tokens"), facts.get("cached_tokens"), facts.get("drafted") or 0, facts.get("accepted") or 0,
                 facts.get("queue_s"), facts.get("ttft_s"), 1 / speed if speed else None, facts.get("total_s"), speed)


def percentile(values: list[float], share: float) -> float | None:
    """Linear between neighbours (numpy's default); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)
