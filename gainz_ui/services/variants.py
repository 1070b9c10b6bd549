"""Smaller variants of a model: which models one can be made from, what it takes, and the job that makes it.

Knows recipes, names and memory. How a weight is rounded happens in a child process (`python app.py quantize`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from backends.base import Cancel, InvalidRequest, NotSupported, Progress, ProgressFn
from backends.recipe import QuantizeOptions, check_group
from gainz_ui.services import starter
from gainz_ui.services.catalog import places
from gainz_ui.services.jobs import Jobs

BESIDE = 1_500_000_000                  # bytes above the model's float16 size: what a job may take at most
METHODS = ("gptq", "awq")
KIND = "quantize"                       # of a task


@dataclass(frozen=True)
class Plan:
    """A variant to be made. ``need``: bytes of memory."""

    model: str
    name: str
    options: QuantizeOptions
    text: Path | None
    need: int


def default_name(model: str, options: QuantizeOptions) -> str:
    """SmolLM2-135M-Instruct.Q4_1 → SmolLM2-135M-Instruct-gptq-4bit-g64."""
    stem = model.removesuffix(".gguf").removesuffix(".Q4_1")
    head = "-head" if options.head_bits else ""
    group = f"g{options.group}" if options.group > 0 else "row"
    return f"{stem}-{options.method}-{options.bits}bit-{group}{head}"


def can_start_from(entry: Any) -> bool:
    """Float weights and GGUF files; what is GPTQ or AWQ already has lost what a quantizer needs, and a draft is no whole model."""
    return entry.ready and entry.local and not entry.helper and entry.backend not in METHODS


class Variants:
    """For page, API and command line of one installation."""

    def __init__(self, studio: Any, jobs: Jobs) -> None:
        self.studio, self.jobs = studio, jobs

    def sources(self) -> list[str]:
        return [entry.name for entry in self.studio.catalog() if can_start_from(entry)]

    def plan(self, model: str, options: QuantizeOptions, name: str | None = None, text: Path | None = None) -> Plan:
        """Everything that can be refused before anything is read: NotSupported, InvalidRequest (a group that does not fit, a text that
        is not there)."""
        if text is not None and not text.is_file():
            raise InvalidRequest(f"There is no file {text}.", field="text", remedy="Give the path of a text on the machine of the server.")
        entry = self.studio.entry(model)
        if not can_start_from(entry):
            raise NotSupported(f"No variant can be made from {model}.", format=entry.format,
                               reason=entry.reason or "it is quantized already",
                               remedy="Start from a float or GGUF model.")
        about = self.studio.details(model)
        check_group(options.group, [width for width in (about.hidden, about.inner) if width])
        return Plan(model, name or default_name(model, options), options, text, need_bytes(about))

    def make(self, plan: Plan, progress: ProgressFn, cancel: Cancel) -> dict[str, Any]:
        """The variant's manifest; it is in models/ then, and everybody is told. What a stopped job has done is gone on
        with."""
        given = ["--model", plan.model, "--out", plan.name, *arguments(plan.options)]
        given += ["--text", str(plan.text)] if plan.text is not None else []
        manifest = self.jobs.run("quantize", given, progress, cancel, plan.need)
        self.studio.changed.emit()
        return manifest

    # ------------------------------------------------------------------------------------------ the starter's
    def starter_missing(self) -> list[str]:
        """The methods of which the starter has no variant with default settings yet; [] where there is no starter. Reads no
        file."""
        there = set(places(self.studio.settings.models))
        if starter.NAME not in there:
            return []
        return [method for method in METHODS if default_name(starter.NAME, QuantizeOptions(method=method)) not in there]

    def starter_plans(self) -> list[Plan]:
        """GPTQ and AWQ of the starter with the default settings."""
        return [self.plan(starter.NAME, QuantizeOptions(method=method)) for method in METHODS]

    def make_all(self, plans: list[Plan], progress: ProgressFn, cancel: Cancel) -> list[str]:
        """One after another, those that are not there yet; the names of all. Progress counts over all of them."""
        there = {entry.name for entry in self.studio.catalog()}
        wanted = [plan for plan in plans if plan.name not in there]
        for number, plan in enumerate(wanted):
            self.make(plan, _part(progress, number, len(wanted), plan.name), cancel)
        return [plan.name for plan in plans]


def _part(progress: ProgressFn, number: int, count: int, name: str) -> Callable[[Progress], None]:
    """One of ``count`` equally long pieces of work."""
    def report(seen: Progress) -> None:
        note = f"{name} ({number + 1}/{count})" if count > 1 else name
        progress(Progress(seen.stage, number * seen.total + seen.done, count * seen.total, note))
    return report


def need_bytes(about: Any) -> int:
    """What a job takes at its worst: the model as float16 and room for one layer's work. ``about``: ModelFacts."""
    return 2 * about.parameters + BESIDE


def arguments(options: QuantizeOptions) -> list[str]:
    """The command line's words for the options that differ from their defaults."""
    out: list[str] = []
    for item in fields(QuantizeOptions):
        value, option = getattr(options, item.name), item.name.replace("_", "-")
        if value == item.default:
            continue
        out += [f"--{option}" if value else f"--no-{option}"] if isinstance(value, bool) else [f"--{option}={value}"]
    return out
