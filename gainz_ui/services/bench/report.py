"""A measurement as our versioned JSON, with every raw pair, and as one sentence. The only place that knows both.

What the page, the command line and exports show is made from this; nothing is measured here.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

import psutil

from backends.base import ModelInfo
from gainz_ui.services.bench.configs import Config, differences, digest, resolved
from gainz_ui.services.bench.asking import Run
from gainz_ui.services.bench.protocol import ARMS, Design, Outcome
from gainz_ui.services.bench.roofline import roofline
from gainz_ui.services.doctor import cpu_name, package_version
from gainz_ui.services.stats import ALIKE, FASTER, SLOWER, UNKNOWN, Estimate

SCHEMA = "gainz-bench/1"
MEASURES: dict[str, Callable[[Run], float | None]] = {
    "decode": lambda run: run.decode,
    "decode_seen_by_client": lambda run: run.seen.rate,
    "prefill": lambda run: run.prefill,
    "ttft": lambda run: run.ttft,
    "end_to_end": lambda run: run.seen.total,
}
PACKAGES = ("torch", "transformers", "gradio", "numpy")


def report(design: Design, configs: Sequence[Config], infos: Sequence[ModelInfo], outcome: Outcome, bandwidth: float,
           gainz: str) -> dict[str, Any]:
    """Ratios are B to A: of speeds above 1 where B is faster, of times (ttft, end_to_end) below 1."""
    sides = [resolved(config, info) for config, info in zip(configs, infos)]
    differs = differences(*sides, {key for config in configs for key in config.options})
    verdict, main = outcome.verdict(), outcome.estimate()
    said = {
        "schema": SCHEMA, "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": verdict.word, "more_pairs": verdict.more, **_estimate(main),
        "pairs": [asdict(pair) for pair in outcome.pairs], "repeated": outcome.repeated,
        "noisy": sum(bool(pair.noise) for pair in outcome.pairs), "warmups": outcome.warmups, "cancelled": outcome.cancelled,
        "differs": {key: list(pair) for key, pair in differs.items()}, "cause": next(iter(differs)) if len(differs) == 1 else None,
        "workload": design.workload.name, "tokens": design.workload.tokens, "mode": design.mode, "seed": design.seed,
        "block": design.block,
        "measures": {name: _estimate(outcome.estimate(of)) for name, of in MEASURES.items()},
        "environment": environment(bandwidth, gainz)}
    for arm, config, info, values in zip(ARMS, configs, infos, sides):
        runs = [getattr(pair, arm) for pair in outcome.pairs]
        said[arm] = {"asked": str(config), "resolved": values, "hash": digest(values), **summary(info, runs, bandwidth)}
    return said | {"sentence": sentence(said)}


def summary(info: ModelInfo, runs: Sequence[Run], bandwidth: float) -> dict[str, Any]:
    """Medians of one side; None: cannot be known. Memory in bytes, times in seconds, speeds in tokens a second."""
    middle = {name: _median(of(run) for run in runs) for name, of in MEASURES.items()}
    passes = sum(run.passes for run in runs)
    tokens = sum(run.tokens for run in runs)
    drafted = sum(run.drafted for run in runs)
    gaps = sorted(gap for run in runs for gap, _ in run.seen.gaps)
    depth = fmean(run.prompt_tokens + run.tokens / 2 for run in runs) if runs else 0.0
    found = roofline(info, depth, bandwidth, middle["decode"], middle["prefill"], tokens / passes if passes else 1.0)
    return {**middle, "tpot": 1 / middle["decode"] if middle["decode"] else None,
            "itl_p50": _at(gaps, 0.5), "itl_p99": _at(gaps, 0.99),
            "acceptance": sum(run.accepted for run in runs) / drafted if drafted else None,
            "tokens_per_pass": tokens / passes if passes else None,
            "memory": {"weights": info.weights_bytes, "kv_per_token": info.kv_bytes_per_token, "peak": info.peak_bytes},
            "load_seconds": info.load_seconds, "roofline": asdict(found) if found else None}


def sentence(said: Mapping[str, Any]) -> str:
    """The verdict in words, for a terminal; names a cause only where one setting differs."""
    word, ratio, interval = said["verdict"], said["ratio"], said["interval"]
    if ratio is None:
        return "Nothing could be compared."
    cause = f" ({said['cause']})" if said["cause"] else f"; the sides differ in {len(said['differs'])} settings" if said["differs"] else ""
    spread = f", {100 * (1 - said['level']):.4g} % interval {interval[0]:.3f} to {interval[1]:.3f}" if interval else ""
    figures = f"ratio {ratio:.3f}{spread}, {said['units']} prompts"
    if word == ALIKE:
        return f"SAME: B decodes as fast as A within 2 % ({figures}){cause}."
    if word in (FASTER, SLOWER):
        return f"{word}: B decodes at {ratio:.2f} times A's speed ({figures}){cause}."
    more = f" About {said['more_pairs']} more would tell." if said["more_pairs"] else ""
    return f"{UNKNOWN}: {figures}{cause}.{more}"


def environment(bandwidth: float, gainz: str) -> dict[str, Any]:
    return {"gainz": gainz, **{name: package_version(name) for name in PACKAGES}, "python": platform.python_version(),
            "system": platform.platform(terse=True), "machine": platform.machine(), "processor": cpu_name(),
            "cores": psutil.cpu_count(logical=False), "threads": psutil.cpu_count(), "bandwidth": bandwidth}


# ---------------------------------------------------------------------------------------------- small things
def _estimate(found: Estimate | None) -> dict[str, Any]:
    if found is None:
        return {"ratio": None, "geometric_mean": None, "interval": None, "level": None, "units": 0, "outliers": []}
    return {"ratio": found.ratio, "geometric_mean": found.geometric_mean, "interval": list(found.interval) if found.interval else None,
            "level": found.level, "units": found.units, "outliers": list(found.outliers)}


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _at(ordered: Sequence[float], share: float) -> float | None:
    """The nearest rank."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None
