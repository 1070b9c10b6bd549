"""What this installation calls itself when it asks another server, so that a request that comes back to it is known.

The same for the server and for the command line over one folder of models; tells nothing about either.
"""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path


def installation(models: Path) -> str:
    """Of the folder ``models`` on this machine, which need not be there yet."""
    place = Path(models).resolve()
    known = place.stat() if place.exists() else None
    told = f"{socket.gethostname()} {place} {known and (known.st_dev, known.st_ino)}"
    return hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()[:16]
