"""The folder models/: what enters it, how it is checked, how it leaves.

Knows names, manifests and hashes. Refuses to know formats (the backends' business) and what is in memory (the
studio's). Nothing is ever half there: everything is gathered in ``models/.partial`` and moved in by one rename, the
manifest included; a folder without a dot in front is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from backends.base import BrokenFile, Cancel, ChecksumMismatch, DiskFull, NameRefused, NameTaken, Progress, ProgressFn, read_json
from gainz_ui.services.catalog import locate, places

if TYPE_CHECKING:
    from gainz_ui.services.revisions import Revisions

MANIFEST = "manifest.json"
PARTIAL = ".partial"
CHUNK = 1 << 20
SPARE = 64 << 20            # bytes that stay free: a disk filled to the last byte breaks other programs
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
_RESERVED = {"con", "prn", "aux", "nul", *(f"com{i}" for i in range(1, 10)), *(f"lpt{i}" for i in range(1, 10))}


@dataclass(frozen=True)
class FileCheck:
    """One file against the manifest. ``state``: ok, missing, size, checksum, extra. Sizes in bytes."""

    file: str
    state: str
    expected: str = ""
    found: str = ""


@dataclass(frozen=True)
class Verification:
    name: str
    files: tuple[FileCheck, ...]

    @property
    def ok(self) -> bool:
        return all(item.state == "ok" for item in self.files)


def silent(_: Progress) -> None:
    """For callers that show no progress."""


def check_name(name: str) -> str:
    """``name`` if it is plain and portable, else NameRefused."""
    if not isinstance(name, str) or not _NAME.match(name) or name.split(".")[0].lower() in _RESERVED or name.endswith("."):
        raise NameRefused(f"{name!r} is no plain name.", field="name")
    return name


def check_room(folder: Path, need: int) -> None:
    """DiskFull unless ``need`` bytes and some spare fit on the disk of ``folder``."""
    free = shutil.disk_usage(folder).free
    if need + SPARE > free:
        raise DiskFull("There is not enough room on the disk.", need_bytes=need, free_bytes=free, folder=folder)


def sha256(path: Path, report: Callable[[int], None] = lambda n: None, cancel: Cancel | None = None) -> str:
    """Hex digest of a file, read in pieces; ``report`` gets the bytes of each piece."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            if cancel is not None:
                cancel.raise_if_set("The check")
            digest.update(piece)
            report(len(piece))
    return digest.hexdigest()


def file_row(path: Path, root: Path, digest: str) -> dict[str, Any]:
    """One entry of a manifest's ``files``."""
    return {"path": path.relative_to(root).as_posix(), "size": path.stat().st_size, "sha256": digest}


