"""The quality report: variants against one reference, and what may be concluded from the figures.

Knows intervals and says nothing without one: "no measurable difference" only where KL divergence and flips agree on it, a
rank only as far as the intervals tell variants apart. The figures come from a child process (`python app.py quality`).
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from backends.base import Cancel, InvalidRequest, NotSupported, Progress, ProgressFn
from gainz_ui.services.jobs import Jobs

KIND = "quality"                        # of a task and of a folder in outputs/
FORMAT = "gainz-quality-1"
KL_FLOOR = 1e-4                         # nats; other kernels for the same weights differ by up to this
FLIP_FLOOR = 0.002                      # share of positions where the same cause flips the most probable token
LEAST = 8                               # windows below which an interval over windows says nothing
BESIDE = 800_000_000                    # bytes beside both models' weights: the libraries, one window's logits
Verdict = Literal["same", "differs", "undecided"]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Ask:
    """What to measure. ``text`` None: the bundled one; ``windows`` of ``window_tokens`` tokens from its start."""

    reference: str
    models: tuple[str, ...]
    text: Path | None = None
    windows: int = 24
    window_tokens: int = 512
    questions: bool = True

    def __post_init__(self) -> None:
        if not self.models or self.reference in self.models or len(set(self.models)) != len(self.models):
            raise InvalidRequest("Choose a reference and at least one other model.", field="models")
        if not (isinstance(self.windows, int) and 1 <= self.windows <= 10_000):
            raise InvalidRequest("windows must be a whole number from 1 to 10000.", field="windows", windows=self.windows)
        if not (isinstance(self.window_tokens, int) and 16 <= self.window_tokens <= 65_536):
            raise InvalidRequest("window_tokens must be a whole number from 16 to 65536.", field="window_tokens")
        if self.text is not None and not self.text.is_file():
            raise InvalidRequest("There is no such text file.", field="text", file=self.text)


class Quality:
    def __init__(self, studio: Any, jobs: Jobs) -> None:
        self.studio, self.jobs = studio, jobs

    def measure(self, ask: Ask, progress: ProgressFn, cancel: Cancel) -> dict[str, Any]:
        """The report: plain JSON, written to outputs/ as well. Models one after another, each beside the reference. One
        whose tokens are others' is refused with the reason, and the rest are measured."""
        rows, refused, entries = [], [], {name: self.studio.entry(name) for name in (ask.reference, *ask.models)}
        for number, model in enumerate(ask.models):
            try:
                found = self.jobs.run("quality", _arguments(ask, model), _part(progress, number, len(ask.models), model),
                                      cancel,
                                      self._need(ask.reference, model))
            except NotSupported as error:
                refused.append({"model": model, "reason": str(error), "code": error.code})
                continue
            rows.append({**found, "size": entries[model].size, "format": entries[model].format, "revision": entries[model].revision})
        report = finite(conclude({"format": FORMAT, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "reference": ask.reference,
                           "reference_size": entries[ask.reference].size, "reference_format": entries[ask.reference].format,
                           "reference_revision": entries[ask.reference].revision,
                           "text": str(ask.text.name) if ask.text else "bundled", "windows": ask.windows,
                           "window_tokens": ask.window_tokens, "rows": rows, "refused": refused}))
        self.studio.records.write_output(KIND, f"{time.strftime('%Y%m%d-%H%M%S')}-{_plain(ask.reference)}.json", report)
        return report

    def _need(self, *names: str) -> int:
        facts = [self.studio.details(name) for name in names]
        return BESIDE + sum(max(about.weights_bytes, about.disk_bytes) for about in facts)


def _arguments(ask: Ask, model: str) -> list[str]:
    out = ["--ref", ask.reference, "--model", model, "--windows", str(ask.windows), "--window-tokens",
           str(ask.window_tokens), "--pace"]
    out += ["--questions"] if ask.questions else []
    return out + (["--text", str(ask.text)] if ask.text is not None else [])


def _part(progress: ProgressFn, number: int, count: int, name: str) -> ProgressFn:
    def report(seen: Progress) -> None:
        where = f"{name} ({number + 1}/{count})" if count > 1 else name
        progress(Progress(seen.stage, seen.done, seen.total, " · ".join(part for part in (where, seen.note) if part)))
    return report


