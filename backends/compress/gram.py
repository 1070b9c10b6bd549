"""The Gram matrix of a matrix's inputs: sum of x xᵀ over the calibration tokens, all that GPTQ and AWQ need of them."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 512              # the upper triangle of tiles is computed, the lower mirrored


class Gram:
    """``value``: float32 [K, K], symmetric, once `finish` was called. The mean over tokens is taken, so that
    its size does not depend on their number."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self._sum = torch.zeros(columns, columns, device=device)
        self.tokens = 0

    def add(self, rows: Tensor) -> None:
        """rows [R, K] of any float type."""
        rows = rows.float()
        self.tokens += len(rows)
        columns = len(self._sum)
        for start in range(0, columns, TILE):
            end = min(start + TILE, columns)
            self._sum[start:end, start:].addmm_(rows[:, start:end].T, rows[:, start:])

    def finish(self) -> Tensor:
        upper = torch.triu(self._sum)
        return (upper + torch.triu(upper, 1).T).div_(max(self.tokens, 1))
