"""Make a model of another server (vLLM, Ollama, llama-server …) one of ours."""

from __future__ import annotations

import argparse
import getpass
import sys

from gainz_ui.services import remotes
from gainz_ui.services.store import Store
from gainz_ui.services.studio import Studio
from gainz_ui.settings import Settings
from gainz_ui.terminal import say, show_json

NAME, HELP, ORDER = "connect", "make a model of another server of OpenAI's API one of ours", 45
SETTINGS = ("models", "outputs", "logs", "remote_hosts", "remote_private", "remote_key_file")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", help="of its API, e.g. http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="", metavar="NAME", help="its name there (default: the only one)")
    parser.add_argument("--name", default="", help="name under models/ (default: made from the model's)")
    parser.add_argument("--key", action="store_true", help="the server wants a key: it is asked for, or read from a pipe, and kept in the "
                        "file of keys; never given as an argument, which everybody on the machine could read")
    parser.add_argument("--list", action="store_true", help="only say which models it has")
    parser.add_argument("--json", action="store_true", help="print what was found or made as JSON")


def run(settings: Settings, given: argparse.Namespace) -> int:
    key, studio = _key() if given.key else "", Studio(settings)
    try:
        if given.list:
            return show(remotes.listed(studio, given.address, key), given.json)
        store = Store(settings.models)
        name = remotes.add(studio, store, given.address, given.model, given.name, key)
    finally:
        studio.close()
    show_json({"name": name, **store.manifest(name)}) if given.json else print(name)
    return 0


def _key() -> str:
    return getpass.getpass("Key: ").strip() if sys.stdin.isatty() else sys.stdin.readline().strip()


def show(found: list, as_json: bool) -> int:
    rows = [{"model": row.name, "owner": row.owner, "context": row.context} for row in found]
    if as_json:
        show_json(rows)
        return 0
    for row in found:
        print(row.name)
    if not found:
        say("The server lists no models.")
    return 0
