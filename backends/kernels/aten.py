"""The operators that torch ships, where no compiler is at hand: int4 products, `linear`, fused attention.

What they cannot multiply as stored (8 bits, odd groups) is unpacked into the compute type at load, and `notes` says so. One
row has one arithmetic here; among other rows a vendor library may choose another, so no more than one row is promised.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.kernels import AttentionSpec, Batch, KVLayer, QWeight
from backends.kernels.ref import WORKSPACE, Dense, Packed, RefOps, attend_pages, load_pages, place, rms

INT4_GROUPS = (32, 64, 128, 256)
INT4_ROWS = 16               # the op wants N in steps of this


class Int4:
    """At most 4 bits in ATen's layout. The op computes (code - 8) * scale + shift, so any zero or bias becomes a shift.

    ``table``: the same codes readable by rows, kept for a matrix that embeds.
    """

    def __init__(self, weight: QWeight, bias: Tensor | None, dtype: torch.dtype, table: Packed | None = None) -> None:
        self.rows, self.columns = weight.shape
        self.group, self.perm, self.table = weight.group, weight.perm, table
        self.codes = torch._convert_weight_to_int4pack_for_cpu(weight.codes.to(torch.int32), 1)
        scale = weight.scale.to(torch.float32)
        offset = -weight.zero.to(torch.float32) * scale if weight.bias is None else weight.bias.to(torch.float32)
        shift = offset + 8 * scale
        self.scales = torch.stack((scale.t(), shift.t()), dim=-1).to(dtype).contiguous()      # [G, N, 2]
        self.bias = None if bias is None else bias.to(dtype)
        self.nbytes = sum(t.nbytes for t in (self.codes, self.scales, self.bias, self.perm) if t is not None)
        self.nbytes += 0 if table is None else table.nbytes

    def product(self, a: Tensor) -> Tensor:
        a = a if self.perm is None else a[:, self.perm]
        out = torch._weight_int4pack_mm_for_cpu(a.contiguous(), self.codes, self.group, self.scales)
        return out if self.bias is None else out.add_(self.bias)

    def dequantize(self, rows: Tensor) -> Tensor:
        """float32 rows, in stored column order; without a ``table`` by multiplying the unit matrix: exact, slow."""
        if self.table is not None:
            return self.table.dequantize(rows)
        unit = torch.eye(self.columns, dtype=self.scales.dtype)
        whole = torch._weight_int4pack_mm_for_cpu(unit, self.codes, self.group, self.scales)
        return whole[:, rows].t().to(torch.float32)


class Float(Dense):
    """A float matrix that multiplies in its storage type."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(weight, bias, dtype, device)
        self.offset = None if bias is None else self.bias.to(dtype)

    def product(self, a: Tensor) -> Tensor:
        return F.linear(a, self.weight, self.offset)


