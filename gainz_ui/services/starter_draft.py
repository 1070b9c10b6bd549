"""The starter's draft, which comes with the program: a few layers that guess what the starter will say.

Knows its folder in the package and its place in models/. Embeddings, head and tokenizer are the starter's own, so it is of no
use without it, and small. Its manifest has the command that made it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from backends.base import Cancel, ProgressFn, read_json
from gainz_ui.services.store import MANIFEST, Store, check_room

NAME = "starter-draft"
SHIPPED = Path(__file__).parents[1] / "data" / NAME


def place(store: Store, progress: ProgressFn, cancel: Cancel, shipped: Path = SHIPPED) -> str | None:
    """Its name; put into models/ first where it is not there yet. None where the program came without one. DiskFull."""
    if not (shipped / MANIFEST).is_file():
        return None
    if store.path(NAME).exists():
        return NAME
    with store.gather(NAME, progress, cancel) as staging:
        if store.path(NAME).exists():               # another process was faster
            return NAME
        files = [path for path in shipped.iterdir() if path.is_file() and path.name != MANIFEST]
        check_room(staging, sum(path.stat().st_size for path in files))
        for path in files:
            shutil.copyfile(path, staging / path.name)
        return store.admit(staging, NAME, read_json(shipped / MANIFEST))
