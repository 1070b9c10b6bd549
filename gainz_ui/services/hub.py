"""Pull from the Hugging Face Hub: one commit, file by file, resumable, each file verified.

Knows the Hub's two plain routes (a revision's file list with hashes, a file's bytes). The address and the token come
from huggingface_hub's own settings (HF_ENDPOINT, HF_TOKEN). A branch or tag is resolved to its commit first, and only
that commit is fetched: what moves on the Hub afterwards cannot mix in.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import httpx

from backends.base import (
    Cancel, ChecksumMismatch, FetchFailed, InvalidRequest, NameRefused, NameTaken, Progress, ProgressFn, UnknownFormat)
from gainz_ui.services.imports import KEPT, plain_name
from gainz_ui.services.formats import form
from gainz_ui.services.store import CHUNK, Store, Verification, check_name, check_room

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
TIMEOUT = httpx.Timeout(30, connect=15)


@dataclass(frozen=True)
class HubFile:
    """A file of a commit. ``sha256`` is known for large files (LFS); small ones have their git blob id (SHA-1)."""

    path: str
    size: int
    sha256: str | None
    blob: str | None


def endpoint() -> str:
    """Read at each call: tests and mirrors set it in the environment."""
    from huggingface_hub import constants
    return os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")


def _headers() -> dict[str, str]:
    from huggingface_hub import get_token
    token = get_token()
    return {"authorization": f"Bearer {token}"} if token else {}


def pull(store: Store, repo: str, revision: str | None, files: tuple[str, ...] | None, name: str | None,
         progress: ProgressFn, cancel: Cancel) -> str:
    """Name of the pulled model. What is already here at that commit, in use or kept, is taken without going online. Another commit
    of the same repository becomes a new revision, and the one before is kept; one that is pinned, or that was asked for by its
    commit, makes way only where another one is asked for."""
    if not _REPO.match(repo):
        raise InvalidRequest(f"{repo!r} is no repository of the form OWNER/NAME.", field="repo",
                             remedy="Give both words as they stand at the top of its page, without https:// and a host.")
    name = check_name(name) if name else plain_name(repo.split("/")[1])
    if revision and _COMMIT.match(revision) and _have(store, name, repo, revision):
        return name
    with httpx.Client(timeout=TIMEOUT, follow_redirects=True) as client:
        commit, listed, about = _list(client, repo, revision or "main")
        if _have(store, name, repo, commit):
            return name
        update = store.path(name).exists()
        if update:
            _refuse_update(store, name, repo, revision, commit)
        wanted = choose(listed, files)
        with store.gather(f"{name[:100]}.{commit[:12]}", progress, cancel) as staging:
            rows = _fetch_all(client, repo, commit, wanted, staging, store.revisions.files(name) if update else {}, progress, cancel)
            manifest = {"source": f"hub:{repo}", "revision": commit, "asked": revision or "main", "files": rows, **form(staging),
                        "license": about.get("license"), "how": "as published"}
            return store.renew(staging, name, manifest) if update else store.admit(staging, name, manifest)


def _have(store: Store, name: str, repo: str, commit: str) -> bool:
    """Is that commit in use, or kept, in which case it is now? What is pinned stays."""
    manifest = store.manifest(name)
    if manifest.get("source") != f"hub:{repo}":
        return False
    if manifest.get("revision") == commit:
        return True
    if store.revisions.folder(name, commit) is None:
        return False
    store.revisions.rollback(name, commit)
    return True


def _refuse_update(store: Store, name: str, repo: str, revision: str | None, commit: str) -> None:
    """NameTaken where another commit may not take the place of what is there."""
    there = store.manifest(name)
    facts = {"field": "name", "there": there.get("revision"), "wanted": commit}
    if there.get("source") != f"hub:{repo}":
        raise NameTaken(f"There is a model {name!r} already, of another source; it is not overwritten.", **facts,
                        remedy="Give the new one another name, or remove the old one first.")
    if store.revisions.of(name).pinned:
        raise NameTaken(f"{name} is pinned to its revision.", **facts,
                        remedy=f"Unpin it first (`python app.py pin {name} --off`), or give the new one another name.")
    if revision is None and _COMMIT.match(str(there.get("asked"))):
        raise NameTaken(f"{name} was asked for at exactly this commit, and the branch has gone on.", **facts,
                        remedy="Say which revision you want now (main, a tag or a commit), or give the new one another name.")


def repair(store: Store, name: str, found: Verification, progress: ProgressFn, cancel: Cancel) -> None:
    """The files that ``found`` calls bad, from the same commit, beside the good ones; then the whole takes the old one's place."""
    manifest = store.manifest(name)
    source, commit = str(manifest.get("source")), str(manifest.get("revision"))
    if not source.startswith("hub:") or not _COMMIT.match(commit):
        raise InvalidRequest(f"{name} did not come from the Hub: its files cannot be fetched again.", field="name", source=source,
                             remedy="Remove it, and bring it in again from where it came from.")
    repo, bad = source.removeprefix("hub:"), {item.file for item in found.files if item.state not in ("ok", "extra")}
    good = [row["path"] for row in manifest["files"] if row["path"] not in bad]
    with httpx.Client(timeout=TIMEOUT, follow_redirects=True) as client, store.gather(f"{name[:100]}.repair", progress, cancel) as staging:
        _, listed, _ = _list(client, repo, commit)
        wanted = [item for item in listed if item.path in bad]
        rows = _fetch_all(client, repo, commit, wanted, staging, {}, progress, cancel)
        for path in good:
            _share(store.existing(name) / path, staging / path)
        kept = {row["path"]: row for row in (*manifest["files"], *rows)}
        store.complete(staging, {**manifest, "files": [kept[row["path"]] for row in manifest["files"]]})
        store.revisions.replace(staging, name)


