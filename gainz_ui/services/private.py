"""JSON that only its owner may read: written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from backends.base import DiskFull


def write_private(path: Path, data: Any) -> None:
    """``data`` in place of what ``path`` holds, mode 600. DiskFull where it cannot be written; then the old file stands."""
    partial = path.with_name(f".{path.name}.part")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
        partial.replace(path)
    except OSError as error:
        raise DiskFull(f"{path} cannot be written.", reason=error.strerror) from error