class Store:
    """models/ of one installation. Safe against a second process on the same folder: one writer at a time."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    # ------------------------------------------------------------------------------------------ names and manifests
    def path(self, name: str) -> Path:
        """Where a model of that name is or would be: a folder, or a single .gguf file that somebody put there."""
        return places(self.root).get(name) or self.root / check_name(name)

    def existing(self, name: str) -> Path:
        return locate(self.root, name)

    def names(self) -> list[str]:
        return list(places(self.root))

    def manifest(self, name: str) -> Mapping[str, Any]:
        path = self.path(name)
        return read_json(path / MANIFEST) if path.is_dir() else {}

    # ------------------------------------------------------------------------------------------ bringing in
    @contextmanager
    def gather(self, name: str, progress: ProgressFn = silent, cancel: Cancel | None = None) -> Iterator[Path]:
        """The staging folder of ``name``, this process its only writer. What is left there survives for a later resume."""
        self.root.mkdir(parents=True, exist_ok=True)
        partial = self.root / PARTIAL
        partial.mkdir(exist_ok=True)
        staging = partial / check_name(name)
        lock = filelock.FileLock(partial / f"{name}.lock")
        while True:
            try:
                lock.acquire(timeout=0.25)
                break
            except filelock.Timeout:
                progress(Progress("wait", note=f"another Gainz is making or fetching {name!r}"))
                if cancel is not None:
                    cancel.raise_if_set("The wait")
        try:
            staging.mkdir(exist_ok=True)
            yield staging
        finally:
            lock.release()

    def admit(self, staging: Path, name: str, manifest: Mapping[str, Any]) -> str:
        """Make a gathered folder the model ``name``: manifest first, then one rename."""
        target = self.root / check_name(name)
        if self.path(name).exists():
            raise NameTaken(f"There is a model {name!r} already; it is not overwritten.", field="name")
        self.complete(staging, manifest)
        os.replace(staging, target)
        return name

    def renew(self, staging: Path, name: str, manifest: Mapping[str, Any]) -> str:
        """Make a gathered folder the revision in use of the model ``name``; the one before is kept."""
        self.complete(staging, manifest)
        self.revisions.renew(staging, name)
        return name

    def complete(self, staging: Path, manifest: Mapping[str, Any]) -> None:
        """Write the manifest of a gathered folder, through to the disk."""
        with (staging / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(dict(manifest), file, indent=1, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())

    def ensure_starter(self, progress: ProgressFn = silent, cancel: Cancel | None = None) -> str:
        """The starter model's name, fetched first if it is not there, its draft beside it. FetchFailed, ChecksumMismatch,
        DiskFull."""
        from gainz_ui.services import starter, starter_draft
        name = starter.ensure(self, progress, cancel or Cancel())
        starter_draft.place(self, progress, cancel or Cancel())
        return name

    def add_local(self, path: str | Path, name: str | None = None, progress: ProgressFn = silent,
                  cancel: Cancel | None = None, *, link: bool = False) -> str:
        """Copy (or hard-link) a folder or file from elsewhere on this machine into models/. Returns the name."""
        from gainz_ui.services import imports
        return imports.add_local(self, Path(path), name, progress, cancel or Cancel(), link=link)

    def pull(self, repo: str, revision: str | None = None, files: tuple[str, ...] | None = None, name: str | None = None,
             progress: ProgressFn = silent, cancel: Cancel | None = None) -> str:
        """Fetch a repository of the Hub at one commit; resumes; every file is verified. Returns the name."""
        from gainz_ui.services import hub
        return hub.pull(self, repo, revision, files, name, progress, cancel or Cancel())

    # ------------------------------------------------------------------------------------------ checking and leaving
    @property
    def revisions(self) -> Revisions:
        """Those that are kept beside the ones in use."""
        from gainz_ui.services.revisions import Revisions
        return Revisions(self.root)

    def repair(self, name: str, progress: ProgressFn = silent, cancel: Cancel | None = None) -> Verification:
        """Fetch again, at the same commit, the files that are not as the manifest says, and only those. What `verify` then finds."""
        from gainz_ui.services import hub
        found = self.verify(name, progress, cancel)
        if all(item.state in ("ok", "extra") for item in found.files):
            return found
        hub.repair(self, name, found, progress, cancel or Cancel())
        return self.verify(name, progress, cancel)

    def verify(self, name: str, progress: ProgressFn = silent, cancel: Cancel | None = None) -> Verification:
        """Every file of the manifest by size and SHA-256, and files that the manifest does not know."""
        folder = self.existing(name)
        manifest = self.manifest(name)
        if not isinstance(manifest.get("files"), list):
            raise BrokenFile(f"{name} has no manifest to compare with.", file=MANIFEST,
                             remedy="It was put there by hand. Import it with `python app.py import PATH` to get one.")
        rows = [_row(item, name) for item in manifest["files"]]
        total, done = sum(size for _, size, _ in rows), 0

        def report(n: int) -> None:
            nonlocal done
            done += n
            progress(Progress("verify", done, total))

        checks = [_check_file(folder, *row, report, cancel) for row in rows]
        known = {row[0] for row in rows} | {MANIFEST}
        present = (p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file())
        checks += [FileCheck(item, "extra") for item in present if item not in known and not item.startswith(".")]
        return Verification(name, tuple(checks))

    def remove(self, name: str) -> None:
        """Delete a model from models/, with the revisions that are kept of it. A linked folder is unlinked, never followed. It goes
        out of sight at once."""
        path = self.existing(name)
        if path.is_dir():                       # the revisions of a folder; a single file, whatever it is called, has none
            self.revisions.drop(name)
        if path.is_symlink() or path.is_file():
            path.unlink()
            return
        (self.root / PARTIAL).mkdir(exist_ok=True)
        grave = self.root / PARTIAL / f"removed-{name}-{os.getpid()}"
        os.replace(path, grave)
        shutil.rmtree(grave)


def _row(item: Any, name: str) -> tuple[str, int, str]:
    """path, size, sha256 of one manifest entry; a path that leaves the folder is refused."""
    try:
        path, size, digest = item["path"], int(item["size"]), item["sha256"]
        parts = Path(path).parts
    except (TypeError, KeyError, ValueError) as error:
        raise BrokenFile(f"The manifest of {name} is damaged.", file=MANIFEST, entry=item) from error
    if not parts or Path(path).is_absolute() or ".." in parts:
        raise NameRefused("A manifest entry leaves its folder.", entry=path)
    return path, size, digest


def _check_file(folder: Path, path: str, size: int, digest: str, report: Callable[[int], None],
                cancel: Cancel | None) -> FileCheck:
    file = folder / path
    if not file.is_file():
        return FileCheck(path, "missing", str(size))
    if file.stat().st_size != size:
        return FileCheck(path, "size", str(size), str(file.stat().st_size))
    found = sha256(file, report, cancel)
    return FileCheck(path, "ok" if found == digest else "checksum", digest, found)


def demand(path: Path, size: int | None, digest: str | None, found: str) -> None:
    """ChecksumMismatch, and the file is gone, unless a fetched file is the one expected."""
    actual = path.stat().st_size
    if (size is None or actual == size) and (digest is None or digest == found):
        return
    path.unlink()
    raise ChecksumMismatch(f"{path.name} is not the file expected.", expected_bytes=size, found_bytes=actual,
                           expected_sha256=digest, found_sha256=found)
