"""/metrics in Prometheus' text form: what the studio's snapshot and its meter know. A registry of its own for each scrape: no global.

Names and units are Prometheus' way: seconds and bytes, counters end in _total, distributions are histograms whose series only grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from gainz_ui import __version__
from gainz_ui.services.gpu import GpuUse
from gainz_ui.services.meter import Meter
from gainz_ui.services.monitor import ModelUse, model_uses
from gainz_ui.services.studio import Snapshot, Studio

COUNTED = {"steps": "forward passes", "requests": "requests that the engine admitted", "prompt_tokens": "tokens of prompts",
           "tokens": "tokens generated", "cached_tokens": "prompt tokens found in the prefix cache",
           "drafted": "draft tokens proposed", "accepted": "draft tokens kept", "preemptions": "sequences set back for want of pages"}
TIMES = {"ttft": ("gainz_ttft_seconds", "from a request to its first token"), "tpot": ("gainz_tpot_seconds", "for each token after the first"),
         "queue": ("gainz_queue_seconds", "waiting in the queue"), "request": ("gainz_request_seconds", "from a request to its end")}


class _Source:
    def __init__(self, now: Snapshot, meter: Meter, gpus: tuple[GpuUse, ...]) -> None:
        self.now, self.meter, self.gpus = now, meter, gpus

    def collect(self) -> Iterator[Metric]:
        now = self.now
        yield InfoMetricFamily("gainz_build", "which Gainz answers", value={"version": __version__})
        for name, help_text, value in (
                ("gainz_ready", "1 when /health answers 200", float(now.healthy)),
                ("gainz_models_loaded", "models that are loaded, resting ones among them", len(now.models)),
                ("gainz_requests_running", "requests being computed", now.running),
                ("gainz_requests_waiting", "requests in the queue", now.waiting),
                ("gainz_queue_limit", "requests that may wait", now.queue_limit),
                ("gainz_uptime_seconds", "seconds since the start", now.uptime)):
            yield GaugeMetricFamily(name, help_text, value=value)
        memory = GaugeMetricFamily("gainz_memory_bytes", "resident memory of a process; of the machine", labels=["of"])
        for key in ("total", "available", "engine", "front"):
            memory.add_metric([key], getattr(now.memory, key))
        yield memory
        yield from _models(list(model_uses(now, {})))
        yield from _totals(self.meter)
        for kind, (name, help_text) in TIMES.items():
            yield _histogram(name, "seconds " + help_text, self.meter.times(kind))
        yield from _gpus(self.gpus)


def _labelled(family: Any, rows: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    for labels, value in rows:
        family.add_metric(list(labels), value)
    return family


def _models(uses: list[ModelUse]) -> Iterator[Metric]:
    yield _labelled(GaugeMetricFamily("gainz_model_weights_bytes", "bytes of a model's weights in memory", labels=["model"]),
                    (((one.name,), one.weights) for one in uses))
    yield _labelled(GaugeMetricFamily("gainz_model_resting", "1 for a model that gave its memory back until it is asked for", labels=["model"]),
                    (((one.name,), float(one.resting)) for one in uses))
    kinds = ("total", "used", "free", "cached")
    yield _labelled(GaugeMetricFamily("gainz_pages", "pages of a model's KV cache: used, cached as a prefix, or free", labels=["model", "state"]),
                    (((one.name, kind), getattr(one, f"pages_{kind}")) for one in uses for kind in kinds))
    yield _labelled(GaugeMetricFamily("gainz_kv_bytes", "bytes of a model's KV cache", labels=["model", "state"]),
                    (((one.name, kind), getattr(one, f"pages_{kind}") * one.page_bytes) for one in uses for kind in kinds))


def _totals(meter: Meter) -> Iterator[Metric]:
    for key, help_text in COUNTED.items():
        yield _labelled(CounterMetricFamily(f"gainz_{key}", help_text, labels=["model"]),
                        (((model,), count) for model, count in meter.counts(key).items()))
    yield _labelled(CounterMetricFamily(
        "gainz_errors", "well-formed requests that ended with an error or were refused, and faults of the server, by code", labels=["model", "code"]),
                    meter.errors().items())
    yield _labelled(CounterMetricFamily("gainz_finished", "answers that ended, by the reason", labels=["model", "reason"]), meter.finished().items())
    yield _labelled(CounterMetricFamily("gainz_http_responses", "HTTP answers by status, refusals at the door among them", labels=["status"]),
                    (((str(status),), count) for status, count in sorted(meter.statuses().items())))


def _histogram(name: str, help_text: str, found: dict[str, Any]) -> Metric:
    family = HistogramMetricFamily(name, help_text, labels=["model"])
    for model, (buckets, total) in found.items():
        family.add_metric([model], buckets, total)
    return family


def _gpus(gpus: tuple[GpuUse, ...]) -> Iterator[Metric]:
    """Only where there is a device: a family without series would say that none is used."""
    if not gpus:
        return
    labels = ["gpu", "name"]
    memory = GaugeMetricFamily("gainz_gpu_memory_bytes", "memory of a GPU", labels=[*labels, "of"])
    busy = GaugeMetricFamily("gainz_gpu_utilization_ratio", "share of the last moment in which a GPU computed", labels=labels)
    for number, gpu in enumerate(gpus):
        for kind in ("used", "total"):
            memory.add_metric([str(number), gpu.name, kind], getattr(gpu, kind))
        if gpu.busy is not None:
            busy.add_metric([str(number), gpu.name], gpu.busy)
    yield memory
    yield busy


def render(studio: Studio, gpus: tuple[GpuUse, ...] = ()) -> tuple[str, str]:
    """Text and content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Source(studio.snapshot(), studio.meter, gpus))
    return generate_latest(registry).decode(), CONTENT_TYPE_LATEST
