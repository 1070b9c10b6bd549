"""GPTQ: columns are rounded one after another, and what each loses is made good by the columns still to come.

After Frantar et al. 2022, with act-order, static groups, clip search, and rounds in which scales are fitted to codes by
least squares and codes to scales by another sweep. Knows one matrix and the Gram matrix of its inputs; nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backends.compress.grid import Best, Grid, fit, fit_group, group_width, groups_of, output_error, refit_scales
from backends.errors import StepFailed
from backends.kernels import QWeight
from backends.recipe import QuantizeOptions

BLOCK = 128
ROWS = 8192             # rows swept at once: bounds the memory that an output head takes


@dataclass(frozen=True)
class Measured:
    """What came of one matrix: ``error`` = squared output error over that of the outputs themselves; ``damp`` as used."""

    weight: QWeight
    error: float
    damp: float


class Inputs:
    """A Gram matrix [K, K] prepared once for all matrices that share the inputs: order, damping and factor."""

    def __init__(self, gram: Tensor, settings: QuantizeOptions) -> None:
        self.raw = gram
        diagonal = gram.diagonal()
        dead = diagonal == 0
        mean = diagonal.mean().clamp_min(torch.finfo(torch.float32).tiny)
        self.order = torch.argsort(diagonal, descending=True) if settings.act_order else None
        self.damp, self.gram, self.factor = self._factor(gram, mean, dead, settings.damp)

    def _factor(self, gram: Tensor, mean: Tensor, dead: Tensor, damp: float) -> tuple[float, Tensor, Tensor]:
        """Damped Gram matrix, and the upper Cholesky factor of its inverse (in the order of the sweep). A matrix that is not
        positive after damping in float32 is damped ten times as much; the damping used is recorded."""
        while damp <= 10:
            damped = gram.clone()
            damped.diagonal().add_(damp * mean)
            damped.diagonal()[dead] = mean
            ordered = damped if self.order is None else damped[self.order][:, self.order]
            lower, failed = torch.linalg.cholesky_ex(ordered)
            if not failed:
                upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
                if not failed and torch.isfinite(upper).all():
                    return damp, damped, upper
            damp *= 10
        raise StepFailed("The calibration inputs of a matrix are not finite.", columns=len(gram))


def quantize(weight: Tensor, inputs: Inputs, settings: QuantizeOptions) -> Measured:
    """The codes of a matrix [N, K] (float32), least in output error over the calibration inputs. No row depends on
    another one."""
    parts = [_quantize(weight[start:start + ROWS], inputs, settings) for start in range(0, len(weight), ROWS)]
    codes, scale, zero = (torch.cat(items) for items in zip(*(part[:3] for part in parts)))
    order = None if settings.static_groups else inputs.order
    group = group_width(weight.shape[1], settings.group)
    lost, whole = (sum(part[i] for part in parts) for i in (3, 4))
    packed = QWeight(codes.to(torch.uint8), scale.to(torch.float16), zero.to(torch.uint8), None, settings.bits, group, order)
    return Measured(packed, float(lost / max(whole, 1e-30)), inputs.damp)


def _quantize(weight: Tensor, inputs: Inputs, settings: QuantizeOptions) -> tuple[Tensor, Tensor, Tensor, float, float]:
    """codes (in the order of the file's columns), scale, zero, squared error, squared output."""
    columns, order = weight.shape[1], inputs.order
    neighbours = groups_of(columns, settings.group, weight.device)
    ordered = weight if order is None else weight[:, order]
    static = settings.static_groups or order is None
    groups = neighbours if order is None or not settings.static_groups else neighbours[order]   # of columns as swept
    importance = inputs.factor.diagonal().square().reciprocal()
    grid = None
    if settings.static_groups:
        grid = fit(ordered, importance, groups, settings.bits, settings.sym, settings.mse)
    codes, grid = sweep(ordered, inputs.factor, groups, importance, grid, settings)
    gram = inputs.gram if order is None else inputs.gram[order][:, order]
    codes, grid = _refine(ordered, gram, inputs.factor, groups, importance, codes, grid.rounded(), settings)
    lost = output_error(ordered, grid.values(codes, groups), gram).sum().item()
    whole = output_error(ordered, torch.zeros_like(ordered), gram).sum().item()
    if static and order is not None:
        codes = codes[:, torch.argsort(order)]
    return codes, grid.scale, grid.zero, lost, whole


def _refine(weight: Tensor, gram: Tensor, factor: Tensor, groups: Tensor, importance: Tensor, codes: Tensor, grid: Grid,
            settings: QuantizeOptions) -> tuple[Tensor, Grid]:
    """Scales for the codes, then codes for the scales; a row keeps whichever round was best."""
    best = Best(weight, gram, groups, codes, grid)
    for _ in range(settings.refine):
        fitted = refit_scales(weight, gram, best.grid, best.codes, groups).rounded()
        swept, _ = sweep(weight, factor, groups, importance, fitted, settings)
        best.offer(best.codes, fitted)
        best.offer(swept, fitted)
    return best.codes, best.grid


def sweep(weight: Tensor, factor: Tensor, groups: Tensor, importance: Tensor, grid: Grid | None,
          settings: QuantizeOptions) -> tuple[Tensor, Grid]:
    """Codes [N, K] (float32, whole) and their grid. ``factor``: upper, factorᵀ factor = inverse of the damped Gram matrix,
    in the order of the columns. Without ``grid`` each group's scale is fitted when the sweep arrives at its first column."""
    rest = weight.T.contiguous()                                # [K, N]: a column is a row of memory
    count = int(groups[-1]) + 1 if grid is None else grid.scale.shape[1]
    fitting = grid is None
    if fitting:
        grid = Grid(weight.new_empty(len(weight), count), weight.new_empty(len(weight), count), settings.bits)
    scales, zeros, where = grid.scale.T.contiguous(), grid.zero.T.contiguous(), groups.tolist()
    codes, columns = torch.empty_like(rest), len(rest)
    block = max(BLOCK // settings.group, 1) * settings.group if 0 < settings.group < columns and fitting else BLOCK
    for start in range(0, columns, block):
        end = min(start + block, columns)
        errors = rest.new_empty(end - start, rest.shape[1])
        for column in range(start, end):
            group = where[column]
            if fitting and (column == 0 or where[column - 1] != group):
                stop = columns if settings.group < 0 else min(column + settings.group, columns)
                scales[group], zeros[group] = fit_group(rest[column:stop].T, importance[column:stop], settings.bits,
                                                        settings.sym, settings.mse)
            _column(rest, codes, errors, column, start, end, factor, scales[group], zeros[group], grid.top)
        if end < columns:
            rest[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return codes.T.contiguous(), Grid(scales.T.contiguous(), zeros.T.contiguous(), settings.bits)


def _column(rest: Tensor, codes: Tensor, errors: Tensor, column: int, start: int, end: int, factor: Tensor, scale: Tensor,
            zero: Tensor, top: int) -> None:
    """Round one column and pass its error on to those of its block."""
    code = torch.div(rest[column], scale, out=codes[column]).round_().add_(zero).clamp_(0, top)
    error = torch.sub(rest[column], (code - zero).mul_(scale), out=errors[column - start]).div_(factor[column, column])
    if column + 1 < end:
        rest[column + 1:end].addr_(factor[column, column + 1:end], error, alpha=-1)
