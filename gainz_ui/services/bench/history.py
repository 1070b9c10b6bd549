"""Benchmarks that were run: kept in outputs/bench, listed, opened again, and what has changed since one of them.

Knows reports as JSON; nothing of how they came to be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.base import DraftSpec, InvalidRequest, NameRefused
from gainz_ui.services.bench.configs import Config
from gainz_ui.services.bench.report import SCHEMA

KIND = "bench"
LISTED = 200                            # the newest
ARMS = ("a", "b")


@dataclass(frozen=True)
class Entry:
    """One line of the list. ``made``: ISO 8601."""

    name: str
    made: str
    a: str
    b: str
    workload: str
    verdict: str
    ratio: float | None
    interval: tuple[float, float] | None
    pairs: int
    mode: str
    cancelled: bool

    def matches(self, words: str) -> bool:
        """Every word stands somewhere in it."""
        text = " ".join((self.name, self.made, self.a, self.b, self.workload, self.verdict, self.mode)).lower()
        return all(word in text for word in words.lower().split())


class History:
    """``records``: services.records.Records. Lists are read from the files; what was read is remembered while a file stays as it is."""

    def __init__(self, records: Any) -> None:
        self._records = records
        self._read: dict[Path, tuple[float, Entry | None]] = {}

    def keep(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """The report with its ``name``. DiskFull."""
        stamp = re.sub(r"\D", "", report["made"])[:14]
        base = f"{stamp[:8]}-{stamp[8:]}-{_plain(report['a']['asked'])}-{_plain(report['b']['asked'])}"
        taken = {path.stem for path in self._records.outputs_of(KIND)}
        name = next(name for number in range(1, 10_000) if (name := base if number == 1 else f"{base}-{number}") not in taken)
        kept = {**report, "name": name}
        self._records.write_output(KIND, f"{name}.json", json.dumps(kept, ensure_ascii=False, indent=1, default=str))
        return kept

    def entries(self, words: str = "") -> list[Entry]:
        """Newest first. Files that are no reports are passed over."""
        found = [self._entry(path) for path in self._records.outputs_of(KIND)[:LISTED] if path.suffix == ".json"]
        return [entry for entry in found if entry is not None and entry.matches(words)]

    def open(self, name: str) -> dict[str, Any]:
        """InvalidRequest where there is none of that name, or it cannot be read."""
        try:
            report = json.loads(self._records.output(KIND, f"{name}.json").read_text(encoding="utf-8"))
        except NameRefused as error:
            raise InvalidRequest(f"There is no benchmark {name!r}.", field="name") from error
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"The benchmark {name!r} cannot be read.", field="name", reason=error) from error
        if not isinstance(report, dict) or report.get("schema") != SCHEMA:
            raise InvalidRequest(f"{name!r} is no report of this version ({SCHEMA}).", field="name")
        return report

    def _entry(self, path: Path) -> Entry | None:
        try:
            changed = path.stat().st_mtime
        except OSError:
            return None
        if self._read.get(path, (None,))[0] != changed:
            self._read[path] = (changed, self._made(path.stem))
        return self._read[path][1]

    def _made(self, name: str) -> Entry | None:
        try:
            said = self.open(name)
            return Entry(name, said["made"], said["a"]["asked"], said["b"]["asked"], said["workload"], said["verdict"], said["ratio"],
                         tuple(said["interval"]) if said["interval"] else None, len(said["pairs"]), said["mode"], said["cancelled"])
        except (InvalidRequest, KeyError, TypeError):
            return None


def configs(report: Mapping[str, Any]) -> tuple[Config, Config]:
    """What was asked then, to be asked again."""
    made = (Config(side["model"], dict(side["options"]), DraftSpec(**side["draft"]) if side["draft"] else None)
            for side in (report["a"], report["b"]))
    return tuple(made)


# ---------------------------------------------------------------------------------------------- then and now
@dataclass(frozen=True)
class Change:
    """``part``: "a", "b", "machine" or "protocol"; values as they are in the reports."""

    part: str
    key: str
    before: Any
    after: Any


PROTOCOL = ("workload", "tokens", "mode", "streams", "planted")
NOISE = ("bandwidth",)                  # measured each time: no setting


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """What is not the same: versions and machine, protocol, and the resolved settings of each side."""
    found = [Change("machine", key, old, new) for key, old, new in _differ(before["environment"], after["environment"]) if key not in NOISE]
    found += [Change("protocol", key, before.get(key), after.get(key)) for key in PROTOCOL if before.get(key) != after.get(key)]
    for arm in ARMS:
        found += [Change(arm, key, old, new) for key, old, new in _differ(before[arm]["resolved"], after[arm]["resolved"])]
    return found


def speeds(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[float | None, float | None, float | None]]:
    """For each side the speed that the later report is about, then and now, and now over then where as many answers ran at once.
    Not paired: no interval belongs to it."""
    out = {}
    for arm in ARMS:
        then, now = (report[arm].get(after["main"]) for report in (before, after))
        out[arm] = (then, now, now / then if then and now and before["streams"] == after["streams"] else None)
    return out


def _differ(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(key, before.get(key), after.get(key)) for key in sorted({*before, *after}) if before.get(key) != after.get(key)]


def _plain(name: str) -> str:
    return "".join(sign if sign.isascii() and (sign.isalnum() or sign in "_-") else "-" for sign in name)[:36].strip("-") or "model"