def _plain(name: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "._-" else "-" for sign in name)[:80].rstrip(". ") or "model"


# ---------------------------------------------------------------------------------------------- conclusions
def conclude(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report with a verdict and a rank for each row."""
    rows = report["rows"]
    ranks = rank([(row["kl_low"], row["kl_high"]) for row in rows])
    judged = [{**row, "verdict": verdict(row), "likelihood": likelihood(row), "rank": list(place)} for row,
              place in zip(rows, ranks)]
    return {**report, "rows": judged}


def verdict(row: Row) -> Verdict:
    """"same": no measurable difference; said only where the interval of KL and that of flips both reach down to what
    rounding alone causes. "differs": both stay above it. "undecided": they disagree, or the windows are too few for an
    interval."""
    flips_low = 1.0 - row["top1_high"]
    if row["windows"] < LEAST or not all(math.isfinite(value) for value in (row["kl_low"], row["kl_high"], flips_low)):
        return "undecided"
    kl_same, flips_same = row["kl_low"] <= KL_FLOOR, flips_low <= FLIP_FLOOR
    task = row.get("questions")
    if kl_same and flips_same and (task is None or task["difference_low"] <= 0 <= task["difference_high"]):
        return "same"
    return "differs" if not kl_same and not flips_same else "undecided"


def likelihood(row: Row) -> dict[str, Any]:
    """How much likelier or less likely the text is to the model than to the reference, paired: a factor on perplexity with
    its interval, and "higher", "lower" or "open" where the interval includes none."""
    gap, half = row["nll_difference"], 1.959964 * row["nll_difference_se"]
    if not math.isfinite(half):
        return {"factor": math.exp(gap), "low": None, "high": None, "direction": "open"}
    direction = "higher" if gap - half > 0 else "lower" if gap + half < 0 else "open"
    return {"factor": math.exp(gap), "low": math.exp(gap - half), "high": math.exp(gap + half), "direction": direction}


def rank(intervals: Sequence[tuple[float, float]]) -> list[tuple[int, int]]:
    """(best, worst) place that each can have: those whose intervals overlap are not told apart. Lower is better."""
    def sure(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return a[1] < b[0]              # never true with a nan: no interval, no rank
    return [(1 + sum(sure(other, own) for other in intervals), len(intervals) - sum(sure(own, other) for other in intervals))
            for own in intervals]


# ---------------------------------------------------------------------------------------------- files
COLUMNS = ("model", "format", "size", "perplexity", "perplexity_se", "reference_perplexity", "reference_perplexity_se",
           "kl_mean", "kl_low", "kl_high", "kl_median", "kl_p99", "kl_max", "top1", "top1_low", "top1_high", "verdict",
           "tokens", "windows", "window_tokens", "text", "text_sha256", "model_kernels", "model_dtype", "reference_kernels", "reference_dtype")
TASK = ("questions", "accuracy", "accuracy_low", "accuracy_high", "reference_accuracy", "lost", "won", "flips", "flips_low",
        "flips_high", "difference", "difference_low", "difference_high")
PACE = ("speed", "low", "high")


def to_csv(report: Mapping[str, Any]) -> str:
    """One line a variant; units as in the report: nats, shares, tokens a second, bytes."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["reference", *COLUMNS, "rank_best", "rank_worst", *(f"task_{name}" for name in TASK),
                     *(f"pace_{name}" for name in PACE),
                     *(f"reference_pace_{name}" for name in PACE)])
    for row in report["rows"]:
        task, pace, theirs = (row.get(name) or {} for name in ("questions", "pace", "reference_pace"))
        writer.writerow([_cell(report["reference"]), *(_cell(row.get(name, "")) for name in COLUMNS), *row["rank"],
                         *(task.get(name, "") for name in TASK), *(pace.get(name, "") for name in PACE),
                         *(theirs.get(name, "") for name in PACE)])
    return out.getvalue()


def _cell(value: Any) -> Any:
    """A text that a spreadsheet would run as a formula gets a quote in front."""
    return "'" + value if isinstance(value, str) and value[:1] in "=+-@" else value


def to_json(report: Mapping[str, Any]) -> str:
    return json.dumps(report, ensure_ascii=False, indent=1)


def finite(value: Any) -> Any:
    """None for what is no number: JSON has no nan."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
