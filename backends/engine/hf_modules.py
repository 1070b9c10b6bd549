"""Layers of a transformers module whose matrices are packed by the target, and what counts them.

Knows which layers are plain products or tables, found out by type or by trying, never by a model's name. Knows no files.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from backends.kernels import Linear, Ops

NARROW = (torch.bfloat16, torch.float16)


class PackedLinear(nn.Module):
    """A linear layer whose matrix is packed by the target: [..., K] → [..., N] in the type of the input."""

    def __init__(self, ops: Ops, matrix: Linear, biased: bool = False) -> None:
        super().__init__()
        self.ops, self.matrix, self.weight, self.biased = ops, matrix, _stand_in(ops, matrix), biased

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(self.ops.dtype)
        product = self.ops.matmul(self.ops.act(rows), self.matrix)     # may be workspace, which the next product overwrites
        return product.reshape(*x.shape[:-1], -1).to(x.dtype, copy=True)


class PackedEmbedding(nn.Module):
    """Token embedding from a packed matrix: int64 [...] → [..., H] in the target's type."""

    def __init__(self, ops: Ops, matrix: Linear) -> None:
        super().__init__()
        self.ops, self.matrix, self.weight = ops, matrix, _stand_in(ops, matrix)

    def forward(self, ids: Tensor) -> Tensor:
        return self.ops.embed(self.matrix, ids.reshape(-1)).reshape(*ids.shape, -1).clone()


def _stand_in(ops: Ops, matrix: Linear) -> Tensor:
    """What other code finds as a packed layer's ``weight``: type and shape without content, marked as already drawn. GPT-2's
    attention, for one, initialises the weight of its projection itself. No parameter: it is neither stored nor counted."""
    weight = torch.empty(matrix.rows, matrix.columns, dtype=ops.dtype, device="meta")
    weight._is_hf_initialized = True
    return weight


def weights_bytes(model: nn.Module) -> int:
    """Bytes of parameters and packed matrices, each counted once."""
    held = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    held |= {id(matrix): matrix.nbytes for matrix in _matrices(model)}
    return sum(held.values())


def parameters(model: nn.Module) -> int:
    """Weights, counted once each, however many bits they take."""
    held = {id(p): p.numel() for p in model.parameters()}
    held |= {id(matrix): matrix.rows * matrix.columns for matrix in _matrices(model)}
    biases = sum(part.matrix.rows for part in model.modules() if isinstance(part, PackedLinear) and part.biased)
    return sum(held.values()) + biases


def _matrices(model: nn.Module) -> list[Linear]:
    return [part.matrix for part in model.modules() if isinstance(part, PackedLinear | PackedEmbedding)]


def foreign_kernels(model: nn.Module) -> str | None:
    """What computes the matrix products where it is not the op table; None where it is."""
    return None if _matrices(model) else f"torch {torch.__version__.partition('+')[0]} through transformers"


# ---------------------------------------------------------------------------------------------- packing in place
def pack_floats(model: nn.Module, ops: Ops) -> tuple[str, ...]:
    """Pack the 16-bit matrices of plain layers, one by one, and bring all else into the type that ``ops`` computes in.
    Returns a note where large tensors are among the rest, which then take twice their room."""
    groups = _sharing(model)
    while groups:                                              # one by one: a packed layer's own tensor is freed at once
        holders = groups.pop()
        plain = holders[0][1].weight.dtype in NARROW and all(plain_shape(part) for _, part in holders)
        if plain and (len(holders) == 1 or all(getattr(part, "bias", None) is None for _, part in holders)):
            _pack_shared(model, holders, ops)
    large = [p for p in model.parameters() if p.dim() > 1 and p.dtype in NARROW]
    model.to(ops.dtype)
    size = sum(p.numel() for p in large)
    return (f"{size:,} weights of layers that are not plain linear ones are held in "
            f"{str(ops.dtype).removeprefix('torch.')}.",) if size else ()


def _sharing(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Layers by the weight they hold: a tied head stands beside its embedding."""
    groups: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, part in model.named_modules():
        if isinstance(part._parameters.get("weight"), nn.Parameter):
            groups.setdefault(id(part.weight), []).append((name, part))
    return list(groups.values())


def _pack_shared(model: nn.Module, holders: list[tuple[str, nn.Module]], ops: Ops) -> None:
    from transformers.pytorch_utils import Conv1D
    first = holders[0][1]
    weight = first.weight.detach()
    bias = getattr(first, "bias", None)
    matrix = ops.pack(weight.t() if isinstance(first, Conv1D) else weight, bias)
    for name, part in holders:
        embedding = isinstance(part, nn.Embedding)
        model.set_submodule(name, PackedEmbedding(ops, matrix) if embedding else PackedLinear(ops, matrix, bias is not None))


def plain_shape(module: nn.Module) -> tuple[int, int] | None:
    """[N, K] of a layer that is a plain product with one matrix, or a plain table; None for every other layer."""
    from transformers.pytorch_utils import Conv1D
    if type(module) is nn.Embedding or type(module) is nn.Linear:
        return tuple(module.weight.shape)
    if type(module) is Conv1D:
        return tuple(module.weight.shape)[::-1]
    return tuple(module.weight.shape) if isinstance(module, nn.Linear) and _acts_plainly(module) else None


def _acts_plainly(module: nn.Linear) -> bool:
    """Tried on a small matrix: does this subclass do what a linear layer does?"""
    draw = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, generator=draw) for shape in ((2, 5), (3, 5), (3,)))
    twin = copy.copy(module)
    twin._parameters = {"weight": weight, "bias": None if module.bias is None else bias}
    try:
        return torch.allclose(twin(x), nn.functional.linear(x, weight, twin.bias), atol=1e-5)
    except (RuntimeError, TypeError, ValueError, AttributeError):      # it needs more than rows: no plain layer
        return False
