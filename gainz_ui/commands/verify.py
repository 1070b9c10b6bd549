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
    parser.add_argument("--repair", action="store_true", help="fetch the files that are not right again, from the same commit, and only those")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(settings: Settings, given: argparse.Namespace) -> int:
    bar = Bar()
    try:
        store = Store(settings.models)
        found = store.repair(given.name, bar) if given.repair else store.verify(given.name, bar)
    finally:
        bar.end()
    if given.json:
        show_json({**asdict(found), "ok": found.ok})
    else:
        show_table(("FILE", "STATE", "EXPECTED", "FOUND"), ((c.file, c.state, c.expected[:16], c.found[:16]) for c in found.files))
    if not found.ok:
        hub = str(store.manifest(given.name).get("source")).startswith("hub:")
        say(f"{given.name} is not as its manifest says. " + (f"`python app.py verify {given.name} --repair` fetches the bad files again." if hub
            else "Remove it and fetch it again."))
    return 0 if found.ok else 1
