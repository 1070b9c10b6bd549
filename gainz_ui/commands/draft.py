"""Make a draft of a model in models/: fewer layers, trained to guess what the model will say. Or, with --minutes 0, the same
model with fewer layers."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from backends.base import Cancel, GainzError, NameTaken, ProgressFn, make_options
from backends.draft_recipe import DraftOptions
from gainz_ui import __version__
from gainz_ui.commands.quantize import add_option, origin
from gainz_ui.longwork import failed, watched
from gainz_ui.services.draft_making import default_name
from gainz_ui.services.store import Store
from gainz_ui.settings import Settings
from gainz_ui.terminal import show_json

NAME, HELP, ORDER = "draft", "make a draft of a model, for speculative decoding; or leave layers out of it", 46
SETTINGS = ("models",)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="NAME", help="the float or GGUF model under models/ to make a draft of")
    parser.add_argument("--out", metavar="NAME", help="name of the draft (default: made from the model's and the layers)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to learn from besides what the model says, UTF-8, plain or "
                        ".gz (default: the bundled one)")
    parser.add_argument("--plan", action="store_true", help="only say which layers would go and what that costs in perplexity")
    parser.add_argument("--json", action="store_true", help="JSON lines on stderr while it runs, the manifest on stdout")
    group = parser.add_argument_group("draft")
    for item in fields(DraftOptions):
        add_option(group, item)


def run(settings: Settings, given: argparse.Namespace) -> int:
    with watched(given.json) as (progress, cancel):
        try:
            options = make_options(DraftOptions, {item.name: getattr(given, item.name) for item in fields(DraftOptions)})
            found = make(Store(settings.models), given.model, given.out, options, given.text, given.plan, progress, cancel)
        except GainzError as error:
            return failed(error, given.json)
    if given.json:
        show_json(found)
    else:
        print(_words(found))
    return 0


def make(store: Store, model: str, out: str | None, options: DraftOptions, text: Path | None, plan: bool, progress: ProgressFn,
         cancel: Cancel) -> dict:
    """The draft's manifest, or with ``plan`` what leaving the layers out costs. Nothing appears in models/ before all of it is
    there; what is done by then, the plan too, is gone on with."""
    source = origin(store, model)
    name = out or default_name(model, options)
    if store.path(name).exists():
        raise NameTaken(f"There is a model {name!r} already; it is not overwritten.", field="out",
                        remedy="Choose another name with --out, or remove the old one first.")
    with store.gather(name, progress, cancel) as folder:
        from backends.compress.draft_job import run as work
        versions = {"gainz": __version__}
        if plan:
            return {"name": name, **work(source, options, folder, progress, cancel, text=text, versions=versions, plan_only=True)}
        manifest = {"name": name, "command": command(model, name, options, text),
                    **work(source, options, folder, progress, cancel, text=text, versions=versions)}
        store.admit(folder, name, manifest)
    return manifest


def command(model: str, name: str, options: DraftOptions, text: Path | None) -> str:
    """The line that makes this draft again."""
    words = ["python", "app.py", "draft", "--model", model, "--out", name]
    words += [f"--{item.name.replace('_', '-')}={getattr(options, item.name)}" for item in fields(options)
              if getattr(options, item.name) != item.default]
    return " ".join([*words, *(["--text", text.name] if text is not None else [])])


def _words(found: dict) -> str:
    if "perplexity_after" in found:
        return (f"{found['name']}: layers {', '.join(map(str, found['kept']))} would stay; perplexity on the calibration text "
                f"{found['perplexity_before']} -> {found['perplexity_after']}")
    if "agreement" not in found:
        return found["name"]
    return f"{found['name']}: {100 * found['agreement']:.1f} % of its guesses are what the model says"
