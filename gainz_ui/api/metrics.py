"""/metrics in Prometheus' text form: what the studio's snapshot knows. A registry of its own for each scrape: no global."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from gainz_ui.services.studio import Snapshot, Studio


class _Source:
    def __init__(self, now: Snapshot) -> None:
        self.now = now

    def collect(self) -> Iterator[Metric]:
        now = self.now
        for name, help_text, value in (
                ("gainz_ready", "1 when /health answers 200", float(now.healthy)),
                ("gainz_models_loaded", "models in memory", len(now.models)),
                ("gainz_requests_running", "requests being computed", now.running),
                ("gainz_requests_waiting", "requests in the queue", now.waiting),
                ("gainz_queue_limit", "requests that may wait", now.queue_limit),
                ("gainz_uptime_seconds", "seconds since the start", now.uptime)):
            yield GaugeMetricFamily(name, help_text, value=value)
        memory = GaugeMetricFamily("gainz_memory_bytes", "resident memory of a process; of the machine", labels=["of"])
        for key in ("total", "available", "engine", "front"):
            memory.add_metric([key], getattr(now.memory, key))
        yield memory
        yield from _engine(now.counters)


COUNTED = {"steps": "forward passes", "requests": "requests admitted", "prompt_tokens": "tokens of prompts",
           "tokens": "tokens generated", "cached_tokens": "prompt tokens found in the prefix cache",
           "drafted": "draft tokens proposed", "accepted": "draft tokens kept", "preemptions": "sequences set back for want of pages"}


def _engine(counters: Mapping[str, Any]) -> Iterator[Metric]:
    """The engine's totals as it last told them; by model where it counts by model."""
    for key, help_text in COUNTED.items():
        if isinstance(counters.get(key), (int, float)):
            yield CounterMetricFamily(f"gainz_{key}", help_text, value=counters[key])
    errors = CounterMetricFamily("gainz_errors", "requests that ended with an error, by its code", labels=["code"])
    for code, count in counters.get("errors", {}).items():
        errors.add_metric([code], count)
    yield errors
    pages = GaugeMetricFamily("gainz_pages", "pages of the KV cache", labels=["model", "state"])
    for model, counts in counters.get("models", {}).items():
        for key, value in counts.get("cache", {}).items():
            if key.startswith("pages_") and isinstance(value, int):
                pages.add_metric([model, key.removeprefix("pages_")], value)
    yield pages


def render(studio: Studio) -> tuple[str, str]:
    """Text and content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Source(studio.snapshot()))
    return generate_latest(registry).decode(), CONTENT_TYPE_LATEST
