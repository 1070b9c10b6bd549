"""Say what this machine has, what it lacks and what to do."""

from __future__ import annotations

import argparse

from gainz_ui.settings import Settings
from gainz_ui.terminal import say, show_json

NAME, HELP, ORDER = "doctor", "examine this machine: what is there, what is missing, what to do", 10
SETTINGS = ("host", "port", "models", "outputs", "logs")
MARKS = {"ok": "ok  ", "info": "    ", "warn": "WARN", "fail": "FAIL"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--quick", action="store_true", help="leave out what takes seconds: torch, kernels, bandwidth")
    parser.add_argument("--troubleshooting", action="store_true", help="print docs/troubleshooting.md and nothing else")


def run(settings: Settings, given: argparse.Namespace) -> int:
    if given.troubleshooting:
        from gainz_ui.services.troubleshooting import text
        print(text(), end="")
        return 0
    from gainz_ui.services import doctor
    if not given.quick:
        say("Measuring …")
    report = doctor.examine(settings, deep=not given.quick)
    if given.json:
        show_json(report.to_dict())
        return 0 if report.ok else 1
    width = max(len(check.name) for check in report.checks)
    section = None
    for check in report.checks:
        if check.section != section:
            section = check.section
            print(f"\n{section}")
        print(f"  {MARKS[check.status]} {check.name.ljust(width)}  {check.value}")
        if check.remedy:
            print(f"       {' ' * width}  → {check.remedy}")
    return 0 if report.ok else 1
