"""What goes to a device and comes back in a step: everything in one copy, since each has a price of its own.

Knows NumPy arrays and tensors; not what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGN = 16                   # bytes: what vector loads of kernels want
FETCHED = 64                 # rows of logits that come over at once; more are a prompt's, and are asked for piece by piece


def send(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on ``device``, contiguous. On the CPU they share the arrays' memory; elsewhere they are views of
    one buffer that was copied once."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // ALIGN) * ALIGN
    staged = np.zeros(size, np.uint8)
    for array, start in zip(arrays, starts):
        staged[start:start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = torch.from_numpy(staged).to(device)
    return [there[start:start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
            for array, start in zip(arrays, starts)]


def fetch(rows: Tensor) -> Tensor:
    """Logits [W, V] where the sampler reads them: few rows in one copy on the host, many where they are."""
    return rows if rows.device.type == "cpu" or rows.shape[0] > FETCHED else rows.cpu()
