"""Looking through a row of logits in native code: the `Scan` of `engine/sampler.py`, which says what each method gives.

One caller at a time, as for the ops of the same context.
"""

from __future__ import annotations

import numpy as np

from backends.kernels import native_abi as abi


class NativeScan:
    def __init__(self, context: abi.Context) -> None:
        self._call = context.call
        self._ids, self._noise = np.empty(0, np.int32), np.empty(0, np.uint32)
        self._found = np.zeros(1, np.int64)

    def above(self, logits: np.ndarray, level: float) -> np.ndarray:
        found = self._scan(logits, level, 0, -1)               # before `_ids` is looked at: it may grow
        return self._ids[:found].astype(np.int64)

    def lucky(self, logits: np.ndarray, level: float, place: np.uint64, bound: int) -> tuple[np.ndarray, np.ndarray]:
        found = self._scan(logits, level, int(place.view(np.int64)), bound)
        return self._ids[:found].astype(np.int64), self._noise[:found].astype(np.uint64)

    def _scan(self, logits: np.ndarray, level: float, place: int, bound: int) -> int:
        logits = np.ascontiguousarray(logits, np.float32)
        if len(logits) > len(self._ids):
            self._ids, self._noise = np.empty(len(logits), np.int32), np.empty(len(logits), np.uint32)
        self._call(abi.SCAN, logits.ctypes.data, len(logits), abi.bits(level), place, bound, self._ids.ctypes.data,
                   self._noise.ctypes.data, self._found.ctypes.data)
        return int(self._found[0])
