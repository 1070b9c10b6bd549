"""Drafts whose making is stopped on the way, against those that were made in one go."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from backends.base import Cancel, Cancelled
from backends.draft_recipe import DraftOptions
from gainz_ui.commands import draft as command
from gainz_ui.services.store import Store


def stopping(stage: str, done: float):
    """A progress function that cancels there, and its flag."""
    cancel = Cancel()

    def watch(progress) -> None:
        if progress.stage == stage and progress.done >= done:
            cancel.set()
    return watch, cancel


def end_alike(models: Path, folder: Path, name: str, options: DraftOptions) -> None:
    """A run that is stopped at every stage and gone on with in ``folder`` against the draft ``name`` of ``models``, which was
    never stopped."""
    shutil.copytree(models / "parent", folder / "parent", copy_function=shutil.copy2)
    for stage, done in (("say", 0), ("listen", 3), ("train", 0.4), ("train", 0.8)):
        watch, cancel = stopping(stage, done)
        with pytest.raises(Cancelled):
            command.make(Store(folder), "parent", name, options, None, False, watch, cancel)
        assert Store(folder).names() == ["parent"]
    command.make(Store(folder), "parent", name, options, None, False, lambda _: None, Cancel())
    assert (folder / name / "model.safetensors").read_bytes() == (models / name / "model.safetensors").read_bytes()
    first, second = (json.loads((path / name / "manifest.json").read_text()) for path in (models, folder))
    assert first["taught"]["curve"] == second["taught"]["curve"] and first["agreement"] == second["agreement"]
