"""Matrices in the layout of the Triton kernels. Plain torch; no kernel here.

Codes up to 4 bits are stored in 4, others in 8, as 16-bit words. A *step* is ``4 * lanes`` columns of 4 bits or
``2 * lanes`` of 8: word j of a step holds its columns j, lanes + j, 2 lanes + j …, so that each field of a tile of words is a
tile of neighbouring columns, which a tensor core takes without any shuffling. 16 weight rows stand side by side for a step,
hence a tile of any multiple of 16 rows is read in whole cache lines.

    words   int16 [N / 16, steps, 16, lanes]
    scale   float16 where that is exact, else float32, [groups, N]: neighbouring outputs read neighbouring scales
    offset  None (one zero for the whole matrix), uint8 or int16 zeros, or float biases; [groups, N]
    feature int32 [steps * step] or None: the input feature of a packed column, -1 for padding (act-order, spread groups)

Groups that do not fit steps are spread over padded columns. Zeros are exact in the kernels' number types up to 128 for 4 bits
and 1,024 for 8; beyond, the zero becomes a bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.kernels import QWeight

PANEL = 16                              # weight rows that lie side by side
CENTER, ZERO, BIAS = 0, 1, 2            # kinds of offset
CHUNK = 1 << 24                         # codes spread and packed at a time


@dataclass(eq=False)
class FloatMatrix:
    """[N, K] in the compute type."""

    weight: Tensor
    bias: Tensor | None

    def __post_init__(self) -> None:
        self.rows, self.columns = self.weight.shape
        self.nbytes = nbytes(self.weight, self.bias)


@dataclass(eq=False)
class PackedMatrix:
    """See the module. ``group``: packed columns of a group; ``zero``: that of kind CENTER."""

    rows: int
    columns: int
    bits: int
    lanes: int
    group: int
    kind: int
    zero: int
    words: Tensor
    scale: Tensor
    offset: Tensor | None
    feature: Tensor | None
    bias: Tensor | None

    def __post_init__(self) -> None:
        self.steps = self.words.shape[1]
        self.sets = 16 // self.bits
        self.padded_rows = self.words.shape[0] * PANEL
        self.nbytes = nbytes(self.words, self.scale, self.offset, self.feature, self.bias)

    @property
    def step(self) -> int:
        """Columns of a step."""
        return self.sets * self.lanes


@dataclass(frozen=True)
class Columns:
    """How K columns in groups lie in packed ones. ``source`` int64 [packed]: the column of the codes, -1 where there is none;
    None: as they stand, padded at the end."""

    lanes: int
    group: int
    groups: int
    packed: int
    source: Tensor | None


def columns(k: int, group: int, sets: int) -> Columns:
    """``sets``: columns in one word. Steps of 128 columns (4 bits) or 64 (8 bits) where groups and K fit them, else of half."""
    small = 16 * sets
    wide = group >= k or group % (2 * small) == 0
    lanes = 32 if wide and k % (2 * small) == 0 else 16
    step = lanes * sets
    packed = -(-k // step) * step
    if group >= k:
        return Columns(lanes, packed, 1, packed, None)
    if group % step == 0 or group in (16, 32) and step % group == 0:
        return Columns(lanes, group, -(-k // group), packed, None)
    return _spread(k, group, lanes, step)


def _spread(k: int, group: int, lanes: int, step: int) -> Columns:
    """Each group padded to 16, 32 or whole steps."""
    room = next((size for size in (16, 32) if group <= size <= step), -(-group // step) * step)
    groups = -(-k // group)
    packed = -(-groups * room // step) * step
    column = torch.arange(packed)
    inside = column % room
    source = torch.where(inside < group, column // room * group + inside, k)
    return Columns(lanes, room, groups, packed, torch.where(source < k, source, -1))


def pack(weight: QWeight, bias: Tensor | None, device: torch.device) -> PackedMatrix:
    n, k = weight.shape
    bits = 4 if weight.bits <= 4 else 8
    plan = columns(k, weight.group, 16 // bits)
    kind, zero, offset = _offset(weight, bits)
    feature = _feature(plan, k, weight.perm)
    scale = _by_group(smallest(weight.scale), device)
    if offset is not None:
        offset = _by_group(smallest(offset) if kind == BIAS else offset, device)
    return PackedMatrix(n, k, bits, plan.lanes, plan.group, kind, zero, _words(weight.codes, plan, bits, device), scale, offset,
                        None if feature is None else feature.to(device), bias_on(bias, device))


def bias_on(bias: Tensor | None, device: torch.device) -> Tensor | None:
    return None if bias is None else bias.to(device, torch.float32).contiguous()


def _offset(weight: QWeight, bits: int) -> tuple[int, int, Tensor | None]:
    """Kind, the constant zero, and the offsets [N, G]."""
    if weight.bias is not None:
        return BIAS, 0, weight.bias
    zero = weight.zero.to(torch.int32)
    low, high = int(zero.min()), int(zero.max())
    if low < 0 or high > (128 if bits == 4 else 1024):
        return BIAS, 0, -zero.to(torch.float32) * weight.scale.to(torch.float32)
    if low == high:
        return CENTER, low, None
    return ZERO, 0, zero.to(torch.uint8 if high < 256 else torch.int16)


def _feature(plan: Columns, k: int, perm: Tensor | None) -> Tensor | None:
    if plan.source is None and perm is None:
        return None
    column = torch.arange(plan.packed) if plan.source is None else plan.source
    column = torch.where(column < k, column, -1)
    feature = column if perm is None else torch.where(column < 0, -1, perm.cpu()[column.clamp_min(0)])
    return feature.to(torch.int32).contiguous()


def _words(codes: Tensor, plan: Columns, bits: int, device: torch.device) -> Tensor:
    n, k = codes.shape
    sets, panels, steps = 16 // bits, -(-n // PANEL), plan.packed // (16 // bits * plan.lanes)
    out = torch.empty(panels, steps, PANEL, plan.lanes, dtype=torch.int16, device=device)
    source = None if plan.source is None else plan.source.clamp_min(0).to(device)
    at_once = max(1, CHUNK // (plan.packed * PANEL))
    for first in range(0, panels, at_once):
        part = codes[first * PANEL:(first + at_once) * PANEL].to(device)
        part = part[:, source] if source is not None else F.pad(part, (0, plan.packed - k))
        part = F.pad(part, (0, 0, 0, -part.shape[0] % PANEL)).view(-1, PANEL, steps, sets, plan.lanes)
        word = part[..., 0, :].to(torch.int16)
        for field in range(1, sets):
            word |= part[..., field, :].to(torch.int16) << field * bits
        out[first:first + at_once] = word.transpose(1, 2)
    return out


def _by_group(values: Tensor, device: torch.device) -> Tensor:
    """[N, G] → [G, N], zeros for rows beyond N."""
    return F.pad(values.to(device), (0, 0, 0, -values.shape[0] % PANEL)).t().contiguous()


def smallest(values: Tensor) -> Tensor:
    values = values.to(torch.float32)
    half = values.to(torch.float16)
    return half if torch.equal(half.to(torch.float32), values) else values


def nbytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
