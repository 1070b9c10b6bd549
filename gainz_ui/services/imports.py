"""Import of a model that already lies on this machine: a folder or one file, copied or hard-linked into models/.

Refuses what would leave the folder: links that point outside it. Links inside it (as the Hub's own cache has them)
are followed and become plain files.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

from backends.base import Cancel, ModelNotFound, NameRefused, Progress, ProgressFn, UnknownFormat
from gainz_ui.services.store import CHUNK, Store, check_name, check_room, file_row

KEPT = (".safetensors", ".gguf", ".json", ".jinja", ".model", ".txt", ".md", ".tiktoken", ".vocab", ".merges")
WEIGHTS = (".safetensors", ".gguf")


def plain_name(text: str) -> str:
    """A model name made of a file's or a repository's name."""
    return check_name(re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-") or "model")


def add_local(store: Store, path: Path, name: str | None, progress: ProgressFn, cancel: Cancel, *, link: bool) -> str:
    """Name of the imported model. ModelNotFound, NameRefused, UnknownFormat, DiskFull."""
    path = path.expanduser()
    if not path.exists():
        raise ModelNotFound(f"There is nothing at {path}.", field="path", remedy="Check the path on the machine of the server.")
    files = _files(path)
    name = check_name(name) if name else plain_name(path.stem if path.is_file() else path.name)
    if store.path(name).exists():
        raise NameRefused(f"There is a model {name!r} already; it is not overwritten.", field="name",
                          remedy="Choose another name, or remove the old one first.")
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
            target.parent.mkdir(parents=True, exist_ok=True)
            rows.append(file_row(target, staging, _bring(source, target, link, report, cancel)))
            done += source.stat().st_size
        manifest = {"source": f"local: {path.resolve()}", "revision": None, "how": "linked" if link else "copied", "files": rows}
        return store.admit(staging, name, manifest)


def _files(path: Path) -> list[tuple[Path, str]]:
    """(real file, name inside the model) of everything worth keeping."""
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UnknownFormat(f"{path.name} is no GGUF file.", remedy="Import a .gguf file, or the whole folder of the model.")
        return [(path.resolve(), path.name)]
    root = path.resolve()
    allowed = _hub_cache(root) or root
    found = []
    for item in sorted(root.rglob("*")):
        inside = item.relative_to(root)
        if any(part.startswith(".") for part in inside.parts) or not item.is_file() or item.suffix.lower() not in KEPT:
            continue
        real = item.resolve()
        if not real.is_relative_to(allowed):
            raise NameRefused(f"{inside.as_posix()} is a link that leaves the folder.", target=real,
                              remedy="Replace the link by the file itself, then import again.")
        if inside.as_posix() != "manifest.json":
            found.append((real, inside.as_posix()))
    if not any(name.lower().endswith(WEIGHTS) for _, name in found):
        raise UnknownFormat(f"{path.name} holds no *.safetensors and no *.gguf file.")
    return found


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
