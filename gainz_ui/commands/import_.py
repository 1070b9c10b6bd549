"""Bring a model that lies elsewhere on this machine into models/."""

from __future__ import annotations

import argparse
from pathlib import Path

from gainz_ui.services.store import Store
from gainz_ui.settings import Settings
from gainz_ui.terminal import Bar

NAME, HELP, ORDER = "import", "copy a folder or a .gguf file of this machine into models/, with a manifest", 40
SETTINGS = ("models",)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="the model's folder, or its .gguf file")
    parser.add_argument("--name", help="name under models/ (default: the folder's or file's)")
    parser.add_argument("--link", action="store_true", help="hard-link instead of copying: no room needed, same disk only")


def run(settings: Settings, given: argparse.Namespace) -> int:
    bar = Bar()
    try:
        print(Store(settings.models).add_local(given.path, given.name, bar, link=given.link))
    finally:
        bar.end()
    return 0
