"""Serve page and API."""

from __future__ import annotations

import argparse
from dataclasses import fields

from backends.base import BadSetting
from gainz_ui.settings import Settings
from gainz_ui.terminal import Bar, say

NAME, HELP, ORDER = "serve", "serve the page and the API (the default)", 0
SETTINGS = tuple(item.name for item in fields(Settings))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--insecure-no-key", action="store_true",
                        help="open it to the network without a key: everybody there can use it")


def run(settings: Settings, given: argparse.Namespace) -> int:
    from gainz_ui.api.hosts import is_loopback
    from gainz_ui.services.keys import KeyFile, KeyRing
    locked = KeyRing(KeyFile(settings.keys), settings.api_key).required       # a file that is no file of keys ends the start here
    if not is_loopback(settings.host) and not locked and not given.insecure_no_key:
        raise BadSetting(f"{settings.host} opens Gainz to the network, and no key is set.", field="api_key",
                         remedy="Make one with `python app.py keys add NAME`, set GAINZ_API_KEY (or --api-key), or say --insecure-no-key if everybody there may use it.")
    from gainz_ui import server
    return server.serve(settings, Bar(), say)
