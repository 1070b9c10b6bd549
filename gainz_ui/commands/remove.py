"""Delete a model from models/."""

from __future__ import annotations

import argparse
import sys

from gainz_ui.services.store import Store
from gainz_ui.settings import Settings
from gainz_ui.terminal import say

NAME, HELP, ORDER = "remove", "delete a model from models/", 60
SETTINGS = ("models",)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the model")
    parser.add_argument("--revision", metavar="REVISION", help="only this one of the revisions that are kept beside the one in use")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(settings: Settings, given: argparse.Namespace) -> int:
    store = Store(settings.models)
    if given.revision:
        store.revisions.drop(given.name, given.revision)
        say(f"Removed: revision {given.revision} of {given.name}")
        return 0
    place = store.existing(given.name)
    if not given.yes and not sys.stdin.isatty():
        say(f"Nothing was removed: there is nobody to ask. To delete {place} for good, add --yes.")
        return 2
    if not given.yes:
        say(f"{place} will be deleted for good. A server that has it loaded keeps it in memory only.")
        if input("Delete it? [y/N] ").strip().lower() not in ("y", "yes"):
            say("Nothing was removed.")
            return 1
    store.remove(given.name)
    say(f"Removed: {given.name}")
    return 0
