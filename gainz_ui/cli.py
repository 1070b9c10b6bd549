"""The command line: the same services without a browser. ``python app.py [command] [options]``; serve is the default.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 it could not be done (the line says why), 2 a wrong
argument or setting. A command is a module of commands/ with NAME, HELP, `arguments` and `run`; it is imported when the
parser is made, so nothing heavy may be imported at its top.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from types import ModuleType

from backends.base import BadSetting, GainzError
from gainz_ui import __version__, commands
from gainz_ui.settings import Settings
from gainz_ui.terminal import complain, say

DEFAULT = "serve"


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    found = scan()
    arguments = make_parser(found).parse_args(with_command(given, found))
    try:
        settings = Settings.resolve(_given(arguments), os.environ, arguments.config)
        return arguments.run(settings, arguments)
    except BadSetting as error:
        complain(error)
        return 2
    except GainzError as error:
        complain(error)
        return 1
    except BrokenPipeError:             # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        say("Stopped.")
        return 1


def scan() -> dict[str, ModuleType]:
    modules = (importlib.import_module(f"{commands.__name__}.{item.name}") for item in pkgutil.iter_modules(commands.__path__))
    return {module.NAME: module for module in sorted(modules, key=lambda module: module.ORDER)}


def with_command(given: list[str], found: dict[str, ModuleType]) -> list[str]:
    """``python app.py --port 8000`` means serve; --help and --version alone are the program's own."""
    first = given[0] if given else ""
    if first in found or first in ("-h", "--help", "--version") or first and not first.startswith("-"):
        return given
    return [DEFAULT, *given]


def make_parser(found: dict[str, ModuleType]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python app.py", description="Gainz: local language models, made faster. "
                                     "Without a command it serves the page.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"Gainz {__version__}")
    commands_ = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, module in found.items():
        sub = commands_.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        module.arguments(sub)
        add_settings(sub, module.SETTINGS)
        sub.set_defaults(run=module.run)
    return parser


def add_settings(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """One option for each named setting, made from the settings themselves: a knob has one home."""
    group = parser.add_argument_group("settings", "also as GAINZ_NAME in the environment, or in gainz.toml")
    group.add_argument("--config", metavar="FILE", help="settings file (default: gainz.toml, where there is one)")
    for item in fields(Settings):
        if item.name not in names:
            continue
        option, text = "--" + item.name.replace("_", "-"), item.metadata["help"]
        if item.type == "bool":
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif item.type.startswith("tuple"):
            group.add_argument(option, action="append", metavar="NAME", help=f"{text}; may be given several times")
        else:
            group.add_argument(option, metavar=item.type.upper(), help=f"{text} (default: {item.default})" if item.default != "" else text)


def _given(arguments: argparse.Namespace) -> dict:
    return {item.name: getattr(arguments, item.name) for item in fields(Settings) if getattr(arguments, item.name, None) is not None}
