"""Revisions: updates that overwrite nothing, pins, the way back, a process that dies half way, and only the bad file fetched again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from backends.base import Cancel, InvalidRequest, ModelNotFound, NameTaken, NotSupported
from gainz_ui import cli
from gainz_ui.services import revisions as module
from gainz_ui.services.revisions import Revisions, identity, roll_back
from gainz_ui.services.store import Store
from tests.test_store import A, B, stub  # noqa: F401  the Hub on loopback

C = "c" * 40


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


@pytest.fixture
def hub(stub):  # noqa: F811
    stub.commits[C] = {"config.json": b'{"v": "C"}', "model-1.safetensors": stub.commits[A]["model-1.safetensors"],
                       "model-2.safetensors": b"c" * 70_000}
    return stub


def version(store, name="tiny"):
    return json.loads((store.root / name / "config.json").read_text())["v"]


def updated(store, hub):
    store.pull("org/tiny")
    hub.branch = B
    store.pull("org/tiny")
    return store.revisions


def test_an_update_keeps_what_was_there_and_can_be_taken_back(store, hub):
    revisions = updated(store, hub)
    kept = revisions.of("tiny")
    assert [(one.id, one.active) for one in kept.revisions] == [(B, True), (A, False)] and kept.previous == A and version(store) == "B"
    assert store.names() == ["tiny"] and store.verify("tiny").ok
    assert revisions.rollback("tiny").id == A and version(store) == "A" and store.verify("tiny").ok
    assert [(one.id, one.active) for one in revisions.of("tiny").revisions] == [(A, True), (B, False)]
    with pytest.raises(InvalidRequest, match="no earlier"):
        revisions.rollback("tiny")
    assert revisions.rollback("tiny", "bbbb").id == B and version(store) == "B"
    assert revisions.rollback("tiny").id == A, "and back again"
    with pytest.raises(ModelNotFound, match="No revision"):
        revisions.rollback("tiny", "f")


def test_a_commit_that_is_kept_comes_back_without_the_hub(store, hub, monkeypatch):
    updated(store, hub)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert store.pull("org/tiny", A) == "tiny" and version(store) == "A"


def test_an_update_fetches_only_what_has_changed(store, hub):
    store.pull("org/tiny")
    hub.branch = C
    hub.ranges.clear()
    store.pull("org/tiny")
    assert [name for name, _ in hub.ranges] == ["config.json", "model-2.safetensors"]
    assert store.verify("tiny").ok
    one, other = (folder / "model-1.safetensors" for folder in (store.root / "tiny", store.revisions.folder("tiny", A)))
    assert os.stat(one).st_ino == os.stat(other).st_ino, "one file on the disk"


def test_a_pinned_model_stays(store, hub):
    store.pull("org/tiny")
    store.revisions.pin("tiny")
    hub.branch = B
    for act in (lambda: store.pull("org/tiny"), lambda: store.pull("org/tiny", B), lambda: store.revisions.rollback("tiny", A)):
        with pytest.raises(NameTaken, match="pinned"):
            act()
    assert version(store) == "A" and store.revisions.of("tiny").pinned
    store.revisions.pin("tiny", False)
    store.pull("org/tiny")
    assert version(store) == "B"


def test_one_asked_for_by_its_commit_makes_way_only_for_what_is_asked_for(store, hub):
    store.pull("org/tiny", A)
    hub.branch = B
    with pytest.raises(NameTaken, match="exactly this commit"):
        store.pull("org/tiny")
    store.pull("org/tiny", "main")
    assert version(store) == "B"


def test_another_source_never_takes_a_name(store, hub):
    store.pull("org/tiny")
    with pytest.raises(NameTaken, match="another source"):
        store.pull("other/tiny")


def test_an_update_cut_off_changes_nothing(store, hub):
    store.pull("org/tiny")
    hub.branch, hub.lie = B, "model-1.safetensors"
    hub.commits[B]["model-1.safetensors"] = b"ab"
    with pytest.raises(Exception, match="not the file"):
        store.pull("org/tiny")
    assert version(store) == "A" and len(store.revisions.of("tiny").revisions) == 1


def test_only_the_bad_file_is_fetched_again(store, hub):
    store.pull("org/tiny")
    bad = store.root / "tiny" / "model-2.safetensors"
    before = os.stat(store.root / "tiny" / "model-1.safetensors").st_ino
    bad.write_bytes(b"x" * bad.stat().st_size)
    assert [item.file for item in store.verify("tiny").files if item.state != "ok"] == ["model-2.safetensors"]
    hub.ranges.clear()
    assert store.repair("tiny").ok and [name for name, _ in hub.ranges] == ["model-2.safetensors"]
    assert os.stat(store.root / "tiny" / "model-1.safetensors").st_ino == before and store.manifest("tiny")["revision"] == A
    assert [one.id for one in store.revisions.of("tiny").revisions] == [A]
    hub.ranges.clear()
    assert store.repair("tiny").ok and hub.ranges == [], "nothing is wrong, nothing is fetched"


def test_what_did_not_come_from_the_hub_cannot_be_repaired(store, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "mine" / "model.safetensors").write_bytes(b"w")
    store.add_local(tmp_path / "mine")
    (store.root / "mine" / "model.safetensors").write_bytes(b"v")
    with pytest.raises(InvalidRequest, match="did not come from the Hub"):
        store.repair("mine")


@pytest.mark.parametrize("moved", [0, 1])
def test_a_switch_that_died_half_way_is_ended(store, hub, monkeypatch, moved):
    """Killed before the first rename, or between the two."""
    revisions, real, calls = updated(store, hub), os.replace, []

    def dying(source, target):
        if Path(source).name in ("tiny", A) and Path(source).is_dir():
            if len(calls) == moved:
                raise KeyboardInterrupt
            calls.append(source)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            revisions.rollback("tiny")
    assert (store.root / "tiny").exists() is not bool(moved)
    revisions.mend()
    assert store.names() == ["tiny"] and store.verify("tiny").ok and version(store) == ("A" if moved else "B")
    assert {one.id for one in revisions.of("tiny").revisions} == {A, B}
    revisions.mend()
    assert not list(store.root.glob(f".revisions/*/{module.JOURNAL}"))


def test_files_that_cannot_be_moved_are_said(store, hub, monkeypatch):
    revisions = updated(store, hub)

    def refuse(*_):
        raise PermissionError(13, "in use")
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", refuse)
        with pytest.raises(NotSupported, match="cannot be moved"):
            revisions.rollback("tiny")
    revisions.mend()
    assert version(store) == "B"


def test_dropping_one_and_removing_all(store, hub):
    revisions = updated(store, hub)
    with pytest.raises(InvalidRequest, match="in use"):
        revisions.drop("tiny", B)
    revisions.drop("tiny", A)
    assert [one.id for one in revisions.of("tiny").revisions] == [B] and revisions.of("tiny").previous is None
    store.remove("tiny")
    assert store.names() == [] and not (store.root / ".revisions" / "tiny").exists()


def test_without_a_commit_the_files_are_the_identity():
    rows = [{"path": "a", "sha256": "1"}]
    assert identity({"revision": None, "files": rows}) == identity({"files": rows}) != identity({"files": [{"path": "a", "sha256": "2"}]})
    assert identity({"revision": A, "files": rows}) == A


def test_a_loaded_model_is_unloaded_and_loaded_again(store, hub):
    revisions, done = updated(store, hub), []
    info = SimpleNamespace(options=(("streams", 2),))
    studio = SimpleNamespace(loaded=lambda: {"tiny": info}, unload=lambda name: done.append("unload"),
                             load=lambda name, options, *_: done.append((version(store), options)), changed=SimpleNamespace(emit=lambda: None))
    assert roll_back(studio, revisions, "tiny", None, lambda _: None, Cancel()).id == A
    assert done == ["unload", ("A", {"streams": 2})]
    done.clear()
    with pytest.raises(InvalidRequest):
        roll_back(studio, revisions, "tiny", None, lambda _: None, Cancel())
    assert done == ["unload", ("A", {"streams": 2})], "what fails leaves it as it was"


def test_the_commands(store, hub, capsys):
    updated(store, hub)
    models = ["--models", str(store.root)]
    assert cli.main(["rollback", "tiny", "--list", *models]) == 0 and "in use" in capsys.readouterr().out
    assert cli.main(["rollback", "tiny", "--json", *models]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["revisions"][0]["id"] == A and told["revisions"][1]["id"] == B and not told["pinned"]
    assert cli.main(["pin", "tiny", "--json", *models]) == 0 and json.loads(capsys.readouterr().out)["pinned"]
    assert cli.main(["rollback", "tiny", "--to", "b", *models]) == 1 and "pin tiny --off" in capsys.readouterr().err
    assert cli.main(["pin", "tiny", "--off", *models]) == 0
    assert cli.main(["remove", "tiny", "--revision", "bbb", *models]) == 0
    assert cli.main(["verify", "tiny", "--repair", *models]) == 0
    assert [one.id for one in Revisions(store.root).of("tiny").revisions] == [A]


def test_the_manifest_says_format_and_bits(store, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    (folder / "model.safetensors").write_bytes(b"w")
    store.add_local(folder)
    assert (store.manifest("mine")["format"], store.manifest("mine")["bits"]) == ("safetensors bfloat16", 16.0)
