"""Delete a model from models/."""

from __future__ import annotations

import argparse

from gainz_ui.services.store import Store
from gainz_ui.settings import Settings
from gainz_ui.terminal import say

NAME, HELP, ORDER = "remove", "delete a model from models/", 60
SETTINGS = ("models",)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the model")


def run(settings: Settings, given: argparse.Namespace) -> int:
    Store(settings.models).remove(given.name)
    say(f"Removed: {given.name}")
    return 0
