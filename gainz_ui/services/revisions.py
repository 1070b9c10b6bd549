"""Revisions of models: the one in use is models/NAME, the others are kept whole in models/.revisions/NAME/ID.

Nothing is ever overwritten in place: an update is gathered elsewhere, kept, and then takes the place of the one in use by two renames.
What was begun is written down first (`JOURNAL`), so that a process that dies between the two leaves something that `mend` ends.
Knows folders and manifests; who may fetch what, `hub` knows.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from backends.base import Cancel, InvalidRequest, ModelNotFound, NameTaken, NotSupported, ProgressFn, read_json
from gainz_ui.services.catalog import locate
from gainz_ui.services.store import MANIFEST, check_name

FOLDER, STATE, JOURNAL = ".revisions", "state.json", "switch.json"


@dataclass(frozen=True)
class Revision:
    """``id``: the commit of a hub's model, else a digest of its files. ``made``: when its manifest was written, seconds since 1970."""

    id: str
    active: bool
    source: str
    asked: str
    made: float
    bytes: int

    @property
    def short(self) -> str:
        return self.id[:12]


@dataclass(frozen=True)
class Kept:
    """Everything that is here of one model. ``revisions``: the one in use first, then the newest. ``previous``: what `rollback` goes
    to, None: there was nothing before."""

    name: str
    pinned: bool
    revisions: tuple[Revision, ...]
    previous: str | None


def identity(manifest: Mapping[str, Any]) -> str:
    """The id of a revision by its manifest."""
    if revision := manifest.get("revision"):
        return check_name(str(revision))
    rows = [[row.get("path"), row.get("sha256")] for row in manifest.get("files") or () if isinstance(row, Mapping)]
    return "files-" + hashlib.sha256(json.dumps([rows, manifest.get("remote")], sort_keys=True).encode()).hexdigest()[:16]


