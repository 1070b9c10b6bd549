"""Keep a model at its revision, whatever is pulled."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from gainz_ui.services.revisions import Kept
from gainz_ui.services.store import Store
from gainz_ui.settings import Settings
from gainz_ui.terminal import say, show_json

NAME, HELP, ORDER = "pin", "keep a model at its revision, whatever is pulled; --off lets it go", 52
SETTINGS = ("models",)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the model")
    parser.add_argument("--off", action="store_true", help="no longer")
    parser.add_argument("--json", action="store_true", help="print its revisions as JSON")


def run(settings: Settings, given: argparse.Namespace) -> int:
    kept = Store(settings.models).revisions.pin(given.name, not given.off)
    if given.json:
        show_json(plain(kept))
    else:
        say(f"{kept.name} {'stays at' if kept.pinned else 'is no longer kept at'} {kept.revisions[0].short if kept.revisions else 'what it is'}.")
    return 0


def plain(kept: Kept) -> dict:
    """What both commands print."""
    return asdict(kept)
