"""Compare a model's files with its manifest."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from gainz_ui.services.store import Store
from gainz_ui.settings import Settings
from gainz_ui.terminal import Bar, say, show_json, show_table

NAME, HELP, ORDER = "verify", "compare a model's files with its manifest: sizes and checksums", 50
SETTINGS = ("models",)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the model")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(settings: Settings, given: argparse.Namespace) -> int:
    bar = Bar()
    try:
        found = Store(settings.models).verify(given.name, bar)
    finally:
        bar.end()
    if given.json:
        show_json({**asdict(found), "ok": found.ok})
    else:
        show_table(("FILE", "STATE", "EXPECTED", "FOUND"), ((c.file, c.state, c.expected[:16], c.found[:16]) for c in found.files))
    if not found.ok:
        say(f"{given.name} is not as its manifest says. Remove it and fetch it again.")
    return 0 if found.ok else 1
