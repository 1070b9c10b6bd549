"""Adding another server and going back a revision, on the models tab in a browser, over real stores."""

from __future__ import annotations

import json
import stat
from types import SimpleNamespace

import pytest
from playwright.sync_api import expect

from backends.reach import Reach
from gainz_ui.services.remote_keys import RemoteKeys
from gainz_ui.services.store import Store
from tests.browser.steps import tab
from tests.remote_server import Server

A, B = "a" * 40, "b" * 40


@pytest.fixture
def store(stage, tmp_path, monkeypatch):
    made = Store(tmp_path / "models")
    made.root.mkdir()
    monkeypatch.setattr(stage.blocks.gainz_page, "store", made)
    return made


def test_a_server_is_added(stage, visit, store, tmp_path, monkeypatch):
    server = Server()
    server.models = ["org/one", "org/two"]
    monkeypatch.setattr(stage.studio, "reach", Reach(private=True), raising=False)
    monkeypatch.setattr(stage.studio, "remote_keys", RemoteKeys(tmp_path / "keys.json", {}), raising=False)
    page = visit(stage.url)
    tab(page, "Models")
    page.locator("#gz-add-server button").first.click()
    page.click("#gz-server-look")
    expect(page.locator("#gz-server-notice")).to_contain_text("address is empty")
    page.fill("#gz-server-address input", server.url.removesuffix("/v1"))
    page.fill("#gz-server-key input", "sk-1")
    page.click("#gz-server-look")
    expect(page.locator("#gz-server-notice")).to_contain_text("2 models")
    expect(page.locator("#gz-server-model input")).to_have_value("org/one")
    page.fill("#gz-server-name input", "mine")
    page.click("#gz-server-add")
    expect(page.locator("#gz-server-notice")).to_contain_text("is added")
    expect(page.locator("#gz-server-key input")).to_have_value("")
    assert json.loads((store.root / "mine" / "manifest.json").read_text())["remote"] == {"address": server.url, "model": "org/one"}
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600 and server.seen[-1][2]["authorization"] == "Bearer sk-1"
    page.fill("#gz-server-address input", "http://169.254.169.254")
    page.click("#gz-server-look")
    expect(page.locator("#gz-server-notice")).to_contain_text("may not be reached")
    server.close()


def test_a_model_is_removed_after_a_second_question_or_the_reason_is_said(stage, visit, store, monkeypatch):
    entries = {name: SimpleNamespace(**vars(entry)) for name, entry in stage.studio._entries.items()}
    entries["little"] = SimpleNamespace(**{**vars(entries["starter"]), "name": "little", "backend": "draft", "parent": "starter-fp16"})
    monkeypatch.setattr(stage.studio, "_entries", entries)
    real = store.remove
    monkeypatch.setattr(store, "remove", lambda name: (real(name), entries.pop(name)))
    for name in entries:
        (store.root / name).mkdir()
    page = visit(stage.url)
    tab(page, "Models")
    said, choose = page.locator("#gz-remove-said"), lambda name: page.locator("#gz-catalog label").filter(has_text=name).first.click()
    page.click("#gz-remove")
    expect(said).to_contain_text("starter is loaded.")
    choose("starter-fp16")
    expect(said).to_be_hidden()
    page.click("#gz-remove")
    expect(said).to_contain_text("little borrows embeddings and head from starter-fp16")
    choose("little")
    expect(said).to_be_hidden()
    page.click("#gz-remove")
    expect(said).to_contain_text("little (98 MB) will be deleted from the disk for good")
    page.click("#gz-remove-keep")
    expect(page.locator("#gz-remove-sure")).to_be_hidden()
    assert (store.root / "little").is_dir()
    page.click("#gz-remove")
    page.click("#gz-remove-sure")
    expect(page.locator("#gz-models-notice")).to_contain_text("little is removed")
    expect(page.locator("#gz-catalog")).not_to_contain_text("little")
    assert not (store.root / "little").exists() and (store.root / "starter-fp16").is_dir()


def test_one_click_goes_back_a_revision_and_a_pin_holds_it(stage, visit, store):
    for place, revision in ((store.root / "starter", A), (store.root / ".partial" / "x", B)):
        place.mkdir(parents=True)
        (place / "manifest.json").write_text(json.dumps({"source": "hub:org/starter", "revision": revision, "files": []}))
    store.revisions.renew(store.root / ".partial" / "x", "starter")
    page = visit(stage.url)
    tab(page, "Models")
    rows = page.locator("#gz-revision-list li")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("b" * 12)
    page.click("#gz-rollback")
    expect(page.locator("#gz-models-notice")).to_contain_text("other revision")
    expect(rows.first).to_contain_text("a" * 12)
    assert store.manifest("starter")["revision"] == A and "starter" in stage.studio.loaded(), "loaded again as it was"
    page.click("#gz-pin")
    expect(rows.first).to_contain_text("pinned")
    expect(page.locator("#gz-rollback")).to_be_disabled()
    page.click("#gz-pin")
    expect(rows.first).not_to_contain_text("pinned")
    expect(page.locator("#gz-rollback")).to_be_enabled()
    page.click("#gz-verify")
    expect(page.locator("#gz-models-notice")).to_contain_text("Every file of starter")
    (store.root / "starter" / "stray.bin").write_bytes(b"x")
    page.click("#gz-verify")
    expect(page.locator("#gz-models-notice")).to_contain_text("stray.bin of starter is not as its manifest says")
