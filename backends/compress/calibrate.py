"""Calibration text made into windows of token ids, always the same ones for the same text and numbers.

Windows are spread evenly over the text, so that a few of them see all of it. Knows nothing of models.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.errors import InvalidRequest

BUNDLED = Path(__file__).parent / "data" / "calibration.txt.gz"


@dataclass(frozen=True)
class Calibration:
    """``windows``: equally long tuples of ids. ``sha256``: of the text's UTF-8 bytes. ``source``: its name, for people."""

    windows: tuple[tuple[int, ...], ...]
    sha256: str
    source: str

    @property
    def tokens(self) -> int:
        return sum(map(len, self.windows))


def read_text(path: Path | None = None) -> tuple[str, str]:
    """(text, name) of a file (plain or .gz), or of the bundled text. InvalidRequest where it is no UTF-8 text."""
    file = path or BUNDLED
    if not file.is_file():
        raise InvalidRequest(f"There is no calibration text at {file}.", field="calibration")
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return raw.decode("utf-8"), "bundled" if path is None else file.name
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise InvalidRequest(f"{file.name} is no UTF-8 text.", field="calibration", reason=error) from error


def calibration(text: str, source: str, encode: Callable[[str], Sequence[int]], samples: int, length: int) -> Calibration:
    """``samples`` windows of ``length`` tokens. InvalidRequest where the text has too few, saying how many it has."""
    ids = encode(text)
    if len(ids) < length:
        raise InvalidRequest(f"The calibration text has {len(ids)} tokens, a window takes {length}.", field="calibration",
                             remedy="Give a longer text, or shorter windows.")
    most = len(ids) // length
    if samples > most:
        raise InvalidRequest(f"The calibration text has room for {most} windows of {length} tokens, not for {samples}.",
                             field="samples", tokens=len(ids),
                             remedy=f"Ask for {most} samples at most, or give a longer text.")
    starts = [(len(ids) - length) * i // max(samples - 1, 1) for i in range(samples)]
    windows = tuple(tuple(ids[start:start + length]) for start in starts)
    return Calibration(windows, hashlib.sha256(text.encode()).hexdigest(), source)