def _share(source: Path, target: Path) -> None:
    """The same file under a second name; a copy where the disk knows no hard links. Neither is ever written to again."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


# ---------------------------------------------------------------------------------------------- what there is
def _list(client: httpx.Client, repo: str, revision: str) -> tuple[str, list[HubFile], Mapping[str, Any]]:
    """The commit behind ``revision``, its files, and the card's data."""
    url = f"{endpoint()}/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true"
    try:
        answer = client.get(url, headers=_headers())
    except httpx.HTTPError as error:
        raise FetchFailed("The Hub could not be reached.", reason=error or type(error).__name__, repo=repo) from error
    _demand_ok(answer, repo, revision)
    try:
        data = answer.json()
        commit, siblings = data["sha"], data["siblings"]
        found = [HubFile(row["rfilename"], int((row.get("lfs") or {}).get("size") or row["size"]),
                         (row.get("lfs") or {}).get("sha256"), row.get("blobId")) for row in siblings]
    except (ValueError, KeyError, TypeError) as error:
        raise FetchFailed("The Hub's answer is not understood.", repo=repo, reason=error) from error
    if not _COMMIT.match(str(commit)) or _COMMIT.match(revision) and commit != revision:
        raise FetchFailed("The Hub answered with another commit than the one asked for.", asked=revision, got=commit)
    return commit, found, data.get("cardData") or {}


def _demand_ok(answer: httpx.Response, repo: str, revision: str) -> None:
    if answer.status_code in (401, 403):
        raise FetchFailed("The Hub refuses this repository: it is private or gated, or the name is wrong.", repo=repo,
                          status=answer.status_code, remedy="Check the name; for a gated model accept its terms on the Hub "
                                                            "and set HF_TOKEN in the environment.")
    if answer.status_code == 404:
        raise FetchFailed("The Hub has no such repository or revision.", repo=repo, revision=revision,
                          remedy="Check both names. A deleted commit cannot be fetched again, and no other is taken for it.")
    if answer.status_code >= 400:
        raise FetchFailed("The Hub answered with an error.", repo=repo, status=answer.status_code)


def choose(listed: list[HubFile], patterns: tuple[str, ...] | None) -> list[HubFile]:
    """The files of a model: by the patterns given, else safetensors and what belongs to them, else the only GGUF file."""
    for item in listed:
        if PurePosixPath(item.path).is_absolute() or ".." in PurePosixPath(item.path).parts or "\\" in item.path:
            raise NameRefused("A file of this repository would leave the model's folder.", file=item.path)
    if patterns:
        picked = [item for item in listed if any(fnmatch.fnmatch(item.path, pattern) for pattern in patterns)]
        if not picked:
            raise InvalidRequest("No file of this repository matches.", field="files", patterns=", ".join(patterns))
        return picked
    ggufs = [item for item in listed if item.path.lower().endswith(".gguf")]
    if any(item.path.lower().endswith(".safetensors") for item in listed):
        return [item for item in listed if item.path.lower().endswith(KEPT) and item not in ggufs]
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise InvalidRequest("This repository holds several GGUF files; name one.", field="files",
                             files=", ".join(item.path for item in ggufs))
    raise UnknownFormat("This repository holds no *.safetensors and no *.gguf file.")


