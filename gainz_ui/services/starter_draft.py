"""The starter's draft, which comes with the program: a few layers that guess what the starter will say.

Knows its folder in the package and its place in models/. Embeddings, head and tokenizer are the starter's own, so it is of no
use without it, and small. Its manifest has the command that made it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.base import Cancel, ProgressFn, read_json
from gainz_ui.services.revisions import identity
from gainz_ui.services.store import MANIFEST, Store, check_room

NAME = "starter-draft"
SHIPPED = Path(__file__).parents[1] / "data" / NAME
WEIGHTS = "model.safetensors"
RETIRED = frozenset({                       # SHA-256 of the weights that came with the program before
    "9432f4dee748b8afdbfb1d156e51b684fa9421b9f64a147afd3cfb90167df61b",
    "4411aa1c9e4594faf4ed0bd9c6a8aa4bd2a58b1362ac035848a5d77a99d238c5",
    "8b2efc86508547b0b8e15d1c12ec45c4003e06e66f552128dbf30e2e50d1c16f"})


def place(store: Store, progress: ProgressFn, cancel: Cancel, shipped: Path = SHIPPED) -> str | None:
    """Its name; put into models/ first where it is not there yet, or where an older program put another one, which is kept for
    going back. None where the program came without one. DiskFull."""
    if not (shipped / MANIFEST).is_file():
        return None
    manifest = read_json(shipped / MANIFEST)
    if store.path(NAME).exists() and not _outdated(store, manifest):
        return NAME
    with store.gather(NAME, progress, cancel) as staging:
        there = store.path(NAME).exists()
        if there and not _outdated(store, manifest):     # another process was faster
            return NAME
        files = [path for path in shipped.iterdir() if path.is_file() and path.name != MANIFEST]
        check_room(staging, sum(path.stat().st_size for path in files))
        for path in files:
            shutil.copyfile(path, staging / path.name)
        return (store.renew if there else store.admit)(staging, NAME, manifest)


def _outdated(store: Store, shipped: Mapping[str, Any]) -> bool:
    """Is what is there one that an older program brought, and nobody's choice since?"""
    rows = store.manifest(NAME).get("files") or ()
    weights = {str(row.get("sha256")) for row in rows if isinstance(row, Mapping) and row.get("path") == WEIGHTS}
    if not weights & RETIRED:                   # at nearly every start
        return False
    kept = store.revisions.of(NAME)
    return not kept.pinned and identity(shipped) not in {revision.id for revision in kept.revisions}
