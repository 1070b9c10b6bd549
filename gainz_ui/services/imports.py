"""Import of a model that already lies on this machine: a folder or one file, copied or hard-linked into models/.

A folder is a model by what lies at its top, looked at before anything else: a path typed wrong must not walk a disk.
Refuses what would leave the folder: links that point outside it. Links inside it (as the Hub's own cache has them) are
followed and become plain files.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backends.base import (
    Cancel, DiskFull, LoadError, ModelNotFound, NameRefused, NameTaken, NotSupported, Progress, ProgressFn, UnknownFormat)
from gainz_ui.services.formats import form
from gainz_ui.services.store import CHUNK, Store, check_name, check_room, file_row

KEPT = (".safetensors", ".gguf", ".json", ".jinja", ".model", ".txt", ".md", ".tiktoken", ".vocab", ".merges")
WEIGHTS = (".safetensors", ".gguf")
MOST = 2000                 # files of one model; the largest checkpoints have a few hundred


def plain_name(text: str) -> str:
    """A model name made of a file's or a repository's name."""
    return check_name(re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-") or "model")


def add_local(store: Store, path: Path, name: str | None, progress: ProgressFn, cancel: Cancel, *, link: bool) -> str:
    """Name of the imported model. ModelNotFound, NameRefused, UnknownFormat, DiskFull, LoadError, NotSupported."""
    path = _place(path)
    with _said(path):
        files = _files(path, store.root.resolve())
    name = check_name(name) if name else plain_name(path.stem if path.is_file() else path.name)
    if store.path(name).exists():
        raise NameTaken(f"There is a model {name!r} already; it is not overwritten.", field="name")
    total = sum(source.stat().st_size for source, _ in files)
    with store.gather(name, progress, cancel) as staging:
        shutil.rmtree(staging)
        staging.mkdir()
        if not link:
            check_room(staging, total)
        done, rows = 0, []
        for source, inside in files:
            def report(n: int, before: int = done, note: str = inside) -> None:
                progress(Progress("import", before + n, total, note))

            target = staging / inside
            with _said(source):
                target.parent.mkdir(parents=True, exist_ok=True)
                rows.append(file_row(target, staging, _bring(source, target, link, report, cancel)))
            done += source.stat().st_size
        manifest = {"source": f"local: {path.resolve()}", "revision": None, "how": "linked" if link else "copied", "files": rows,
                    **form(staging)}
        return store.admit(staging, name, manifest)


def _place(path: Path) -> Path:
    """The folder or file, found; ModelNotFound."""
    try:
        path = path.expanduser()
        if path.exists():
            return path
        reason = "no such file or folder"
    except (RuntimeError, ValueError) as error:      # ~ of nobody; characters that no path has
        reason = str(error)
    except OSError as error:                         # a folder on the way that may not be entered; a name too long
        reason = error.strerror or str(error)
    raise ModelNotFound(f"There is nothing at {str(path)[:500]}.", field="path", reason=reason,
                        remedy="Check the path on the machine of the server.")


@contextmanager
def _said(path: Path) -> Iterator[None]:
    """What the system says against reading or copying, as an error of ours."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise NotSupported(f"{path.name} lies on another disk: it cannot be linked.", file=path,
                               remedy="Import it without linking.") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull("The disk became full while copying.", file=path.name) from error
        raise LoadError(f"{error.filename or path} cannot be read or copied.", reason=error.strerror or error,
                        remedy="Give the user of the server the right to read it, or choose another path.") from error


def _files(path: Path, models: Path) -> list[tuple[Path, str]]:
    """(real file, name inside the model) of everything worth keeping. ``models``: the folder that it is brought into."""
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UnknownFormat(f"{path.name} is no GGUF file.", remedy="Import a .gguf file, or the whole folder of the model.")
        return [(path.resolve(), path.name)]
    root = path.resolve()
    if not any(_is_model(item) for item in root.iterdir()):
        raise UnknownFormat(f"{path} is no model: neither config.json nor a .gguf file lies in it.",
                            remedy="Give the folder that holds the model's own files, or one .gguf file.")
    if models.is_relative_to(root):
        raise NameRefused(f"{path} holds the models folder itself.", models=models,
                          remedy="Give the folder of one model.")
    allowed, found = _hub_cache(root) or root, []
    for item, inside in _walk(root):
        real = item.resolve()
        if not real.is_relative_to(allowed):
            raise NameRefused(f"{inside} is a link that leaves the folder.", target=real,
                              remedy="Replace the link by the file itself, then import again.")
        found.append((real, inside))
    if not any(name.lower().endswith(WEIGHTS) for _, name in found):
        raise UnknownFormat(f"{path.name} holds no *.safetensors and no *.gguf file.")
    return found


def _is_model(item: Path) -> bool:
    return item.name == "config.json" or item.suffix.lower() == ".gguf" and item.is_file()


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    """Files worth keeping, by name; UnknownFormat for a folder that holds more than a model would. OSError comes through."""
    def cannot(error: OSError) -> None:
        raise error

    count = 0
    for folder, inner, names in os.walk(root, onerror=cannot):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        count += len(names)
        if link := next((name for name in inner if Path(folder, name).is_symlink()), None):
            raise NameRefused(f"{link} is a link to a folder.", folder=folder, remedy="Replace the link by the folder itself.")
        if count > MOST:
            raise UnknownFormat(f"{root} holds more than {MOST:,} files: it is no folder of one model.")
        for name in sorted(names):
            item = Path(folder, name)
            inside = item.relative_to(root).as_posix()
            if not name.startswith(".") and item.suffix.lower() in KEPT and item.is_file() and inside != "manifest.json":
                yield item, inside


def _hub_cache(root: Path) -> Path | None:
    """The repository's folder where ``root`` is a snapshot of the Hub's cache: its links point to blobs beside it."""
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        return root.parent.parent
    return None


def _bring(source: Path, target: Path, link: bool, report, cancel: Cancel) -> str:
    """Copy or hard-link one file; its SHA-256. Hashed while it is copied: one read."""
    digest = hashlib.sha256()
    with source.open("rb") as file:
        sink = None if link else target.open("wb")
        try:
            done = 0
            while piece := file.read(CHUNK):
                cancel.raise_if_set("The import")
                digest.update(piece)
                if sink is not None:
                    sink.write(piece)
                done += len(piece)
                report(done)
        finally:
            if sink is not None:
                sink.close()
    if link:
        os.link(source, target)
    return digest.hexdigest()
