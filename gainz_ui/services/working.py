"""The configuration of a model that is known to work here: kept when a person says so, offered when a load fails.

Where none was kept the smallest one that makes sense is offered: little context, one stream. One small file beside the models; knows
options and estimates, loads nothing.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from backends.base import DiskFull, GainzError, ModelInfo, ModelNotLoaded, read_json

FILE = ".working.json"                  # hidden: the catalog does not take it for a model
SMALLEST = {"context": 512, "streams": 1}


class Working:
    """Of one folder of models. Thread-safe."""

    def __init__(self, studio: Any, models: Path) -> None:
        self._studio, self._path, self._lock = studio, Path(models) / FILE, threading.Lock()

    def keep(self, name: str) -> dict[str, Any]:
        """Remember how ``name`` is loaded now, with the context that it really got. ModelNotLoaded, DiskFull."""
        info: ModelInfo | None = self._studio.loaded().get(name)
        if info is None:
            raise ModelNotLoaded(f"{name!r} is not loaded.", field="model", remedy="Load it first: what is kept is what works.")
        options = dict(info.options)
        if "context" in options and info.context:
            options["context"] = info.context               # "as much as fits" may be another number next time
        with self._lock:
            kept = {**self._read(), name: options}
            partial = self._path.with_name(FILE + ".part")
            try:
                partial.write_text(json.dumps(kept, indent=1), encoding="utf-8")
                partial.replace(self._path)
            except OSError as error:
                raise DiskFull(f"{FILE} cannot be written.", reason=error) from error
        return options

    def kept(self, name: str) -> dict[str, Any] | None:
        found = self._read().get(name)
        return dict(found) if isinstance(found, dict) else None

    def offer(self, name: str) -> dict[str, Any] | None:
        """What to try when a load has failed: what was kept, else the smallest; None: not even that can work."""
        if (found := self.kept(name)) is not None:
            return found
        try:
            return dict(SMALLEST) if self._studio.estimate(name, SMALLEST).fits else None
        except GainzError:                                  # its files are at fault, or it has no such options
            return None

    def _read(self) -> dict[str, Any]:
        """A file that somebody has broken counts as none: it is overwritten by the next `keep`."""
        try:
            return dict(read_json(self._path))
        except GainzError:
            return {}
