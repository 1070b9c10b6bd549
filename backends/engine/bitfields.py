"""Small unsigned numbers packed into words: uint8 codes out of any integer type, for every number of bits.

All formats here fill a word from its lowest bits, so the bytes of consecutive words are one stream of bits. Knows nothing of
weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)         # which of eight columns lies in a word's nibble 0, 1 …


def fields(packed: Tensor, bits: int) -> Tensor:
    """uint8 [..., n * word bits / bits]: the numbers along the last dimension of a tensor of words [..., n]."""
    stream = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return stream
    if bits == 4:
        return torch.stack((stream & 15, stream >> 4), -1).flatten(-2)
    if bits == 2:
        return (stream.unsqueeze(-1) >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(-2)
    # Eight numbers fill ``bits`` bytes: 3 bytes hold 8 numbers of 3 bits, across the borders of words.
    block = stream.unflatten(-1, (-1, bits)).to(torch.int64)
    whole = (block << torch.arange(0, 8 * bits, 8)).sum(-1, keepdim=True)
    return (whole >> torch.arange(0, 8 * bits, bits) & (1 << bits) - 1).to(torch.uint8).flatten(-2)


def awq_fields(packed: Tensor) -> Tensor:
    """uint8 [..., 8 n] of AWQ's interleaved nibbles, int32 [..., n]."""
    back = [AWQ_ORDER.index(column) for column in range(8)]
    return fields(packed, 4).unflatten(-1, (-1, 8))[..., back].flatten(-2)
