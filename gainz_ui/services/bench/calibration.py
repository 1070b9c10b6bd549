"""A against A, once for each machine: where that finds a difference, no verdict of this machine is worth anything.

One side is measured against itself before the first benchmark, and the outcome is kept beside the results. While it fails, it is
tried again before each benchmark, and verdicts are withheld. It also says how small a difference this machine can tell at all.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import psutil

from gainz_ui.services.bench.protocol import Design, Outcome
from gainz_ui.services.doctor import cpu_name
from gainz_ui.services.stats import ALIKE, UNKNOWN

KIND = "calibration"                    # folder in outputs/
PAIRS, TOKENS = 8, 32
TRIES = 2                               # one in twenty fails by chance, one in four hundred twice


def machine() -> str:
    """Twelve hexadecimal digits: the same for the same machine and system."""
    facts = (cpu_name(), platform.machine(), platform.system(), psutil.cpu_count(), platform.node())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def design(of: Design) -> Design:
    """The comparison's own, but short, of a fixed length, and without drafts."""
    return replace(of, workload=replace(of.workload, tokens=min(TOKENS, of.workload.tokens)), pairs=PAIRS,
                   drafts=(None, None), streams=1)


def known(records: Any) -> dict[str, Any] | None:
    """What was found for this machine; None: nothing yet, or it cannot be read."""
    try:
        found = json.loads(next(path for path in records.outputs_of(KIND) if path.stem == machine()).read_text(encoding="utf-8"))
    except (StopIteration, OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "passed" in found else None


def calibrate(records: Any, measure: Callable[[], Outcome]) -> dict[str, Any] | None:
    """What is known where it passed, else anew. None: cancelled before there was an answer."""
    found = known(records)
    if found is not None and found["passed"]:
        return found
    for attempt in range(1, TRIES + 1):
        outcome = measure()
        if outcome.cancelled or not outcome.pairs:
            return None
        found = _judged(outcome, attempt)
        if found["passed"]:
            break
    records.write_output(KIND, f"{machine()}.json", found)
    return found


def _judged(outcome: Outcome, attempt: int) -> dict[str, Any]:
    """``half_width``: of the interval of the log ratio, as a share: differences below it are not told with so few pairs."""
    estimate, word = outcome.estimate(), outcome.verdict().word
    low, high = estimate.interval if estimate and estimate.interval else (None, None)
    return {"machine": machine(), "made": datetime.now(UTC).isoformat(timespec="seconds"), "passed": word in (ALIKE, UNKNOWN),
            "pairs": len(outcome.pairs), "ratio": estimate.ratio if estimate else None, "interval": [low, high] if low else None,
            "half_width": math.sqrt(high / low) - 1 if low and high else None, "attempts": attempt}
