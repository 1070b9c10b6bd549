"""A against A, once for each machine: where that finds a difference, no verdict of this machine is worth anything.

One side is measured against itself before the first benchmark, and the outcome is kept beside the results. While it fails, or is too
coarse, it is tried again before each benchmark. While it fails there are no verdicts; while it is coarse, only of differences beyond
what A against A leaves open: noise that wide may hide a bias of that size.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import psutil

from gainz_ui.services.bench.protocol import Design, Outcome
from gainz_ui.services.bench.workloads import bundled
from gainz_ui.services.doctor import cpu_name
from gainz_ui.services.stats import ALIKE, LOOKS, SAME, UNKNOWN

KIND = "calibration"                    # folder in outputs/
PAIRS, TOKENS = LOOKS[0], 32
TRIES = 2                               # one in twenty fails by chance, one in four hundred twice
# Half-width of the interval up to which the machine is sound: with the pairs of the last look, four times as many, it halves to the
# margin of SAME. A wider one could not tell SAME from a difference at all.
SOUND = SAME * math.sqrt(LOOKS[-1] / PAIRS)


def machine() -> str:
    """Twelve hexadecimal digits: the same for the same machine and system."""
    facts = (cpu_name(), platform.machine(), platform.system(), psutil.cpu_count(), platform.node())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def design(of: Design) -> Design:
    """Short answers to the usual prompts, whatever is compared: their number must allow an interval."""
    return replace(of, workload=bundled("prose", tokens=TOKENS), pairs=PAIRS, drafts=(None, None), streams=1)


def known(records: Any) -> dict[str, Any] | None:
    """What was found for this machine; None: nothing yet, or it cannot be read."""
    try:
        found = json.loads(next(path for path in records.outputs_of(KIND) if path.stem == machine()).read_text(encoding="utf-8"))
    except (StopIteration, OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "passed" in found else None


def calibrate(records: Any, measure: Callable[[], Outcome]) -> dict[str, Any] | None:
    """What is known where it is sound, else the best of a few tries. None: cancelled before there was an answer."""
    found = known(records)
    if found is not None and sound(found):
        return found
    tries: list[dict[str, Any]] = []
    while len(tries) < TRIES and not (tries and sound(tries[-1])):
        outcome = measure()
        if outcome.cancelled or not outcome.pairs:
            return None
        tries.append(_judged(outcome))
    found = min(tries, key=lambda one: (not one["passed"], _reach(one))) | {"attempts": len(tries)}
    records.write_output(KIND, f"{machine()}.json", found)
    return found


def sound(found: Mapping[str, Any]) -> bool:
    return found["passed"] and _reach(found) <= SOUND


def withheld(found: Mapping[str, Any] | None, word: str, interval: Sequence[float] | None) -> str:
    """Why this verdict is not given: "failed" (A differs from A), "coarse" (it is finer than A against A is known). Empty: it is."""
    if found is None or found["passed"] and (word == UNKNOWN or sound(found)):
        return ""
    if not found["passed"]:
        return "failed"
    reach = 1 + _reach(found)
    return "" if interval and (interval[0] > reach or interval[1] < 1 / reach) else "coarse"


def _reach(found: Mapping[str, Any]) -> float:
    half = found.get("half_width")
    return math.inf if half is None else half


def _judged(outcome: Outcome) -> dict[str, Any]:
    """``half_width``: of the interval of the log ratio, as a share; None: it has no interval."""
    estimate, word = outcome.estimate(), outcome.verdict().word
    low, high = estimate.interval if estimate and estimate.interval else (None, None)
    return {"machine": machine(), "made": datetime.now(UTC).isoformat(timespec="seconds"), "passed": word in (ALIKE, UNKNOWN),
            "pairs": len(outcome.pairs), "ratio": estimate.ratio if estimate else None, "interval": [low, high] if low else None,
            "half_width": math.sqrt(high / low) - 1 if low and high else None}
