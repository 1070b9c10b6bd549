"""Put a model back to an earlier revision that is kept here."""

from __future__ import annotations

import argparse

from gainz_ui.commands.pin import plain
from gainz_ui.services.store import Store
from gainz_ui.settings import Settings
from gainz_ui.terminal import say, show_json, show_table
from gainz_ui.units import size

NAME, HELP, ORDER = "rollback", "put a model back to an earlier revision that is kept here", 54
SETTINGS = ("models",)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the model")
    parser.add_argument("--to", metavar="REVISION", help="which one, by its first digits (default: the one in use before)")
    parser.add_argument("--list", action="store_true", help="only list the revisions that are here")
    parser.add_argument("--json", action="store_true", help="print its revisions as JSON")


def run(settings: Settings, given: argparse.Namespace) -> int:
    revisions = Store(settings.models).revisions
    if not given.list:
        now = revisions.rollback(given.name, given.to)
        say(f"{given.name} is at {now.short} now. A server that has it loaded keeps the other one until it loads it again.")
    kept = revisions.of(given.name)
    if given.json:
        show_json(plain(kept))
    else:
        show_table(("REVISION", "STATE", "SIZE", "ASKED FOR", "SOURCE"),
                   ((one.short, ("in use" + (", pinned" if kept.pinned else "")) if one.active else "kept", size(one.bytes), one.asked or "-",
                     one.source or "-") for one in kept.revisions))
    return 0
