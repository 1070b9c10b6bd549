"""/metrics in Prometheus' text form: what the studio's snapshot knows. A registry of its own for each scrape: no global."""

from __future__ import annotations

import re
from collections.abc import Iterator

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
        for key, value in now.counters.items():
            plain = re.sub(r"[^a-zA-Z0-9_]", "_", key)
            if plain.endswith("_total"):
                yield CounterMetricFamily(f"gainz_engine_{plain}", "counted by the engine since it started", value=value)
            else:
                yield GaugeMetricFamily(f"gainz_engine_{plain}", "reported by the engine with its last heartbeat", value=value)


def render(studio: Studio) -> tuple[str, str]:
    """Text and content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Source(studio.snapshot()))
    return generate_latest(registry).decode(), CONTENT_TYPE_LATEST