class AtenOps(RefOps):
    """See `backends.kernels.Ops`; what is not here is as in the specification."""

    name = "aten"
    row_independent = 1

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.detail = f"torch operators, {str(dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads"
        own = str(dtype).removeprefix("torch.")
        self.kv_types = (own, *(kind for kind in RefOps.kv_types if kind != own))

    def pack(self, weight: QWeight | Tensor, bias: Tensor | None = None) -> Float | Int4:
        return self._pack(weight, bias, table=False)

    def pack_table(self, weight: QWeight | Tensor) -> Float | Int4:
        return self._pack(weight, None, table=True)

    def _pack(self, weight: QWeight | Tensor, bias: Tensor | None, *, table: bool) -> Float | Int4:
        if not isinstance(weight, QWeight):
            return Float(weight, bias, self.dtype, self.device)
        reason = self._unfit(weight)
        if reason is None:
            if weight.bits < 4:
                self._note(f"{weight.bits}-bit weights take 4 bits here")
            return Int4(weight, bias, self.dtype, Packed(weight, None, self.device) if table else None)
        self._note(f"{weight.bits}-bit weights{reason} are kept as {str(self.dtype).removeprefix('torch.')}")
        return Float(self._unpack(weight), bias, self.dtype, self.device)

    def _unfit(self, weight: QWeight) -> str | None:
        if weight.bits > 4:
            return ""
        if self.device.type != "cpu":
            return f" on {self.device.type}"
        if weight.group not in INT4_GROUPS or weight.shape[1] % weight.group:
            return f" in groups of {weight.group}"
        return None if weight.shape[0] % INT4_ROWS == 0 else " with an odd number of rows"

    def _unpack(self, weight: QWeight) -> Tensor:
        rows, columns = weight.shape
        dense = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        step = max(1, WORKSPACE // columns)
        for low in range(0, rows, step):
            part = [None if t is None else t[low:low + step] for t in (weight.codes, weight.scale, weight.zero, weight.bias)]
            dense[low:low + step] = QWeight(*part, weight.bits, weight.group, weight.perm).dequantize(self.dtype)
        return dense

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms(x, weight, eps).to(self.dtype)

    def matmul(self, a: Tensor, w: Float | Int4) -> Tensor:
        return w.product(a)

    def matmul_add(self, a: Tensor, w: Float | Int4, x: Tensor) -> None:
        x += w.product(a)

    def logits(self, a: Tensor, w: Float | Int4, softcap: float | None = None) -> Tensor:
        scores = w.product(a).to(torch.float32)
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    def attend(self, qkv: Tensor, spec: AttentionSpec, kv: KVLayer, batch: Batch) -> Tensor:
        q = place(qkv, spec, kv, batch)
        if spec.softcap is not None:                             # torch's attention has no cap
            return attend_pages(q, spec, kv, batch).flatten(1).to(self.dtype)
        return _attend(q.to(self.dtype), spec, kv, batch).flatten(1)


# ---------------------------------------------------------------------------------------------- attention
def _attend(q: Tensor, spec: AttentionSpec, kv: KVLayer, batch: Batch) -> Tensor:
    """q [R, heads, D] → [R, heads, value_width]: all sequences with one row together, each of the others alone."""
    starts = batch.starts.tolist()
    counts = [end - start for start, end in zip(starts, starts[1:])]
    out = q.new_empty(*q.shape[:2], kv.v.shape[-1])
    single = [s for s, count in enumerate(counts) if count == 1]
    if single:
        rows = batch.starts[:-1][single].long()
        out[rows] = _group(q[rows][:, None], spec, kv, batch.pages[single], batch.positions[rows][:, None])[:, 0]
    for s, count in enumerate(counts):
        if count > 1:
            rows = slice(starts[s], starts[s + 1])
            pages = batch.pages[s:s + 1]
            out[rows] = _group(q[rows][None], spec, kv, pages, batch.positions[rows][None])[0]
    return out


def _group(q: Tensor, spec: AttentionSpec, kv: KVLayer, pages: Tensor, positions: Tensor) -> Tensor:
    """q [S, n, heads, D] at positions [S, n] over pages [S, P] → [S, n, heads, value_width]."""
    count, n = positions.shape
    size, last = kv.k.shape[2], int(positions.max())
    first = 0 if spec.window is None else max(0, int(positions.min()) - spec.window + 1) // size
    table = pages[:, first:last // size + 1].long()
    k = load_pages(kv.k, table, kv.k_scale, kv.k_low).flatten(2, 3).to(q.dtype)              # [S, kv_heads, T, D]
    v = load_pages(kv.v, table, kv.v_scale, kv.v_low).flatten(2, 3).to(q.dtype)
    repeat = spec.heads // spec.kv_heads
    key = torch.arange(first * size, first * size + k.shape[2], device=q.device)
    seen = key <= positions[..., None]                                                       # [S, n, T]
    if spec.window is not None:
        seen &= key > positions[..., None] - spec.window
    folded = q.view(count, n, spec.kv_heads, repeat, -1).transpose(1, 2).flatten(2, 3)       # rows (n, repeat) share keys
    mask = seen.repeat_interleave(repeat, dim=1)[:, None]
    mixed = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=spec.scale)
    return mixed.view(count, spec.kv_heads, n, repeat, -1).transpose(1, 2).flatten(2, 3)


def make(dtype: torch.dtype, device: torch.device | str) -> AtenOps:
    return AtenOps(dtype, torch.device(device))
