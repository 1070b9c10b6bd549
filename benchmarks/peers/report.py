"""Figures as a table in the issue's order, and as JSON. A line that could not be measured stands there with its reason."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil

from benchmarks.peers.files import Files
from benchmarks.peers.plan import Comparison
from benchmarks.peers.session import Figures, shown
from gainz_ui.services import stats
from gainz_ui.services.doctor import cpu_field, cpu_flags, cpu_name


@dataclass(frozen=True)
class Ratio:
    """``value`` with a 95 % interval; None where the pairs are too few for one."""

    value: float
    low: float | None
    high: float | None
    pairs: int


@dataclass(frozen=True)
class Line:
    """One promise, and what became of it."""

    work: str
    what: str
    target: float
    most: bool
    against: str = ""
    ratio: Ratio | None = None
    ours: str = ""
    theirs: str = ""
    reason: str = ""

    @property
    def verdict(self) -> str:
        """"met" or "missed"; "…, not sure" where the interval holds the target or there is none; "not measured"."""
        if self.ratio is None:
            return "not measured"
        if self.ratio.low is None or self.ratio.low <= self.target <= self.ratio.high:
            value = self.ratio.value
            return "met, not sure" if (value <= self.target if self.most else value >= self.target) else "missed, not sure"
        met = self.ratio.high < self.target if self.most else self.ratio.low > self.target
        return "met" if met else "missed"


def lines(figures: Sequence[Figures], files: Files) -> list[Line]:
    return [line(found, compared, files) for found in figures for compared in found.workload.comparisons]


def line(found: Figures, compared: Comparison, files: Files) -> Line:
    head = {"work": found.workload.title, "what": compared.label, "target": compared.target, "most": compared.most}
    values, arms = found.values, {arm.key: arm for arm in found.workload.arms}
    if compared.ours not in values:
        return Line(**head, reason=f"{compared.ours}: {found.skipped.get(compared.ours, 'no figures')}")
    there = [key for key in compared.theirs if key in values]
    if not there:
        return Line(**head, reason="; ".join(f"{key}: {found.skipped.get(key, 'no figures')}" for key in compared.theirs))
    best = (min if compared.most else max)(there, key=lambda key: statistics.median(values[key]))
    ours = values[compared.ours]
    if compared.scale == "read":
        size = files.read_bytes(arms[compared.ours].model)
        ours = [value * size for value in ours]
        text = f"{statistics.median(ours) / 1e9:.2f} GB/s"
    else:
        text = shown(arms[compared.ours], statistics.median(ours))
    missing = "; ".join(f"without {key}: {found.skipped.get(key, '')}" for key in compared.theirs if key not in values)
    return Line(**head, against=best, ratio=ratio(ours, values[best]), ours=text,
                theirs=shown(arms[best], statistics.median(values[best])), reason=missing)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of runs of the same round, position by position. Raises ValueError where they do not pair."""
    found = stats.estimate([math.log(a / b) for a, b in zip(ours, theirs, strict=True)])
    return Ratio(found.ratio, *(found.interval or (None, None)), found.units)


def table(rows: Sequence[Line]) -> str:
    """Markdown."""
    out = ["| work | compared | ours | theirs | ratio (95 % interval) | target | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        sign = "≤" if row.most else "≥"
        if row.ratio is None:
            measured = f"— | — | — | {sign} {row.target:g} | not measured: {row.reason}"
        else:
            found = row.ratio
            interval = "" if found.low is None else f" ({found.low:.2f} to {found.high:.2f})"
            note = f"; {row.reason}" if row.reason else ""
            measured = (f"{row.ours} | {row.against}: {row.theirs} | {found.value:.2f}{interval} | {sign} {row.target:g} | "
                        f"{row.verdict}{note}")
        out.append(f"| {row.work} | {row.what} | {measured} |")
    return "\n".join(out)


def as_json(figures: Sequence[Figures], rows: Sequence[Line], versions: dict, threads: int) -> dict:
    return {"machine": machine(threads), "versions": versions,
            "lines": [asdict(row) | {"verdict": row.verdict} for row in rows],
            "workloads": {found.workload.name: {
                "title": found.workload.title, "figures": found.values, "disturbed": found.disturbed, "loads": found.loads,
                "skipped": found.skipped, "same_ids": same_ids(found)} for found in figures}}


def same_ids(found: Figures) -> dict[str, int]:
    """How many of its first greedy ids each arm shares with the first arm of the same model."""
    shared, first = {}, {}
    for arm in found.workload.arms:
        ids = found.ids.get(arm.key)
        if ids:
            reference = first.setdefault(arm.model, ids)
            shared[arm.key] = next((i for i, (a, b) in enumerate(zip(ids, reference)) if a != b), min(len(ids), len(reference)))
    return shared


def machine(threads: int) -> dict:
    wanted = ("avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm")
    flags = cpu_flags()
    return {"processor": cpu_name(), "cores": psutil.cpu_count(),
            "threads": threads, "memory_gb": round(psutil.virtual_memory().total / 1e9, 1), "system": platform.platform(),
            "python": platform.python_version(), "instructions": [flag for flag in wanted if flag in flags],
            "caches": cpu_field("cache size")}
