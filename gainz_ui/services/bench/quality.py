"""What a quality report says about the two models of a benchmark, beside their speed and memory. Knows both kinds of reports as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KIND = "quality"                        # folder in outputs/
LOOKED = 50                             # the newest reports


def beside(records: Any, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A point for each side: name, size (bytes in memory), speed with its quartiles, kl (None: the reference). [] where no quality
    report compares the two models, or one of them has no speed or size."""
    names = [report[arm]["model"] for arm in "ab"]
    far = _distance(records, *names)
    if far is None or report["main"] != "decode":
        return []
    points = []
    for arm, kl in zip("ab", far):
        speeds, held = sorted(run["decode"] for pair in report["pairs"] if (run := pair[arm])["decode"]), report[arm]["memory"]
        size = sum(held.get(name) or 0 for name in ("weights", "kv", "workspace"))
        if not speeds or not size:
            return []
        quartile = lambda share: speeds[min(int(share * len(speeds)), len(speeds) - 1)]  # noqa: B023, E731
        points.append({"name": f"{arm.upper()}: {report[arm]['model']}", "size": size, "kl": kl, "speed": report[arm]["decode"],
                       "low": quartile(0.25), "high": quartile(0.75)})
    return points


def _distance(records: Any, a: str, b: str) -> tuple[float | None, float | None] | None:
    """(KL of A, KL of B), None for whichever is the reference; newest report first."""
    if a == b:
        return None
    for path in records.outputs_of(KIND)[:LOOKED]:
        found = _read(path)
        by_model = {row["model"]: row["kl_mean"] for row in found.get("rows", ())}
        if found.get("reference") == a and b in by_model:
            return None, by_model[b]
        if found.get("reference") == b and a in by_model:
            return by_model[a], None
    return None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) and all("kl_mean" in row and "model" in row for row in found.get("rows", ())) else {}
    except (OSError, ValueError, TypeError):            # no report of ours: passed over
        return {}