# ---------------------------------------------------------------------------------------------- bringing it here
def _fetch_all(client: httpx.Client, repo: str, commit: str, wanted: list[HubFile], staging: Path, here: Mapping[str, Path],
               progress: ProgressFn, cancel: Cancel) -> list[dict[str, Any]]:
    """``here``: by SHA-256, files that need not be fetched; they are verified like the others."""
    for item in wanted:
        if item.sha256 in here and not (staging / item.path).exists():
            _share(here[item.sha256], staging / item.path)
    total = sum(item.size for item in wanted)
    check_room(staging, total - sum(p.stat().st_size for p in staging.rglob("*") if p.is_file()))
    done, rows = 0, []
    for item in wanted:
        def report(n: int, before: int = done, note: str = item.path) -> None:
            progress(Progress("fetch", before + n, total, note))

        digest = _fetch(client, repo, commit, item, staging, report, cancel)
        rows.append({"path": item.path, "size": item.size, "sha256": digest})
        done += item.size
    return rows


def _fetch(client: httpx.Client, repo: str, commit: str, item: HubFile, staging: Path, report, cancel: Cancel) -> str:
    """SHA-256 of a file that is now complete in ``staging``; one that is there already is verified, not fetched."""
    target = staging / item.path
    part = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        if not part.exists() or part.stat().st_size != item.size:
            _stream(client, f"{endpoint()}/{repo}/resolve/{commit}/{quote(item.path)}", item, part, report, cancel)
        found = _verified(part, item)
        os.replace(part, target)
        return found
    report(item.size)
    return _verified(target, item)


def _verified(path: Path, item: HubFile) -> str:
    """The file's SHA-256. It goes if it is not the one expected: only this file is fetched again."""
    size = path.stat().st_size
    strong, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            strong.update(piece)
            blob.update(piece)
    expected, found = (item.sha256, strong.hexdigest()) if item.sha256 else (item.blob, blob.hexdigest())
    if size == item.size and (expected is None or expected == found):
        return strong.hexdigest()
    path.unlink()
    raise ChecksumMismatch(f"{item.path} is not the file that the Hub announced.", expected_bytes=item.size, found_bytes=size,
                           expected=expected, found=found)


def _stream(client: httpx.Client, url: str, item: HubFile, part: Path, report, cancel: Cancel) -> None:
    """Append to ``part`` from where it ends; a server that does not resume is read from the start."""
    have = part.stat().st_size if part.exists() else 0
    have = have if have < item.size else 0
    headers = _headers() | ({"range": f"bytes={have}-"} if have else {}) | {"accept-encoding": "identity"}
    try:
        with client.stream("GET", url, headers=headers) as answer:
            if answer.status_code >= 400:
                raise FetchFailed("A file could not be fetched.", file=item.path, status=answer.status_code)
            resumed = answer.status_code == 206 and answer.headers.get("content-range", "").startswith(f"bytes {have}-")
            done = have if resumed else 0
            with part.open("r+b" if resumed else "wb") as sink:
                sink.seek(done)
                sink.truncate()
                for piece in answer.iter_bytes(CHUNK):
                    cancel.raise_if_set("The pull")
                    done += len(piece)
                    if done > item.size:
                        raise FetchFailed("A file is longer than announced.", file=item.path, announced=item.size)
                    sink.write(piece)
                    report(done)
    except httpx.HTTPError as error:
        raise FetchFailed("The connection broke while a file was fetched.", file=item.path, reason=error or type(error).__name__,
                          remedy="Try again: it goes on where it stopped.") from error
    if done != item.size:
        raise FetchFailed("The connection ended before the file was complete.", file=item.path, announced=item.size, got=done,
                          remedy="Try again: it goes on where it stopped.")
