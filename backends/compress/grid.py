"""Scales and zero points: how a range of weights is laid on 2**bits levels, and how scales are fitted to codes.

The specification of rounding for GPTQ and AWQ alike: code = clamp(round(w / scale) + zero), w ≈ (code - zero) * scale.
Zero points are 1 … 2**bits - 1: a GPTQ v1 file stores zero - 1, and readers disagree on what a stored -1 means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SHRINKS = tuple(1 - 0.04 * step for step in range(13))      # shares of the full range that the clip search tries
SMALLEST = 2.0 ** -24                                       # the least positive float16: a scale below it would be read as 0


@dataclass
class Grid:
    """scale, zero: float32 [N, G]; zeros are whole. ``bits``."""

    scale: Tensor
    zero: Tensor
    bits: int

    @property
    def top(self) -> int:
        return 2 ** self.bits - 1

    def codes(self, weight: Tensor, groups: Tensor) -> Tensor:
        """float32 [N, K] of whole numbers; ``groups``: int64 [K], the group of each column."""
        return (weight / self.scale[:, groups]).round_().add_(self.zero[:, groups]).clamp_(0, self.top)

    def values(self, codes: Tensor, groups: Tensor) -> Tensor:
        return (codes - self.zero[:, groups]) * self.scale[:, groups]

    def rounded(self) -> Grid:
        """As a file keeps it: scales in float16."""
        return Grid(_storable(self.scale), self.zero, self.bits)


def _storable(scale: Tensor) -> Tensor:
    """The nearest float16 above 0; 1 where there is nothing to scale."""
    return torch.where(scale > 0, scale, torch.ones_like(scale)).to(torch.float16).float().clamp_min_(SMALLEST)


def lay(low: Tensor, high: Tensor, bits: int, sym: bool) -> tuple[Tensor, Tensor]:
    """scale, zero of ranges [low, high], which are widened to hold 0. Scales are float16 numbers, as a file keeps them."""
    top = 2 ** bits - 1
    low, high = low.clamp_max(0), high.clamp_min(0)
    if sym:
        scale = torch.maximum(-low, high) * 2 / top
        scale = _storable(scale)
        return scale, torch.full_like(scale, (top + 1) // 2)
    scale = _storable((high - low) / top)
    return scale, (-low / scale).round().clamp_(1, top)


def fit_group(weight: Tensor, importance: Tensor, bits: int, sym: bool, search: bool) -> tuple[Tensor, Tensor]:
    """scale, zero [N] for one group's columns [N, g]; the clip search weighs a column's squared error by ``importance``
    [g]."""
    low, high = weight.amin(1), weight.amax(1)
    best_scale, best_zero = lay(low, high, bits, sym)
    if not search:
        return best_scale, best_zero
    best = _loss(weight, importance, best_scale, best_zero, bits)
    for shrink in SHRINKS[1:]:
        scale, zero = lay(low * shrink, high * shrink, bits, sym)
        loss = _loss(weight, importance, scale, zero, bits)
        better = loss < best
        best = torch.where(better, loss, best)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
    return best_scale, best_zero


def _loss(weight: Tensor, importance: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    scale, zero = scale[:, None], zero[:, None]
    error = (weight / scale).round_().add_(zero).clamp_(0, 2 ** bits - 1).sub_(zero).mul_(scale).sub_(weight)
    return error.square_() @ importance


def fit(weight: Tensor, importance: Tensor, groups: Tensor, bits: int, sym: bool, search: bool) -> Grid:
    """One scale and zero for each row and group of [N, K]; ``groups`` int64 [K], 0 … G - 1."""
    fitted = [fit_group(weight[:, members], importance[members], bits, sym, search)
              for members in (torch.nonzero(groups == group)[:, 0] for group in range(int(groups.max()) + 1))]
    return Grid(torch.stack([scale for scale, _ in fitted], 1), torch.stack([zero for _, zero in fitted], 1), bits)


def group_width(columns: int, group: int) -> int:
    """Columns that share a scale; ``group`` -1: all of them."""
    return group if group > 0 else columns


def groups_of(columns: int, group: int, device: torch.device) -> Tensor:
    """int64 [K]: the group of each column, neighbours together."""
    return torch.arange(columns, device=device) // group_width(columns, group)


def refit_scales(weight: Tensor, gram: Tensor, grid: Grid, codes: Tensor, groups: Tensor, rows: int = 512) -> Grid:
    """The scales that make the squared output error least for these codes: for every row a small linear system.

    weight, codes [N, K]; gram [K, K] = sum of x xᵀ, damped. A scale that would collapse or change its sign
    stays as it was."""
    count = grid.scale.shape[1]
    member = torch.nn.functional.one_hot(groups, count).to(weight.dtype)            # [K, G]
    members = [torch.nonzero(groups == group)[:, 0] for group in range(count)]
    target = weight @ gram
    parts = []
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        levels = codes[part] - grid.zero[part][:, groups]                           # [n, K]
        system = torch.stack([(levels[:, own] @ gram[own]).mul_(levels) @ member for own in members], 1)    # [n, G, G]
        right = (levels * target[part]) @ member
        ridge = system.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-12) * 1e-6
        system = system + ridge[:, None, None] * torch.eye(count, device=weight.device)
        parts.append(torch.linalg.solve(system, right + ridge[:, None] * grid.scale[part]))
    found = torch.cat(parts)
    sane = torch.isfinite(found) & (found > 0.25 * grid.scale) & (found < 4 * grid.scale)
    return Grid(torch.where(sane, found, grid.scale), grid.zero, grid.bits)


def output_error(weight: Tensor, values: Tensor, gram: Tensor) -> Tensor:
    """float32 [N]: each row's squared output error over the calibration tokens."""
    error = values - weight
    return ((error @ gram) * error).sum(1)


class Best:
    """The codes [N, K] and the grid that lose least in the output, row by row, among all that were offered."""

    def __init__(self, weight: Tensor, gram: Tensor, groups: Tensor, codes: Tensor, grid: Grid) -> None:
        self.codes, self.grid = codes, grid
        self._loss = lambda codes, grid: output_error(weight, grid.values(codes, groups), gram)
        self.error = self._loss(codes, grid)            # [N]

    def offer(self, codes: Tensor, grid: Grid) -> None:
        """``grid`` has the zero points of the one there is; only scales are fitted again."""
        error = self._loss(codes, grid)
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.codes = torch.where(better[:, None], codes, self.codes)
        self.grid = Grid(torch.where(better[:, None], grid.scale, self.grid.scale), self.grid.zero, self.grid.bits)
