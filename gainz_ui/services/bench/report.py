"""A measurement as our versioned JSON, with every raw pair, and as one sentence. The only place that knows both.

What the page, the command line and exports show is made from this; nothing is measured here.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from statistics import median
from typing import Any

import psutil

from backends.base import ModelInfo
from gainz_ui.services.bench import calibration as calibrated
from gainz_ui.services.bench.configs import differences, digest, resolved
from gainz_ui.services.bench.asking import Answered, Run
from gainz_ui.services.bench.energy import Meter
from gainz_ui.services.bench.protocol import ARMS, Design, Outcome
from gainz_ui.services.bench.roofline import roofline
from gainz_ui.services.doctor import cpu_name, package_version
from gainz_ui.services.stats import ALIKE, FASTER, SLOWER, UNKNOWN, Estimate

SCHEMA = "gainz-bench/1"
MOST_MORE = 200                         # pairs more than that nobody waits for, nor does a machine stay the same meanwhile
MEASURES: dict[str, Callable[[Run], float | None]] = {
    "decode": lambda run: run.decode,
    "decode_seen_by_client": lambda run: run.seen.rate,
    "prefill": lambda run: run.prefill,
    "ttft": lambda run: run.ttft,
    "end_to_end": lambda run: run.seen.total,
    "throughput": lambda run: run.throughput,
    "joules_per_token": lambda run: run.joules / run.tokens if run.joules and run.tokens else None,
}
PACKAGES = ("torch", "transformers", "gradio", "numpy")


def report(design: Design, ask: Any, infos: Sequence[ModelInfo], outcome: Outcome, bandwidth: float, gainz: str,
           calibration: Mapping[str, Any] | None = None, meter: Meter | None = None) -> dict[str, Any]:
    """``ask``: a `run.Ask`. Ratios are B to A: of speeds above 1 where B is faster, of times (ttft, end_to_end) below 1. The verdict
    is about ``main``; ``withheld``: why there is none in spite of the figures, by `calibration.withheld`."""
    sides = [resolved(config, info) for config, info in zip(ask.configs, infos)]
    differs = differences(*sides, {key for config in ask.configs for key in config.options})
    verdict, main, meter = outcome.verdict(), outcome.estimate(), meter or Meter()
    withheld = calibrated.withheld(calibration, verdict.word, main.interval if main else None)
    said = {
        "schema": SCHEMA, "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": UNKNOWN if withheld else verdict.word, "more_pairs": None if withheld else verdict.more, "withheld": withheld,
        "calibration": calibration, "planted": ask.plant, "main": "throughput" if design.streams > 1 else "decode", "same": outcome.same,
        **_estimate(main),
        "pairs": [asdict(pair) for pair in outcome.pairs], "repeated": outcome.repeated,
        "noisy": sum(bool(pair.noise) for pair in outcome.pairs), "warmups": outcome.warmups, "cancelled": outcome.cancelled,
        "differs": {key: list(pair) for key, pair in differs.items()}, "cause": next(iter(differs)) if len(differs) == 1 else None,
        "workload": design.workload.name, "tokens": design.workload.tokens, "mode": design.mode, "seed": design.seed,
        "asked_pairs": design.pairs, "streams": design.streams, "block": design.block,
        "limits": {"ttft": ask.ttft_limit, "tpot": ask.tpot_limit},
        "measures": {name: _estimate(outcome.estimate(of)) for name, of in MEASURES.items()},
        "energy": {"source": meter.source, "reason": meter.reason}, "environment": environment(bandwidth, gainz)}
    for arm, config, info, values in zip(ARMS, ask.configs, infos, sides):
        runs = [getattr(pair, arm) for pair in outcome.pairs]
        said[arm] = {"asked": str(config), "model": config.model, "options": dict(config.options),
                     "draft": asdict(config.draft) if config.draft else None, "resolved": values, "hash": digest(values),
                     **summary(info, runs, bandwidth), **served(runs, ask.ttft_limit, ask.tpot_limit)}
    return said | {"sentence": sentence(said)}


def levels(outcomes: Mapping[int, Outcome], ask: Any, calibration: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """What each number of answers at once gave; [] where there was only one."""
    if len(outcomes) < 2:
        return []
    return [_level(streams, outcome, ask, calibration) for streams, outcome in outcomes.items()]


def _level(streams: int, outcome: Outcome, ask: Any, calibration: Mapping[str, Any] | None) -> dict[str, Any]:
    word, found = outcome.verdict().word, _estimate(outcome.estimate())
    return {"streams": streams, "verdict": UNKNOWN if calibrated.withheld(calibration, word, found["interval"]) else word,
            "pairs": len(outcome.pairs), **found,
            **{arm: served([getattr(pair, arm) for pair in outcome.pairs], ask.ttft_limit, ask.tpot_limit) for arm in ARMS}}


def served(runs: Sequence[Run], ttft_limit: float, tpot_limit: float) -> dict[str, Any]:
    """How answers fared that ran at once: tokens a second of all, answers a second that kept both limits (``goodput``: Zhong and
    others, DistServe, 2024), and how long they waited. Seconds; of each answer by itself."""
    answers = [answer for run in runs for answer in run.answers]
    seconds = sum(run.seen.total for run in runs)
    kept = sum(_kept(answer, ttft_limit, tpot_limit) for answer in answers)
    waits = [answer.queue for answer in answers if answer.queue is not None]
    return {"tokens_per_second": sum(run.tokens for run in runs) / seconds if seconds else None,
            "goodput": kept / seconds if seconds else None, "kept_limits": kept / len(answers) if answers else None,
            "queue_p50": _at(sorted(waits), 0.5), "queue_p99": _at(sorted(waits), 0.99),
            "answer_ttft_p50": _at(sorted(a.ttft for a in answers if a.ttft is not None), 0.5),
            "answer_ttft_p99": _at(sorted(a.ttft for a in answers if a.ttft is not None), 0.99)}


def _kept(answer: Answered, ttft_limit: float, tpot_limit: float) -> bool:
    return answer.ttft is not None and answer.ttft <= ttft_limit and (answer.tpot is None or answer.tpot <= tpot_limit)


def summary(info: ModelInfo, runs: Sequence[Run], bandwidth: float) -> dict[str, Any]:
    """Medians of one side; None: cannot be known. Memory in bytes, times in seconds, speeds in tokens a second."""
    middle = {name: _median(of(run) for run in runs) for name, of in MEASURES.items()}
    passes = sum(run.passes for run in runs)
    tokens = sum(run.tokens for run in runs)
    drafted = sum(run.drafted for run in runs)
    gaps = sorted(gap for run in runs for gap, _ in run.seen.gaps)
    depth = median(run.prompt_tokens + run.tokens / 2 for run in runs) if runs else 0.0       # as of the speeds
    found = roofline(info, depth, bandwidth, middle["decode"], middle["prefill"], tokens / passes if passes else 1.0,
                     alone=all(len(run.answers) < 2 for run in runs))
    return {**middle, "tpot": 1 / middle["decode"] if middle["decode"] else None,
            "itl_p50": _at(gaps, 0.5), "itl_p99": _at(gaps, 0.99),
            "acceptance": sum(run.accepted for run in runs) / drafted if drafted else None,
            "tokens_per_pass": tokens / passes if passes else None,
            "memory": memory(info),
            "load_seconds": info.load_seconds, "roofline": asdict(found) if found else None}


def memory(info: ModelInfo) -> dict[str, int | None]:
    """Bytes. ``kv``: of the whole context; ``workspace``: expected before the load; ``peak``: growth of the engine that was seen."""
    expected = info.estimate
    kv = expected.kv if expected else info.kv_bytes_per_token * info.context if info.kv_bytes_per_token else None
    return {"weights": info.weights_bytes, "kv": kv, "kv_per_token": info.kv_bytes_per_token,
            "workspace": expected.workspace if expected else None, "peak": info.peak_bytes}


def sentence(said: Mapping[str, Any]) -> str:
    """The verdict in words, for a terminal; names a cause only where one setting differs."""
    word, ratio, interval = said["verdict"], said["ratio"], said["interval"]
    if ratio is None:
        return "Nothing could be compared."
    if said["withheld"] == "coarse":
        return (f"{UNKNOWN}: ratio {ratio:.3f}, but A against A is known to {coarseness(said)} only on this machine: smaller differences "
                "cannot be told apart here.")
    if said["withheld"]:
        return "No verdict: this machine found a difference between A and A (calibration failed)."
    cause = f" ({said['cause']})" if caused(said) else f"; the sides differ in {_differing(said)}" if said["differs"] else ""
    spread = f", {100 * (1 - said['level']):.4g} % interval {interval[0]:.3f} to {interval[1]:.3f}" if interval else ""
    figures = f"ratio {ratio:.3f}{spread}, {said['units']} prompts"
    if word == ALIKE:
        return f"SAME: B decodes as fast as A within {100 * said['same']:g} % ({figures}){cause}."
    if word in (FASTER, SLOWER):
        does = "decodes" if said["main"] == "decode" else f"serves {said['streams']} answers at once"
        return f"{word}: B {does} at {ratio:.2f} times A's speed ({figures}){cause}."
    more = more_pairs(said)
    hope = "" if more is None else f" About {more} more pairs would tell, if the machine stays as quiet as it was." if more else \
        " More pairs would hardly tell here; a quieter machine or longer answers would."
    return f"{UNKNOWN}: {figures}{cause}.{hope}"


def caused(said: Mapping[str, Any]) -> bool:
    """Is there an effect, and one setting only that it can come from?"""
    return bool(said["cause"]) and said["verdict"] in (FASTER, SLOWER) and not said["planted"]


def more_pairs(said: Mapping[str, Any]) -> int | None:
    """How many more would likely tell, to two digits; 0: more would hardly, the noise is too large; None: that cannot be said."""
    more, found = said["more_pairs"], said["calibration"]
    if not more or not said["interval"]:
        return None
    return 0 if more > MOST_MORE or found and not calibrated.sound(found) else int(float(f"{more:.2g}"))


def coarseness(said: Mapping[str, Any]) -> str:
    """How far A against A is known: "± 3.1 %"."""
    half = (said["calibration"] or {}).get("half_width")
    return "± ? %" if half is None else f"± {100 * half:.1f} %"


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


def _differing(said: Mapping[str, Any]) -> str:
    return said["cause"] or f"{len(said['differs'])} settings"


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _at(ordered: Sequence[float], share: float) -> float | None:
    """The nearest rank."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None
