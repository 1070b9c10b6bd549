"""Making drafts of models: which models one can be made of, what it takes, what it will cost, and the job that makes it.

Knows recipes, names and memory. How a draft learns happens in a child process (`python app.py draft`); which draft fits which
model, `drafts.py` knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from backends.base import Cancel, InvalidRequest, NotSupported, ProgressFn
from backends.draft_recipe import DraftOptions
from gainz_ui.services.jobs import Jobs
from gainz_ui.services.variants import can_start_from

KIND, PLAN = "draft", "draft_plan"      # of tasks
BESIDE = 2_000_000_000                  # bytes above the weights: teacher's cache, lessons, logits


@dataclass(frozen=True)
class Plan:
    """A draft to be made. ``need``: bytes of memory."""

    model: str
    name: str
    options: DraftOptions
    text: Path | None
    need: int


@dataclass(frozen=True)
class Made:
    """What a draft's manifest says of how good it is. ``curve``: rows of step, tokens, loss, agreement, overlap."""

    name: str
    parent: str
    layers: tuple[int, ...]
    perplexities: tuple[float, float]
    agreement: float | None
    overlap: float | None
    minutes: float
    curve: tuple[Mapping[str, Any], ...]


def default_name(model: str, options: DraftOptions) -> str:
    """SmolLM2-135M-Instruct.Q4_1 → SmolLM2-135M-Instruct-draft-4L; without training …-pruned-4L."""
    stem = model.removesuffix(".gguf").removesuffix(".Q4_1")
    return f"{stem}-{'draft' if options.trained else 'pruned'}-{options.layers}L"


class DraftMaking:
    """For page and command line of one installation."""

    def __init__(self, studio: Any, jobs: Jobs) -> None:
        self.studio, self.jobs = studio, jobs

    def plan(self, model: str, options: DraftOptions, name: str | None = None, text: Path | None = None) -> Plan:
        """Everything that can be refused before anything is read: NotSupported, InvalidRequest (more layers than there are)."""
        entry = self.studio.entry(model)
        if not can_start_from(entry):
            raise NotSupported(f"No draft can be made of {model}.", format=entry.format,
                               reason=entry.reason or "it is quantized already",
                               remedy="Start from the float or GGUF model that it was made from: its draft fits this one, too.")
        about = self.studio.details(model)
        count = len(about.layers)
        if count and options.layers >= count:
            raise InvalidRequest(f"{model} has {count} layers: a draft keeps from 1 to {count - 1} of them.", field="layers",
                                 layers=options.layers)
        return Plan(model, name or default_name(model, options), options, text, 6 * about.parameters + BESIDE)

    def look(self, plan: Plan, progress: ProgressFn, cancel: Cancel) -> dict[str, Any]:
        """What leaving the layers out costs: kept, perplexity_before, perplexity_after. Making goes on from there."""
        return self.jobs.run("draft", [*_arguments(plan), "--plan"], progress, cancel, plan.need)

    def make(self, plan: Plan, progress: ProgressFn, cancel: Cancel) -> dict[str, Any]:
        """The draft's manifest; it is in models/ then, and everybody is told. What a stopped job has done is gone on with."""
        manifest = self.jobs.run("draft", _arguments(plan), progress, cancel, plan.need)
        self.studio.changed.emit()
        return manifest


def _arguments(plan: Plan) -> list[str]:
    given = ["--model", plan.model, "--out", plan.name]
    given += [f"--{item.name.replace('_', '-')}={getattr(plan.options, item.name)}" for item in fields(DraftOptions)
              if getattr(plan.options, item.name) != item.default]
    return given + (["--text", str(plan.text)] if plan.text is not None else [])


def made(name: str, manifest: Mapping[str, Any]) -> Made | None:
    """None for a model that is no draft made here."""
    if manifest.get("method") != "draft":
        return None
    pruned, taught = manifest.get("pruned") or {}, manifest.get("taught") or {}
    return Made(name, str((manifest.get("parent") or {}).get("name", "")), tuple(pruned.get("kept", ())),
                (float(pruned.get("perplexity_before", 0)), float(pruned.get("perplexity_after", 0))),
                manifest.get("agreement"), manifest.get("overlap"), float(manifest.get("seconds", 0)) / 60,
                tuple(taught.get("curve", ())))
