"""Make, list and revoke API keys."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from gainz_ui.services.keys import Key, KeyFile, KeyLimits
from gainz_ui.settings import Settings
from gainz_ui.terminal import say

NAME, HELP, ORDER = "keys", "make, list and revoke API keys", 70
SETTINGS = ("keys",)


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="add|list|revoke", required=True)
    add = actions.add_parser("add", help="make a key; it is shown this once", allow_abbrev=False)
    add.add_argument("name", help="whose it is")
    for option, text in (("per-minute", "requests that may begin in a minute"), ("concurrent", "requests at once"),
                         ("prompt-tokens", "tokens of a prompt"), ("output-tokens", "tokens of an answer, over all its choices")):
        add.add_argument("--" + option, type=int, default=0, metavar="N", help=f"{text}; 0 = no limit. A key with limits opens the API only")
    show = actions.add_parser("list", help="names, ids and limits; never a key", allow_abbrev=False)
    show.add_argument("--json", action="store_true")
    revoke = actions.add_parser("revoke", help="make a key invalid at once", allow_abbrev=False)
    revoke.add_argument("key", help="its name or id")


def run(settings: Settings, given: argparse.Namespace) -> int:
    file = KeyFile(settings.keys)
    if given.action == "add":
        made, secret = file.add(given.name, KeyLimits(given.per_minute, given.concurrent, given.prompt_tokens, given.output_tokens))
        say(f"The key of {made.name} ({made.id}) is below; it is kept nowhere, so keep it now.")
        print(secret)
    elif given.action == "revoke":
        gone = file.revoke(given.key)
        say(f"The key of {gone.name} ({gone.id}) is no longer valid.")
    else:
        show(file.read(), given.json)
    return 0


def show(keys: list[Key], as_json: bool) -> None:
    facts = [{name: value for name, value in asdict(key).items() if name != "digest"} for key in keys]
    if as_json:
        print(json.dumps(facts, ensure_ascii=False, indent=1))
        return
    for key in keys:
        limits = ", ".join(f"{name} {value}" for name, value in asdict(key.limits).items() if value) or "no limits"
        print(f"{key.id}  {'revoked' if key.revoked else 'valid  '}  {key.name}  ({limits}; made {key.created})")
    if not keys:
        say("There are no keys.")
