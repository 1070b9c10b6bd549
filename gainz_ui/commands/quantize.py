"""Make a GPTQ or AWQ variant of a model in models/."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from backends.base import Cancel, GainzError, ModelDir, NameTaken, ProgressFn, make_options
from backends.recipe import QuantizeOptions
from gainz_ui import __version__
from gainz_ui.longwork import failed, watched
from gainz_ui.services.store import Store
from gainz_ui.services.variants import default_name
from gainz_ui.settings import Settings
from gainz_ui.terminal import show_json

NAME, HELP, ORDER = "quantize", "make a GPTQ or AWQ variant of a model, calibrated on a text", 45
SETTINGS = ("models",)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="NAME", help="the float or GGUF model under models/ to start from")
    parser.add_argument("--out", metavar="NAME",
                        help="name of the variant (default: made from the model's and the settings)")
    parser.add_argument("--text", type=Path, metavar="FILE",
                        help="calibration text, UTF-8, plain or .gz (default: the bundled one)")
    parser.add_argument("--json", action="store_true", help="JSON lines on stderr while it runs, the manifest on stdout")
    group = parser.add_argument_group("quantization")
    for item in fields(QuantizeOptions):
        add_option(group, item)


def add_option(group: Any, item: Any) -> None:
    """One field of an options dataclass as an argument."""
    option, label = "--" + item.name.replace("_", "-"), item.metadata["label"].replace("%", "%%")
    kind = {"bool": bool, "int": int, "float": float, "str": str}[item.type]
    if kind is bool:
        group.add_argument(option, action=argparse.BooleanOptionalAction, default=item.default, help=label)
    else:
        known = f"; one of {', '.join(map(str, item.metadata['choices']))}" if "choices" in item.metadata else ""
        group.add_argument(option, type=kind, default=item.default, metavar=kind.__name__.upper(),
                           help=f"{label}{known} (default: {item.default})")


def run(settings: Settings, given: argparse.Namespace) -> int:
    with watched(given.json) as (progress, cancel):
        try:
            options = make_options(QuantizeOptions, {item.name: getattr(given, item.name)
                                                     for item in fields(QuantizeOptions)})
            manifest = make(Store(settings.models), given.model, given.out, options, given.text, progress, cancel)
        except GainzError as error:
            return failed(error, given.json)
    if given.json:
        show_json(manifest)
    else:
        print(manifest["name"])
    return 0


def make(store: Store, model: str, out: str | None, options: QuantizeOptions, text: Path | None, progress: ProgressFn,
         cancel: Cancel) -> dict:
    """The variant's manifest. Nothing appears in models/ before all of it is there; what is done by then is gone on with."""
    source = origin(store, model)
    name = out or default_name(model, options)
    if store.path(name).exists():
        raise NameTaken(f"There is a model {name!r} already; it is not overwritten.", field="out",
                        remedy="Choose another name with --out, or remove the old one first.")
    with store.gather(name, progress, cancel) as folder:
        from backends.compress.job import run as work
        manifest = {"name": name, **work(source, options, folder, progress, cancel, text=text,
                                         versions={"gainz": __version__})}
        store.admit(folder, name, manifest)
    return manifest


def origin(store: Store, name: str) -> ModelDir:
    """The model's folder, or the one GGUF file in it."""
    from backends.gguf import find
    model = ModelDir.of(store.existing(name), name)
    file = None if model.ending(".safetensors") else find(model)
    return model if file is None else ModelDir(name, file, (file.name,), manifest=model.manifest)
