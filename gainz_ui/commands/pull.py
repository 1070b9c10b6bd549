"""Fetch a model from the Hugging Face Hub at one commit, or the starter."""

from __future__ import annotations

import argparse

from backends.base import InvalidRequest
from gainz_ui.services.store import Store
from gainz_ui.settings import Settings
from gainz_ui.terminal import Bar, say

NAME, HELP, ORDER = "pull", "fetch a model from the Hugging Face Hub at one commit; resumes and verifies", 30
SETTINGS = ("models",)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repo", help='OWNER/NAME on the Hub, or "starter" for the starter model')
    parser.add_argument("--revision", help="commit, tag or branch (default: main, as it stands now); the commit is recorded")
    parser.add_argument("--file", action="append", metavar="PATTERN", help="only these files, e.g. '*Q4_K_M.gguf'; may be given several times")
    parser.add_argument("--name", help="name under models/ (default: the repository's)")


def run(settings: Settings, given: argparse.Namespace) -> int:
    store, bar = Store(settings.models), Bar()
    try:
        if given.repo == "starter":
            if given.revision or given.file or given.name:
                raise InvalidRequest("The starter takes no further options.", field="repo")
            name = store.ensure_starter(bar)
        else:
            name = store.pull(given.repo, given.revision, tuple(given.file or ()) or None, given.name, bar)
    finally:
        bar.end()
    say(f"Ready: {name} at {store.manifest(name).get('revision')}")
    print(name)
    return 0
