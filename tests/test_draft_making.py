"""Making drafts from the page and the command line: what is refused before anything runs, what the child is told, what a
manifest says afterwards, and the draft that comes with the program."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from backends.base import Cancel, InvalidRequest, NotSupported
from backends.draft_recipe import DraftOptions
from gainz_ui import plots
from gainz_ui.commands.draft import command
from gainz_ui.i18n import option_label
from gainz_ui.services import starter_draft
from gainz_ui.services.draft_making import DraftMaking, default_name, made
from gainz_ui.services.signals import Signal
from gainz_ui.services.store import Store

CURVE = [{"step": 0, "tokens": 0, "loss": None, "agreement": 0.02, "overlap": 0.05},
         {"step": 9, "tokens": 900, "loss": 2.5, "agreement": 0.4, "overlap": 0.45}]
MANIFEST = {"method": "draft", "parent": {"name": "big"}, "pruned": {"kept": [0, 3], "perplexity_before": 9.5,
            "perplexity_after": 800.0}, "agreement": 0.4, "overlap": 0.45, "seconds": 120.0, "taught": {"curve": CURVE}}


class Jobs:
    """Remembers what it was told to run."""

    def __init__(self) -> None:
        self.told: list = []

    def run(self, name, arguments, progress, cancel, need=0):
        self.told.append((name, list(arguments), need))
        return {"name": "done"}


def making(backend: str = "gguf", layers: int = 6, reason: str = "") -> DraftMaking:
    entry = SimpleNamespace(ready=not reason, local=True, backend=backend, helper=backend == "draft", format="GGUF", reason=reason)
    about = SimpleNamespace(layers=(None,) * layers, parameters=1_000_000)
    studio = SimpleNamespace(entry=lambda name: entry, details=lambda name: about, changed=Signal())
    return DraftMaking(studio, Jobs())


@pytest.mark.parametrize("backend", ["gptq", "awq", "draft"])
def test_what_is_quantized_or_a_draft_already_is_refused_with_what_to_start_from(backend):
    with pytest.raises(NotSupported, match="Start from the float or GGUF model"):
        making(backend).plan("big", DraftOptions())


def test_more_layers_than_there_are_is_refused_with_the_range():
    with pytest.raises(InvalidRequest, match="keeps from 1 to 5"):
        making().plan("big", DraftOptions(layers=6))


def test_looking_and_making_are_told_the_same_but_for_plan():
    drafts = making()
    heard = []
    drafts.studio.changed.subscribe(lambda *_: heard.append(1))
    plan = drafts.plan("big", DraftOptions(layers=2, minutes=0.0), "small", Path("words.txt"))
    drafts.look(plan, print, Cancel())
    assert not heard
    drafts.make(plan, print, Cancel())
    (name, looked, need), (_, done, _) = drafts.jobs.told
    assert name == "draft" and looked == [*done, "--plan"] and heard and need > 6_000_000
    assert done == ["--model", "big", "--out", "small", "--layers=2", "--minutes=0.0", "--text", "words.txt"]


def test_names_say_what_it_is():
    assert default_name("Smol.Q4_1", DraftOptions(layers=3)) == "Smol-draft-3L"
    assert default_name("Smol", DraftOptions(layers=3, minutes=0)) == "Smol-pruned-3L"
    assert default_name("Smol", DraftOptions(layers=3, minutes=0, steps=5)) == "Smol-draft-3L"


def test_the_command_of_the_manifest_has_what_differs_from_the_defaults():
    assert command("big", "small", DraftOptions(layers=2, choose="block"), None) == (
        "python app.py draft --model big --out small --layers=2 --choose=block")


def test_a_manifest_in_words_and_as_a_curve():
    found = made("small", MANIFEST)
    assert (found.parent, found.layers, found.perplexities, found.agreement, found.minutes) == ("big", (0, 3), (9.5, 800.0), 0.4, 2.0)
    figure = plots.learning(found.curve, {"step": "s", "right": "r", "loss": "l"})
    assert list(figure.data[0].y) == [2.0, 40.0] and list(figure.data[1].y) == [None, 2.5] and figure.data[1].yaxis == "y2"
    assert made("other", {"method": "gptq"}) is None


@pytest.mark.parametrize("name", [item.name for item in fields(DraftOptions)])
def test_every_option_has_a_label_in_both_languages(name):
    assert option_label("zh", name, "") and option_label("en", name, "")


def shipped_draft(folder: Path, weights: bytes) -> tuple[Path, str]:
    """A draft as it comes with the program, and the digest of its weights."""
    folder.mkdir()
    digest = hashlib.sha256(weights).hexdigest()
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "manifest.json").write_text(json.dumps({"method": "draft", "files": [
        {"path": "model.safetensors", "size": len(weights), "sha256": digest}]}))
    return folder, digest


def test_the_draft_that_comes_with_the_program_is_put_beside_the_starter_once(tmp_path):
    shipped, _ = shipped_draft(tmp_path / "shipped", b"weights")
    store = Store(tmp_path / "models")
    assert starter_draft.place(store, print, Cancel(), shipped) == "starter-draft"
    (store.path("starter-draft") / "mark").write_text("")
    assert starter_draft.place(store, print, Cancel(), shipped) == "starter-draft"
    assert store.names() == ["starter-draft"] and (store.path("starter-draft") / "mark").exists()
    assert starter_draft.place(store, print, Cancel(), tmp_path / "nothing") is None


def test_a_draft_that_an_older_program_brought_is_replaced_and_kept_and_nobodys_choice_is_touched(tmp_path, monkeypatch):
    older, digest = shipped_draft(tmp_path / "older", b"older")
    newer, _ = shipped_draft(tmp_path / "newer", b"newer")
    own, _ = shipped_draft(tmp_path / "own", b"somebody's own")
    monkeypatch.setattr(starter_draft, "RETIRED", frozenset({digest}))
    store, weights = Store(tmp_path / "models"), lambda: (store.path("starter-draft") / "model.safetensors").read_bytes()
    starter_draft.place(store, print, Cancel(), older)
    starter_draft.place(store, print, Cancel(), newer)
    assert weights() == b"newer" and store.verify("starter-draft").ok
    store.revisions.rollback("starter-draft")
    starter_draft.place(store, print, Cancel(), newer)
    assert weights() == b"older", "going back was somebody's choice"
    store = Store(tmp_path / "pinned")
    starter_draft.place(store, print, Cancel(), older)
    store.revisions.pin("starter-draft")
    starter_draft.place(store, print, Cancel(), newer)
    assert weights() == b"older"
    store = Store(tmp_path / "third")
    starter_draft.place(store, print, Cancel(), own)
    starter_draft.place(store, print, Cancel(), newer)
    assert weights() == b"somebody's own"


def test_what_is_shipped_is_small_and_as_its_manifest_says(tmp_path):
    if not (starter_draft.SHIPPED / "manifest.json").is_file():
        pytest.skip("this tree has no starter draft")
    store = Store(tmp_path)
    name = starter_draft.place(store, print, Cancel())
    assert store.verify(name).ok and sum(path.stat().st_size for path in store.path(name).iterdir()) < 16 << 20
    manifest = store.manifest(name)
    assert manifest["command"].startswith("python app.py draft ") and 0.2 < manifest["agreement"] < 1
    assert made(name, manifest).parent == "SmolLM2-135M-Instruct.Q4_1"
