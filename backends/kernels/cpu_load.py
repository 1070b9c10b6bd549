"""Quantized matrices on their way from file to memory while Python does something else (`native/load.cpp`).

Knows open files and where rows lie; what becomes of them, `cpu_pack` says. Raises BrokenFile where a file ends inside a matrix.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from pathlib import Path

from backends.errors import BrokenFile
from backends.kernels import FileRows, native_abi as abi

BATCH = 4 << 20             # bytes that are handed over together: each time costs as much as reading 100 KB


class Loading:
    """One load. `add` returns at once, or, where much is waiting already, when less is; what it points to must live until
    `finish` or `close`."""

    def __init__(self, context: abi.Context, threads: int) -> None:
        self._native = context.loader(max(1, threads - 1))        # the caller is the other one, first at work of its own
        self._files: dict[Path, int] = {}
        self._names: list[FileRows] = []
        self._after: list[Callable[[], None]] = []
        self._batch, self._bytes = array("q"), 0

    def add(self, kind: str, rows: FileRows, columns: int, codes: int, scale: int, offset: int) -> None:
        """Lay ``rows`` out at these addresses."""
        if rows.path not in self._files:
            self._files[rows.path] = os.open(rows.path, os.O_RDONLY)
        self._batch.extend((abi.STORED[kind], self._files[rows.path], rows.at, rows.shape[0], columns, rows.heads, codes, scale,
                            offset, len(self._names)))
        self._names.append(rows)
        self._bytes += rows.shape[0] * rows.shape[1]
        if self._bytes >= BATCH:
            self._hand_over()

    def _hand_over(self) -> None:
        self._native.add(self._batch)
        self._batch, self._bytes = array("q"), 0

    def then(self, act: Callable[[], None]) -> None:
        """Call this when every matrix is there."""
        self._after.append(act)

    def finish(self) -> None:
        self._hand_over()
        failed = self._native.finish()
        if failed >= 0:
            rows = self._names[failed]
            raise BrokenFile(f"{rows.path.name} ended inside the tensor {rows.name!r}.", tensor=rows.name, file=rows.path.name)
        for act in self._after:
            act()

    def close(self) -> None:
        """Nothing is written any more when this returns."""
        self._native.close()
        for file in self._files.values():
            os.close(file)
        self._files.clear()
