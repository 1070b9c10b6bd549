"""List what lies in models/."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from backends.registry import Registry
from gainz_ui.services import catalog
from gainz_ui.settings import Settings
from gainz_ui.terminal import say, show_json, show_table
from gainz_ui.units import size

NAME, HELP, ORDER = "models", "list the models, loadable or not, with the reason", 20
SETTINGS = ("models",)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print them as JSON")


def run(settings: Settings, given: argparse.Namespace) -> int:
    registry = Registry.scan()
    entries = [catalog.examine(registry, name, path) for name, path in catalog.places(settings.models).items()]
    if given.json:
        show_json([_plain(entry) for entry in entries])
        return 0
    if not entries:
        say(f"There is no model in {settings.models} yet. `python app.py` fetches the starter.")
        return 0
    show_table(("NAME", "FORMAT", "BITS", "REVISION", "SIZE", "STATE"),
               ((e.name, e.format or "-", f"{e.bits:g}" if e.bits else "-", (e.revision or "-")[:12], size(e.size), first_sentence(e.reason) or "ready")
                for e in entries))
    return 0


def first_sentence(reason: str) -> str:
    """What fits a table; --json has the whole."""
    head = reason.split(" (", 1)[0].split("\n", 1)[0]
    return head if len(head) <= 100 else head[:99] + "…"


def _plain(entry: catalog.CatalogEntry) -> dict:
    fields = asdict(entry)
    return {"name": fields.pop("name"), "format": fields.pop("format"), "bits": fields.pop("bits"), "revision": fields.pop("revision"),
            "bytes": fields.pop("size"), **fields}
