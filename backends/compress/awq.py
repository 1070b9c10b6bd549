"""AWQ: input channels that matter are scaled up before rounding, and the scale is folded into what produces the input.

After Lin et al. 2023: a search over scales, then over clipping; here both are judged by the Gram matrix of the inputs,
which gives the exact squared output error without another pass. Rounds of least-squares fitting of the group scales may
follow. Knows one group of matrices with a common input; nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backends.compress.grid import SHRINKS, Best, Grid, fit, group_width, groups_of, lay, output_error, refit_scales
from backends.kernels import QWeight
from backends.recipe import QuantizeOptions

STEPS = 10                  # exponents tried, 0 … 1, and then the best one's neighbours half a step away
SEARCH_ROWS = 512           # rows of each matrix that the search looks at, spread evenly


def search(weights: Sequence[Tensor], gram: Tensor, tie: Tensor | None, settings: QuantizeOptions) -> Tensor:
    """Scale [K] of the input channels that makes the output error of ``weights`` [N, K] least. The exponent 0 is all ones.

    ``tie`` int64 [K]: channels with the same number must have the same scale (heads that share a value), or None."""
    sample = torch.cat([_rows(weight) for weight in weights])
    importance = (gram.diagonal() / max(float(gram.diagonal().max()), 1e-30)).sqrt().clamp_min(1e-4)
    reach = torch.cat([weight.abs().amax(0, keepdim=True) for weight in weights]).amax(0).clamp_min(1e-5)

    def judged(share: float, duo: bool) -> tuple[float, float, bool, Tensor]:
        scale = _tied(_centred(importance.pow(share) / (reach.pow(1 - share) if duo else 1)), tie)
        return _rounding_error(sample, gram, scale, settings), share, duo, scale

    best = min((judged(step / STEPS, duo) for duo in (False, True) for step in range(STEPS)), key=lambda tried: tried[0])
    finer = [judged(best[1] + part / STEPS, best[2]) for part in (-0.5, 0.5) if 0 <= best[1] + part / STEPS <= 1]
    return min((best, *finer), key=lambda tried: tried[0])[3]


def quantize(weight: Tensor, gram: Tensor, settings: QuantizeOptions) -> tuple[QWeight, float]:
    """A matrix [N, K] that is already scaled, and its squared output error over that of the outputs."""
    groups = groups_of(weight.shape[1], settings.group, weight.device)
    grid = (clip(weight, gram, groups, settings) if settings.mse else
            fit(weight, gram.diagonal(), groups, settings.bits, settings.sym, False)).rounded()
    best = Best(weight, gram, groups, grid.codes(weight, groups), grid)
    damped = gram + torch.eye(len(gram), device=gram.device) * gram.diagonal().mean() * 1e-4
    for _ in range(settings.refine):
        fitted = refit_scales(weight, damped, best.grid, best.codes, groups).rounded()
        best.offer(best.codes, fitted)
        best.offer(fitted.codes(weight, groups), fitted)
    whole = output_error(weight, torch.zeros_like(weight), gram).sum()
    codes, grid, group = best.codes, best.grid, group_width(weight.shape[1], settings.group)
    packed = QWeight(codes.to(torch.uint8), grid.scale.half(), grid.zero.to(torch.uint8), None, settings.bits, group)
    return packed, float(best.error.sum() / whole.clamp_min(1e-30))


def clip(weight: Tensor, gram: Tensor, groups: Tensor, settings: QuantizeOptions) -> Grid:
    """The clipping of every row and group that costs least, judged by the group's own block of the Gram matrix."""
    scales, zeros = [], []
    for group in range(int(groups[-1]) + 1):
        members = torch.nonzero(groups == group)[:, 0]
        part, block = weight[:, members], gram[members][:, members]
        low, high = part.amin(1), part.amax(1)
        scale, zero = lay(low, high, settings.bits, settings.sym)
        best = _block_error(part, block, scale, zero, settings.bits)
        for shrink in SHRINKS[1:]:
            tried = lay(low * shrink, high * shrink, settings.bits, settings.sym)
            error = _block_error(part, block, *tried, settings.bits)
            better = error < best
            best = torch.where(better, error, best)
            scale, zero = torch.where(better, tried[0], scale), torch.where(better, tried[1], zero)
        scales.append(scale)
        zeros.append(zero)
    return Grid(torch.stack(scales, 1), torch.stack(zeros, 1), settings.bits)


def _block_error(part: Tensor, block: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    one = torch.zeros(part.shape[1], dtype=torch.int64, device=part.device)
    grid = Grid(scale[:, None], zero[:, None], bits)
    return output_error(part, grid.values(grid.codes(part, one), one), block)


def _rounding_error(sample: Tensor, gram: Tensor, scale: Tensor, settings: QuantizeOptions) -> float:
    groups = groups_of(sample.shape[1], settings.group, sample.device)
    scaled = sample * scale
    grid = fit(scaled, scale, groups, settings.bits, settings.sym, False)
    return output_error(sample, grid.values(grid.codes(scaled, groups), groups) / scale, gram).sum().item()


def _rows(weight: Tensor) -> Tensor:
    step = max(-(-len(weight) // SEARCH_ROWS), 1)
    return weight[::step]


def _centred(scale: Tensor) -> Tensor:
    """Around 1, so that what the scale is folded into keeps its size."""
    scale = scale.clamp_min(1e-4)
    return scale / (scale.max() * scale.min()).sqrt()


def _tied(scale: Tensor, tie: Tensor | None) -> Tensor:
    """The geometric mean over channels that must agree."""
    if tie is None:
        return scale
    count = int(tie.max()) + 1
    logs = torch.zeros(count, device=scale.device).index_add_(0, tie, scale.log())
    return (logs / torch.bincount(tie, minlength=count)).exp()[tie]