class Revisions:
    """Of one models/ folder. Safe against a second process: one switches at a time."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    # ------------------------------------------------------------------------------------------ looking
    def of(self, name: str) -> Kept:
        """ModelNotFound, NameRefused."""
        place, kept = locate(self.root, name), self._kept(name)
        manifest = read_json(place / MANIFEST) if place.is_dir() else {}
        now = identity(manifest) if manifest else ""
        found = [_described(place, now, True)] if manifest else []
        others = [_described(kept / each, each, False) for each in self._ids(name)]
        state = self._state(name)
        before = [each for each in state["history"] if each != now and (kept / each).is_dir()]
        return Kept(name, state["pinned"], (*found, *sorted(others, key=lambda one: -one.made)), before[-1] if before else None)

    def folder(self, name: str, id: str) -> Path | None:  # noqa: A002  the field's own name
        """Where a kept revision lies."""
        return self._kept(name) / id if id in self._ids(name) else None

    def files(self, name: str) -> dict[str, Path]:
        """SHA-256 → file, of everything that is here of this model: what an update need not fetch again."""
        places = [self.root / check_name(name), *(self._kept(name) / each for each in self._ids(name))]
        rows = [(place, row) for place in places if (place / MANIFEST).is_file() for row in read_json(place / MANIFEST).get("files") or ()]
        return {row["sha256"]: place / row["path"] for place, row in rows
                if isinstance(row, Mapping) and isinstance(row.get("sha256"), str) and ".." not in Path(str(row.get("path"))).parts
                and (place / str(row.get("path"))).is_file()}

    # ------------------------------------------------------------------------------------------ changing
    def renew(self, staging: Path, name: str) -> None:
        """``staging``, complete with its manifest, becomes the one in use; the one before is kept."""
        id = identity(read_json(staging / MANIFEST))  # noqa: A001
        with self._changing(name):
            self._refuse_pinned(name)
            target = self._kept(name) / id
            if target.exists():
                shutil.rmtree(target)           # a copy of the same commit that was kept; the fresh one was verified just now
            os.replace(staging, target)
            self._switch(name, id)

    def replace(self, staging: Path, name: str) -> None:
        """``staging`` takes the place of the same revision whose files were damaged."""
        with self._changing(name):
            id = self._active(name)  # noqa: A001
            fresh, damaged = self._kept(name) / f"{id}.fresh", f"{id}.damaged"
            os.replace(staging, fresh)
            self._switch(name, fresh.name, park=damaged, remember=False)
            shutil.rmtree(self._kept(name) / damaged)

    def rollback(self, name: str, to: str | None = None) -> Revision:
        """Back to the revision in use before, or to the kept one whose id begins with ``to``. ModelNotFound, InvalidRequest,
        NameTaken where it is pinned."""
        with self._changing(name):
            self._refuse_pinned(name)
            kept = self.of(name)
            id = self._chosen(kept, to)  # noqa: A001
            if id != kept.revisions[0].id:
                self._switch(name, id, back=to is None)
            return self.of(name).revisions[0]

    def pin(self, name: str, on: bool = True) -> Kept:
        """Stay at the revision in use, whatever is pulled; off: no longer."""
        locate(self.root, name)
        with self._changing(name):
            self._save(name, {**self._state(name), "pinned": on})
        return self.of(name)

    def drop(self, name: str, which: str | None = None) -> None:
        """Delete a kept revision; None: all of them, and what is known of the model."""
        with self._changing(name):
            if which is None:
                shutil.rmtree(self._kept(name))
                return
            kept = self.of(name)
            id = self._chosen(kept, which)  # noqa: A001
            if id == kept.revisions[0].id:
                raise InvalidRequest(f"{id[:12]} is in use.", field="revision", remedy="Roll back to another one first.")
            shutil.rmtree(self._kept(name) / id)

    def mend(self) -> None:
        """End switches that a process left half done. Harmless at any time."""
        for journal in self.root.glob(f"{FOLDER}/*/{JOURNAL}"):
            name = journal.parent.name
            with self._changing(name):
                if not journal.is_file():       # somebody else did it meanwhile
                    continue
                said, place = read_json(journal), self.root / name
                if not place.exists():
                    source = next((journal.parent / str(said.get(key)) for key in ("to", "from")
                                   if (journal.parent / str(said.get(key))).is_dir()), None)
                    if source is not None:
                        os.replace(source, place)
                journal.unlink()

    # ------------------------------------------------------------------------------------------ inside
    def _kept(self, name: str) -> Path:
        return self.root / FOLDER / check_name(name)

    def _ids(self, name: str) -> list[str]:
        folder = self._kept(name)
        return sorted(each.name for each in folder.iterdir() if (each / MANIFEST).is_file()) if folder.is_dir() else []

    def _active(self, name: str) -> str:
        return identity(read_json(locate(self.root, name) / MANIFEST))

    def _state(self, name: str) -> dict[str, Any]:
        said = read_json(self._kept(name) / STATE)
        history = said.get("history")
        return {"pinned": said.get("pinned") is True, "history": [str(each) for each in history] if isinstance(history, list) else []}

    def _save(self, name: str, state: Mapping[str, Any]) -> None:
        _write(self._kept(name) / STATE, state)

    @contextmanager
    def _changing(self, name: str) -> Iterator[None]:
        folder = self._kept(name)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f"{name}.lock"):
            folder.mkdir(exist_ok=True)
            try:
                yield
            except OSError as error:            # Windows refuses to rename what a process has open
                raise NotSupported(f"The files of {name} cannot be moved now.", model=name, reason=error.strerror or error,
                                   remedy="Unload the model, then try again.") from error

    def _refuse_pinned(self, name: str) -> None:
        if self._state(name)["pinned"]:
            raise NameTaken(f"{name} is pinned to {self._active(name)[:12]}.", field="name",
                            remedy=f"Unpin it first: `python app.py pin {name} --off`, or on the Models tab.")

    def _chosen(self, kept: Kept, to: str | None) -> str:
        if to is None:
            if kept.previous is None:
                raise InvalidRequest(f"There is no earlier revision of {kept.name} to go back to.", field="revision",
                                     remedy=_known(kept))
            return kept.previous
        found = [one.id for one in kept.revisions if to and one.id.startswith(to)]
        if len(found) != 1:
            raise ModelNotFound(f"{'More than one' if found else 'No'} revision of {kept.name} begins with {to!r}.", field="revision",
                                remedy=_known(kept))
        return found[0]

    def _switch(self, name: str, to: str, park: str | None = None, back: bool = False, remember: bool = True) -> None:
        """The kept revision ``to`` into use, the one in use aside. ``back``: a step back in history, not a further one."""
        place, kept, now = self.root / name, self._kept(name), self._active(name)
        aside = kept / (park or now)
        _write(kept / JOURNAL, {"from": aside.name, "to": to})
        if aside.exists():
            shutil.rmtree(aside)
        os.replace(place, aside)
        os.replace(kept / to, place)
        (kept / JOURNAL).unlink()
        if remember:
            state = self._state(name)
            rest = [each for each in state["history"] if each not in (now, to)]
            self._save(name, {**state, "history": [*rest, to] if back else [*rest, now, to]})


def roll_back(studio: Any, revisions: Revisions, name: str, to: str | None, progress: ProgressFn, cancel: Cancel) -> Revision:
    """`Revisions.rollback` under a running studio: a loaded model is unloaded before, and loaded again as it was."""
    info = studio.loaded().get(name)
    if info is not None:
        studio.unload(name)
    try:
        found = revisions.rollback(name, to)
    finally:
        studio.changed.emit()
        if info is not None:
            studio.load(name, dict(info.options), progress, cancel)
    return found


def _described(place: Path, id: str, active: bool) -> Revision:  # noqa: A002
    manifest = read_json(place / MANIFEST)
    size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    return Revision(id, active, str(manifest.get("source") or ""), str(manifest.get("asked") or ""), (place / MANIFEST).stat().st_mtime, size)


def _known(kept: Kept) -> str:
    return f"Here: {', '.join(one.short + (' (in use)' if one.active else '') for one in kept.revisions) or 'none with a manifest'}."


def _write(path: Path, data: Mapping[str, Any]) -> None:
    """Whole or not at all, and on the disk before anything is built upon it."""
    partial = path.with_name(f".{path.name}.part")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(dict(data), file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
