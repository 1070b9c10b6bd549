"""models/: names, import, verify, remove, and pulls from a stub of the Hub on loopback (cases DL-01, DL-03)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from backends.base import (BrokenFile, Cancel, Cancelled, ChecksumMismatch, DiskFull, FetchFailed, InvalidRequest,
                           LoadError, ModelNotFound, NameRefused, NameTaken, NotSupported, UnknownFormat)
from gainz_ui.services import hub, imports
from gainz_ui.services.store import Store, check_name, check_room

A, B = "a" * 40, "b" * 40


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "mine"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"w" * 1000)
    (path / "notes.bin").write_bytes(b"never wanted")
    return path


# ---------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize("name", ["..", "a/b", "a\\b", "", ".hidden", "-flag", "x" * 129, "con", "NUL.gguf", "a\0b", "a\n", "é",
                                  "a."])
def test_a_name_that_is_no_plain_name_is_refused(name, store):
    with pytest.raises(NameRefused):
        store.path(name)


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct.Q4_1", "a", "_x", "console"])
def test_plain_names_pass(name):
    assert check_name(name) == name


def test_no_room_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(DiskFull) as caught:
        check_room(tmp_path, 1 << 60)
    assert caught.value.evidence["need_bytes"] == 1 << 60


# ---------------------------------------------------------------------------------------------- import, verify, remove
def test_import_copies_what_belongs_to_a_model_and_verifies(store, folder):
    name = store.add_local(folder)
    assert name == "mine" and store.names() == ["mine"]
    assert not (store.root / "mine" / "notes.bin").exists()
    rows = {row["path"]: row for row in store.manifest("mine")["files"]}
    assert rows["model.safetensors"]["sha256"] == hashlib.sha256(b"w" * 1000).hexdigest()
    assert rows["model.safetensors"]["size"] == 1000
    assert store.verify("mine").ok


def test_verify_names_what_is_wrong(store, folder):
    store.add_local(folder)
    target = store.root / "mine"
    (target / "model.safetensors").write_bytes(b"v" * 1000)
    (target / "config.json").unlink()
    (target / "extra.txt").write_text("x")
    states = {item.file: item.state for item in store.verify("mine").files}
    assert states == {"model.safetensors": "checksum", "config.json": "missing", "extra.txt": "extra"}


def test_verify_without_a_manifest_says_how_to_get_one(store):
    (store.root / "bare").mkdir(parents=True)
    with pytest.raises(BrokenFile, match="no manifest"):
        store.verify("bare")


def test_a_manifest_that_points_outside_is_refused(store, folder):
    store.add_local(folder)
    path = store.root / "mine" / "manifest.json"
    path.write_text(json.dumps({"files": [{"path": "../../secret", "size": 1, "sha256": "0"}]}))
    with pytest.raises(NameRefused):
        store.verify("mine")


def test_a_linked_import_shares_the_bytes(store, folder):
    store.add_local(folder, link=True)
    assert os.stat(store.root / "mine" / "model.safetensors").st_ino == os.stat(folder / "model.safetensors").st_ino


def test_a_link_that_leaves_the_folder_is_refused(store, folder, tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (folder / "tokenizer.json").symlink_to(secret)
    with pytest.raises(NameRefused, match="leaves the folder"):
        store.add_local(folder)
    assert store.names() == []


def test_a_snapshot_of_the_hubs_cache_can_be_imported(store, tmp_path):
    blobs, snapshot = tmp_path / "repo" / "blobs", tmp_path / "repo" / "snapshots" / A
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "one").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/one")
    (snapshot / "config.json").write_text("{}")
    store.add_local(snapshot, "cached")
    target = store.root / "cached" / "model.safetensors"
    assert target.read_bytes() == b"weights" and not target.is_symlink()


def test_an_import_never_overwrites(store, folder):
    store.add_local(folder)
    with pytest.raises(NameTaken, match="already") as caught:
        store.add_local(folder)
    assert "leave" not in caught.value.title and caught.value.remedy


def test_import_of_nothing_or_of_no_model(store, tmp_path):
    with pytest.raises(ModelNotFound):
        store.add_local(tmp_path / "absent")
    text = tmp_path / "a.txt"
    text.write_text("x")
    with pytest.raises(UnknownFormat):
        store.add_local(text)
    with pytest.raises(UnknownFormat):
        store.add_local(tmp_path)


def test_only_a_folder_that_is_a_model_at_its_top_is_imported(store, folder, tmp_path):
    """A folder of models, the models folder itself, or a whole disk is refused before it is walked."""
    store.add_local(folder)
    for place in (store.root, tmp_path, Path("/")):
        with pytest.raises(UnknownFormat, match="neither config.json nor a .gguf"):
            store.add_local(place, "new")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"w")
    with pytest.raises(NameRefused, match="holds the models folder itself"):
        store.add_local(tmp_path, "new")
    assert store.names() == ["mine"]


def test_a_folder_with_more_files_than_a_model_has_is_refused(store, folder, monkeypatch):
    monkeypatch.setattr(imports, "MOST", 3)
    (folder / "deep").mkdir()
    (folder / "deep" / "more.json").write_text("{}")
    with pytest.raises(UnknownFormat, match="more than 3 files"):
        store.add_local(folder)


def test_a_linked_folder_is_refused_and_not_left_out(store, folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (folder / "inner").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NameRefused, match="link to a folder"):
        store.add_local(folder)


@pytest.mark.parametrize("place", ["~nobody-of-this-name/x", "a\0b", "x" * 5000, ""])
def test_a_path_that_cannot_be_is_no_fault_of_ours(store, place):
    with pytest.raises((ModelNotFound, UnknownFormat)):
        store.add_local(place)


@pytest.mark.parametrize("number,kind", [(errno.EACCES, LoadError), (errno.ENOSPC, DiskFull), (errno.EXDEV, NotSupported)])
def test_what_the_system_refuses_is_said_in_our_words(store, folder, monkeypatch, number, kind):
    def refuse(*_):
        raise OSError(number, os.strerror(number), str(folder))
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(kind) as caught:
        store.add_local(folder, link=True)
    assert caught.value.remedy and store.names() == []


def test_a_folder_that_may_not_be_read_is_said_in_our_words(store, folder, monkeypatch):
    def refuse(_):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(LoadError, match="cannot be read"):
        store.add_local(folder)


def test_a_cancelled_import_leaves_no_model(store, folder):
    cancel = Cancel()
    cancel.set()
    with pytest.raises(Cancelled):
        store.add_local(folder, cancel=cancel)
    assert store.names() == []


def test_remove_takes_the_folder_and_spares_what_a_link_points_to(store, folder):
    store.add_local(folder)
    store.remove("mine")
    assert store.names() == []
    (store.root / "linked").symlink_to(folder)
    store.remove("linked")
    assert (folder / "model.safetensors").exists()
    with pytest.raises(ModelNotFound):
        store.remove("mine")


# ---------------------------------------------------------------------------------------------- the Hub
class StubHub:
    """Just enough of the Hub: revisions with file lists, files with ranges, and a switch that cuts a transfer off."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branch = A
        self.cut: tuple[str, int] | None = None      # (file, bytes after which the connection breaks)
        self.ranges: list[tuple[str, str | None]] = []
        self.seen_tokens: set[str | None] = set()
        self.lie: str | None = None                  # this file is served with other bytes
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stub.seen_tokens.add(self.headers.get("authorization"))
                path = unquote(self.path.split("?")[0])
                if path.startswith("/api/models/"):
                    stub.listing(self, path.rsplit("/", 1)[-1])
                else:
                    _, _, _, _, commit, file = path.split("/", 5)
                    stub.file(self, commit, file)

            def log_message(self, *args) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def listing(self, handler, revision: str) -> None:
        commit = self.branch if revision == "main" else revision
        if commit not in self.commits:
            handler.send_error(404)
            return
        rows = [{"rfilename": name, "size": len(data), "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
                 **({"lfs": {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 1}}
                    if name.endswith("safetensors") else {})} for name, data in self.commits[commit].items()]
        body = json.dumps({"sha": commit, "siblings": rows, "cardData": {"license": "mit"}}).encode()
        handler.send_response(200)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def file(self, handler, commit: str, name: str) -> None:
        data = self.commits[commit][name]
        data = data[::-1] if self.lie == name else data
        wanted = handler.headers.get("range")
        self.ranges.append((name, wanted))
        start = int(wanted.split("=")[1].rstrip("-")) if wanted else 0
        handler.send_response(206 if wanted else 200)
        if wanted:
            handler.send_header("content-range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.send_header("content-length", str(len(data) - start))
        handler.end_headers()
        stop = self.cut[1] if self.cut and self.cut[0] == name else len(data)
        handler.wfile.write(data[start:stop])
        if stop < len(data):
            handler.wfile.flush()
            handler.connection.close()


@pytest.fixture
def stub(monkeypatch):
    made = StubHub()
    weights = bytes(range(256)) * 40_000                 # 10 MB: several pieces
    made.commits[A] = {"config.json": b'{"v": "A"}', "model-1.safetensors": weights, "model-2.safetensors": weights[::-1],
                       "pytorch_model.bin": b"pickle"}
    made.commits[B] = {"config.json": b'{"v": "B"}', "model-1.safetensors": b"b", "model-2.safetensors": b"b"}
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_pull_takes_the_weights_and_no_pickle(stub, store):
    seen = []
    assert store.pull("org/tiny", progress=seen.append) == "tiny"
    manifest = store.manifest("tiny")
    assert manifest["revision"] == A and manifest["license"] == "mit" and manifest["source"] == "hub:org/tiny"
    assert {row["path"] for row in manifest["files"]} == {"config.json", "model-1.safetensors", "model-2.safetensors"}
    assert store.verify("tiny").ok
    assert seen[-1].done == seen[-1].total == 20_480_010
    assert stub.seen_tokens == {"Bearer hf_test"}


def test_dl_01_a_pull_cut_off_is_no_model_and_goes_on_where_it_stopped(stub, store):
    stub.cut = ("model-2.safetensors", 6_000_000)
    with pytest.raises(FetchFailed):
        store.pull("org/tiny")
    assert store.names() == []
    stub.cut = None
    stub.ranges.clear()
    store.pull("org/tiny")
    ((name, wanted),) = stub.ranges                       # the two complete files were not fetched again
    assert name == "model-2.safetensors" and 0 < int(wanted.split("=")[1].rstrip("-")) <= 6_000_000
    assert store.verify("tiny").ok


def test_dl_03_a_deleted_commit_is_used_from_here_and_never_replaced_by_the_branch(stub, store):
    store.pull("org/tiny", A)
    stub.branch = B
    del stub.commits[A]
    assert store.pull("org/tiny", A) == "tiny"            # already here: no request is needed
    assert json.loads((store.root / "tiny" / "config.json").read_text()) == {"v": "A"}
    with pytest.raises(FetchFailed, match="no such repository or revision"):
        store.pull("org/tiny", A, name="again")
    assert store.names() == ["tiny"]
    with pytest.raises(NameRefused):                      # main is B now: it does not overwrite A
        store.pull("org/tiny")


def test_a_wrong_checksum_is_refused_and_only_that_file_goes(stub, store):
    stub.lie = "model-1.safetensors"
    with pytest.raises(ChecksumMismatch):
        store.pull("org/tiny")
    assert store.names() == []
    stub.lie = None
    stub.ranges.clear()
    store.pull("org/tiny")
    assert [name for name, _ in stub.ranges] == ["model-1.safetensors", "model-2.safetensors"]


def test_a_small_file_is_verified_by_its_git_blob(stub, store):
    stub.lie = "config.json"
    with pytest.raises(ChecksumMismatch):
        store.pull("org/tiny")


def test_names_of_the_hub_cannot_leave_the_folder(stub, store):
    stub.commits[A]["../evil.safetensors"] = b"x"
    with pytest.raises(NameRefused):
        store.pull("org/tiny")


def test_several_ggufs_must_be_chosen_from():
    files = [hub.HubFile(f"m.{kind}.gguf", 1, None, None) for kind in ("Q4_0", "Q8_0")]
    with pytest.raises(InvalidRequest, match="several GGUF"):
        hub.choose(files, None)
    assert hub.choose(files, ("*Q8*",)) == files[1:]
    with pytest.raises(InvalidRequest, match="No file"):
        hub.choose(files, ("*Q5*",))


def test_no_hub_is_one_clear_error(store, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FetchFailed, match="could not be reached"):
        store.pull("org/tiny")
    with pytest.raises(InvalidRequest):
        store.pull("not a repo")
