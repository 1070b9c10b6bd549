"""What a manifest says of a model's form: format and bits, in the words of the backend that reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.base import GainzError, ModelDir
from backends.registry import Registry


def form(folder: Path) -> dict[str, Any]:
    """``format``, ``bits``; None where no backend reads it, for a reason that the catalog shows. A folder with one GGUF file is read as
    that file."""
    try:
        _, claim = Registry.scan().claim(ModelDir.of(folder))
    except GainzError:
        return {"format": None, "bits": None}
    return {"format": claim.format, "bits": claim.bits}
