"""Matrices in the native layout: 16 weight rows side by side, 32 columns a block (see `native/abi.h`).

Codes up to 4 bits are stored in 4, others in 8; a constant zero is moved to 8 or 128 by shifting the codes, which is exact.
Scales and float biases are float16 where they fit its normal range (a relative rounding of 2^-11 where they are not float16
already), else float32. Groups that do not fit blocks of 32 are spread over padded columns, and both they and act-order are
served by one gather of the activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.kernels import QWeight, StoredWeight, native_abi as abi
from backends.kernels.cpu_load import Loading
from backends.kernels.cpu_memory import Arena
from backends.kernels.native_abi import BLOCK, LANES

TYPES = {torch.float32: abi.F32, torch.float16: abi.F16, torch.bfloat16: abi.BF16}
OFFSET_KINDS = ("Q4_1", "Q4_K", "Q5_K")
NORMAL_HALF = 6.2e-5            # below it float16 loses bits


@dataclass(eq=False)
class NativeLinear:
    """A packed matrix."""

    rows: int
    columns: int
    nbytes: int
    address: int                # of the descriptor
    quantized: bool
    keep: tuple[object, ...]    # what the descriptor points to


def pack_dense(context: abi.Context, arena: Arena, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> NativeLinear:
    rows = weight.detach().to("cpu", dtype).contiguous()
    n, k = rows.shape
    padded = -(-k // 2) * 2 if dtype == torch.bfloat16 else k
    packed = arena.take(-(-n // LANES) * LANES * padded * rows.element_size())
    context.pack_floats(rows.data_ptr(), n, k, TYPES[dtype], packed.data_ptr())
    line = abi.words(packed.data_ptr(), 0, 0, abi.pointer(bias), 0, n, k, padded, 0, TYPES[dtype], 0, 0, 0, 0, 0)
    return NativeLinear(n, k, _nbytes(packed, bias), abi.address(line), False, (line, packed, bias))


def pack_quantized(context: abi.Context, arena: Arena, weight: QWeight, bias: Tensor | None,
                   loading: Loading | None = None) -> NativeLinear:
    """With ``loading``, what lies in a file still is there only when that is finished."""
    if isinstance(weight, StoredWeight) and weight.kind in abi.STORED:
        return _pack_stored(context, arena, weight, bias, loading)
    return _pack_codes(context, arena, weight, bias)


def _pack_stored(context: abi.Context, arena: Arena, weight: StoredWeight, bias: Tensor | None,
                 loading: Loading | None) -> NativeLinear:
    """The same as `_pack_codes` would make, without the codes."""
    n, k = weight.shape
    width, kind = (8 if weight.bits > 4 else 4), (abi.BIAS if weight.kind in OFFSET_KINDS else abi.CENTER)
    lanes, groups = -(-n // LANES) * LANES, k // weight.group
    packed = arena.take(lanes * k * width // 8)
    narrow = not weight.kind.endswith("K")                     # float16 in the file, and so here
    room = (lambda: arena.take(lanes * groups * 2).view(torch.float16)) if narrow else lambda: torch.empty(lanes * groups)
    scale, offset = room(), room() if kind == abi.BIAS else None
    line = abi.words(*(0,) * abi.LINEAR_WORDS)
    made = NativeLinear(n, k, 0, abi.address(line), True, ())

    def settle() -> None:
        numbers, wide = _numbers(arena, scale, offset)
        line[:] = abi.words(packed.data_ptr(), *map(abi.pointer, numbers), abi.pointer(bias), 0, n, k, k, width, 0,
                            min(weight.group, BLOCK), weight.group // BLOCK, groups, int(wide), kind)
        made.nbytes, made.keep = _nbytes(packed, *numbers, bias), (line, packed, *numbers, bias)

    _lay_out(context, weight, k * width // 8, packed, scale, offset, loading)
    if loading is None:
        settle()
    else:
        made.keep = (line, packed, scale, offset, bias)
        loading.then(settle)
    return made


def _lay_out(context: abi.Context, weight: StoredWeight, row_bytes: int, packed: Tensor, scale: Tensor,
             offset: Tensor | None, loading: Loading | None) -> None:
    k = weight.shape[1]
    numbers, done = k // weight.group * scale.element_size(), 0
    apart = all(part.shape[0] % LANES == 0 for part in weight.held[:-1])
    later = loading is not None and apart and weight.places is not None
    for part in weight.held if later else weight.parts if apart else (torch.cat(weight.parts),):
        at = (packed.data_ptr() + done * row_bytes, scale.data_ptr() + done * numbers,
              abi.pointer(offset) and abi.pointer(offset) + done * numbers)
        if later:
            loading.add(weight.kind, part, k, *at)
        else:
            whole = part.contiguous()
            context.pack_stored(weight.kind, whole.data_ptr(), part.shape[0], k, *at)
        done += part.shape[0]


def _numbers(arena: Arena, scale: Tensor, offset: Tensor | None) -> tuple[tuple[Tensor, Tensor | None], bool]:
    """Scales and offsets as they are kept, and whether that is float32."""
    wide = not (_fits_half(scale) and (offset is None or _fits_half(offset)))
    if scale.dtype == torch.float16:
        return (scale, offset), wide
    kept = (None if t is None else arena.keep(t if wide else t.to(torch.float16)) for t in (scale, offset))
    return tuple(kept), wide


def _pack_codes(context: abi.Context, arena: Arena, weight: QWeight, bias: Tensor | None) -> NativeLinear:
    n, k = weight.shape
    plan = _columns(k, weight.group)
    width = 4 if weight.bits <= 4 else 8
    kind, shift, offset = _offset(weight, width)
    gather, columns = _gathers(plan, k, weight.perm)
    codes = weight.codes.detach().to("cpu", torch.uint8).contiguous()
    packed = arena.take(-(-n // LANES) * LANES * plan.padded * width // 8)
    context.pack(codes.data_ptr(), n, k, plan.padded, abi.pointer(columns), width, shift, packed.data_ptr())
    wide = not (_fits_half(weight.scale) and (kind != abi.BIAS or _fits_half(offset)))
    number = torch.float32 if wide else torch.float16
    scale = arena.keep(_side_by_side(weight.scale.to(number), plan.groups))
    if offset is not None:
        offset = arena.keep(_side_by_side(offset.to(torch.uint8 if kind == abi.ZERO else number), plan.groups))
    line = abi.words(packed.data_ptr(), scale.data_ptr(), abi.pointer(offset), abi.pointer(bias), abi.pointer(gather),
                     n, k, plan.padded, width, 0, plan.segment, plan.blocks, plan.groups, int(wide), kind)
    return NativeLinear(n, k, _nbytes(packed, scale, offset, bias, gather), abi.address(line), True,
                        (line, packed, scale, offset, bias, gather))


@dataclass(frozen=True)
class _Columns:
    """How K columns in groups lie in padded ones. ``spread``: each group begins a block of its own."""

    padded: int
    segment: int
    blocks: int
    groups: int
    spread: int = 0             # columns of a group before padding, where they were spread


def _columns(k: int, group: int) -> _Columns:
    padded = -(-k // BLOCK) * BLOCK
    if group >= k:
        return _Columns(padded, 32, padded // BLOCK, 1)
    if group % BLOCK == 0:
        return _Columns(padded, 32, group // BLOCK, -(-k // group))
    if group == 16:
        return _Columns(padded, 16, 0, padded // 16)
    groups, blocks = -(-k // group), -(-group // BLOCK)
    return _Columns(groups * blocks * BLOCK, 32, blocks, groups, group)


def _gathers(plan: _Columns, k: int, perm: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """int32 [padded]: the input feature, and the column of the codes, that a packed column stands for; -1: none."""
    if not plan.spread and perm is None:
        return None, None
    column = torch.arange(plan.padded)
    if plan.spread:
        size = plan.blocks * BLOCK
        inside = column % size
        column = torch.where(inside < plan.spread, column // size * plan.spread + inside, k)
    column = torch.where(column < k, column, -1)
    feature = column if perm is None else torch.where(column < 0, -1, perm.cpu()[column.clamp_min(0)])
    return feature.to(torch.int32).contiguous(), column.to(torch.int32).contiguous()


def _offset(weight: QWeight, width: int) -> tuple[int, int, Tensor | None]:
    """Kind of offset, shift of the codes, and the offset's values [N, G]."""
    if weight.bias is not None:
        return abi.BIAS, 0, weight.bias
    zero = weight.zero.to(torch.int32)
    low, high = int(zero.min()), int(zero.max())
    shift = (8 if width == 4 else 128) - low
    if low == high and 0 <= shift <= (1 << width) - (1 << weight.bits):
        return abi.CENTER, shift, None
    if 0 <= low and high <= 255:
        return abi.ZERO, 0, zero
    return abi.BIAS, 0, -zero.to(torch.float32) * weight.scale.to(torch.float32)


def _fits_half(values: Tensor) -> bool:
    if values.dtype == torch.float16:
        return True
    size = values.abs()
    return bool(((size == 0) | ((size >= NORMAL_HALF) & (size <= 65504))).all())


def _side_by_side(values: Tensor, groups: int) -> Tensor:
    """[N, G] → [N/16, groups, 16], zeros beyond N and G; a view."""
    n, g = values.shape
    values = F.pad(values, (0, groups - g, 0, -n % LANES)) if groups > g or n % LANES else values
    return values.reshape(-1, LANES, groups).transpose(1, 2)


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
