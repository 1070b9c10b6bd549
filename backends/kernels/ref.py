"""Plain torch: the specification of every op. Results first, speed second; it runs on any device torch runs on.

Math is float32 whatever the storage. Matrix products always run over tiles of `TILE` rows and attention over blocks of
`BLOCK` keys whose partial sums are added in order, so that a row's bits depend neither on its neighbours, nor on their
number, nor on how far other sequences reach: padding adds exact zeros.

It knows tensors only: nothing of models, files or options.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.kernels import AttentionSpec, Batch, KVLayer, QWeight

TILE = 16                    # rows of one matrix product
BLOCK = 64                   # keys of one partial softmax sum; a multiple of the page size
WORKSPACE = 1 << 22          # float32 elements dequantized or gathered at a time

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


# ---------------------------------------------------------------------------------------------- matrices
class Dense:
    """A float matrix [N, K] in its storage type."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = weight.to(device, dtype).contiguous()
        self.bias = None if bias is None else bias.to(device, torch.float32)
        self.rows, self.columns = self.weight.shape
        self.perm: Tensor | None = None
        self.nbytes = _nbytes(self.weight, self.bias)
        self.block = self.rows if dtype == torch.float32 else max(1, WORKSPACE // self.columns)

    def dequantize(self, rows: slice | Tensor) -> Tensor:
        """float32 rows of the matrix, in the order of the stored columns."""
        return self.weight[rows].to(torch.float32)


class Packed:
    """A `QWeight` near its own size: up to 4 bits two codes a byte (column j beside column j + half), else a byte a code.

    Scales and biases are kept in float16 where that is exact, as it is for most files, else in float32.
    """

    def __init__(self, weight: QWeight, bias: Tensor | None, device: torch.device) -> None:
        self.rows, self.columns = weight.shape
        self.group, self.bits = weight.group, weight.bits
        codes = weight.codes.to(device)
        self.half = (self.columns + 1) // 2
        self.codes = pack_nibbles(codes, self.half) if weight.bits <= 4 else codes.contiguous()
        self.scale = _smallest(weight.scale.to(device))
        self.zero = None if weight.zero is None else weight.zero.to(device)
        self.offset = None if weight.bias is None else _smallest(weight.bias.to(device))
        self.perm = None if weight.perm is None else weight.perm.to(device)
        self.bias = None if bias is None else bias.to(device, torch.float32)
        self.nbytes = _nbytes(self.codes, self.scale, self.zero, self.offset, self.perm, self.bias)
        self.block = max(1, WORKSPACE // self.columns)

    def dequantize(self, rows: slice | Tensor) -> Tensor:
        """float32 rows of the matrix, in the order of the stored columns (`perm` belongs to the activations)."""
        codes = self.codes[rows]
        if self.bits <= 4:
            codes = torch.cat((codes & 15, codes >> 4), dim=-1)[..., :self.columns]
        scale, groups = self.scale[rows].to(torch.float32), self.scale.shape[1]
        ragged = groups * self.group - self.columns
        value = F.pad(codes, (0, ragged)) if ragged else codes
        value = value.to(torch.float32).view(-1, groups, self.group)
        if self.offset is not None:
            value = torch.addcmul(self.offset[rows].to(torch.float32)[..., None], value, scale[..., None])
        else:
            value = (value - self.zero[rows].to(torch.float32)[..., None]) * scale[..., None]
        return value.view(-1, groups * self.group)[:, :self.columns]


def pack_nibbles(codes: Tensor, half: int) -> Tensor:
    """uint8 [N, K] of values below 16 → uint8 [N, half]: low nibble column j, high nibble column j + half."""
    low, high = codes[:, :half], codes[:, half:]
    if high.shape[1] < half:
        high = F.pad(high, (0, half - high.shape[1]))
    return (low | (high << 4)).contiguous()


def _smallest(values: Tensor) -> Tensor:
    values = values.to(torch.float32)
    half = values.to(torch.float16)
    return (half if torch.equal(half.to(torch.float32), values) else values).contiguous()


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


# ---------------------------------------------------------------------------------------------- key-value pages
def store_rows(pages: Tensor, slots: Tensor, rows: Tensor, scale: Tensor | None, low: Tensor | None) -> None:
    """Write ``rows`` [R, heads, width] at ``slots`` [R] of ``pages`` [P, heads, size, width], quantized if it has scales."""
    size = pages.shape[2]
    page, offset = slots // size, slots % size
    if scale is None:
        pages[page, :, offset] = rows.to(pages.dtype)
        return
    least, most = rows.amin(-1), rows.amax(-1)
    step = (most - least) / 255
    codes = ((rows - least[..., None]) / step.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round_().clamp_(0, 255)
    pages[page, :, offset] = codes.to(torch.uint8)
    scale[page, :, offset], low[page, :, offset] = step, least


def load_pages(pages: Tensor, table: Tensor, scale: Tensor | None, low: Tensor | None) -> Tensor:
    """float32 [items, heads, P, size, width] of the pages in ``table`` [items, P]."""
    rows = pages[table].to(torch.float32)
    if scale is not None:
        rows = rows * scale[table][..., None] + low[table][..., None]
    return rows.transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first 2 * cos.shape[-1] columns of x [R, heads, D]; cos, sin [R, rot/2]."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """float32 RMS norm over the last dimension."""
    x = x.to(torch.float32)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


# ---------------------------------------------------------------------------------------------- the target
class RefOps:
    """See `backends.kernels.Ops` for what each op means."""

    name = "ref"
    row_independent: int | None = None
    kv_types = ("float32", "bfloat16", "float16", "int8")

    def __init__(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        self.dtype = self.weight_dtype = dtype
        self.device = torch.device(device)
        self.detail = f"plain torch, float32 math, {torch.get_num_threads()} threads"
        self.notes: list[str] = []

    def pack(self, weight: QWeight | Tensor, bias: Tensor | None = None) -> Dense | Packed:
        if isinstance(weight, QWeight):
            return Packed(weight, bias, self.device)
        return Dense(weight, bias, self.dtype, self.device)

    pack_table = pack                    # every matrix here can be read by rows

    def embed(self, table: Dense | Packed, ids: Tensor, scale: float = 1.0) -> Tensor:
        rows = table.dequantize(ids)
        if table.perm is not None:
            rows = torch.empty_like(rows).index_copy_(1, table.perm, rows)
        return (rows * scale).to(self.dtype)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms(x, weight, eps).to(self.dtype)

    def act(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def matmul(self, a: Tensor, w: Dense | Packed) -> Tensor:
        return self._product(a, w).to(self.dtype)

    def matmul_add(self, a: Tensor, w: Dense | Packed, x: Tensor) -> None:
        x += self._product(a, w)

    def norm_add(self, y: Tensor, weight: Tensor, eps: float, x: Tensor) -> None:
        x += rms(y, weight, eps)

    def glu(self, gate_up: Tensor, kind: str) -> Tensor:
        gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
        return (ACTIVATIONS[kind](gate) * up).to(self.dtype)

    def logits(self, a: Tensor, w: Dense | Packed, softcap: float | None = None) -> Tensor:
        scores = self._product(a, w)
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    def attend(self, qkv: Tensor, spec: AttentionSpec, kv: KVLayer, batch: Batch) -> Tensor:
        return attend_pages(place(qkv, spec, kv, batch), spec, kv, batch).flatten(1).to(self.dtype)

    def _product(self, a: Tensor, w: Dense | Packed) -> Tensor:
        """float32 a @ w.T + bias in tiles of one shape: the library's choice of algorithm then never depends on R."""
        rows = a.shape[0]
        a = a.to(torch.float32) if w.perm is None else a.to(torch.float32)[:, w.perm]
        a = F.pad(a, (0, 0, 0, -rows % TILE)).contiguous()
        out = torch.empty(a.shape[0], w.rows, dtype=torch.float32, device=a.device)
        for low in range(0, w.rows, w.block):
            part = w.dequantize(slice(low, low + w.block)).t()
            for top in range(0, a.shape[0], TILE):
                out[top:top + TILE, low:low + w.block] = a[top:top + TILE] @ part
        out = out[:rows]
        return out if w.bias is None else out.add_(w.bias)


# ---------------------------------------------------------------------------------------------- attention
def place(qkv: Tensor, spec: AttentionSpec, kv: KVLayer, batch: Batch) -> Tensor:
    """Norm, rotate and store the rows' keys and values; returns the queries, float32 [R, heads, D]."""
    heads = qkv.to(torch.float32).view(qkv.shape[0], -1, spec.head_dim)
    q, k, v = heads.split((spec.heads, spec.kv_heads, spec.kv_heads), dim=1)
    q = q if spec.q_norm is None else rms(q, spec.q_norm, spec.norm_eps)
    k = k if spec.k_norm is None else rms(k, spec.k_norm, spec.norm_eps)
    if spec.rope is not None:
        cos, sin = batch.cos[spec.rope], batch.sin[spec.rope]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    store_rows(kv.k, batch.slots, k, kv.k_scale, kv.k_low)
    store_rows(kv.v, batch.slots, v, kv.v_scale, kv.v_low)
    return q.contiguous()


def attend_pages(q: Tensor, spec: AttentionSpec, kv: KVLayer, batch: Batch) -> Tensor:
    """float32 [R, heads, value_width]: causal attention of q [R, heads, D] over the pages; they hold the rows themselves."""
    out = q.new_empty(*q.shape[:2], kv.v.shape[-1])
    for rows, table, positions in _items(batch, kv):
        out[rows[rows >= 0]] = _attend(q[rows.clamp_min(0)], table, positions, kv, spec)[rows >= 0]
    return out


def _items(batch: Batch, kv: KVLayer) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tiles of at most `TILE` rows of one sequence, as many at a time as the workspace holds.

    Yields rows [I, TILE] (-1: padding), their page tables [I, P] and positions [I, TILE].
    """
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    tiles = [(s, top, min(top + TILE, starts[s + 1])) for s in range(len(lengths))
              for top in range(starts[s], starts[s + 1], TILE)]
    _, heads, size, width = kv.k.shape
    unit = BLOCK // size
    pages = -(-max(lengths, default=1) // BLOCK) * unit
    table = F.pad(batch.pages, (0, max(0, pages - batch.pages.shape[1])))[:, :pages].long()
    at_once = max(1, WORKSPACE // (pages * size * heads * max(width, TILE)))
    for first in range(0, len(tiles), at_once):
        group = tiles[first:first + at_once]
        padded = [list(range(top, end)) + [-1] * (TILE - end + top) for _, top, end in group]
        rows = torch.tensor(padded, device=table.device)
        positions = torch.where(rows >= 0, batch.positions[rows.clamp_min(0)], 0)
        yield rows, table[[s for s, _, _ in group]], positions


def _attend(q: Tensor, table: Tensor, positions: Tensor, kv: KVLayer, spec: AttentionSpec) -> Tensor:
    """q [I, TILE, heads, D] over the pages of each item → [I, TILE, heads, value_width]."""
    items, repeat = q.shape[0], spec.heads // spec.kv_heads
    k = load_pages(kv.k, table, kv.k_scale, kv.k_low).reshape(items, spec.kv_heads, -1, BLOCK, kv.k.shape[-1])
    v = load_pages(kv.v, table, kv.v_scale, kv.v_low).reshape(items, spec.kv_heads, -1, BLOCK, kv.v.shape[-1])
    blocks = k.shape[2]
    key = torch.arange(blocks * BLOCK, device=q.device)
    seen = key <= positions[..., None]
    if spec.window is not None:
        seen &= key > positions[..., None] - spec.window
    unused = ~seen.any(1).view(items, 1, blocks, BLOCK, 1)          # garbage there must not reach a sum, not even times 0
    v = v.masked_fill(unused, 0.0)
    seen = seen.view(items, 1, 1, TILE, blocks, BLOCK).transpose(3, 4)                      # [I, 1, 1, blocks, TILE, BLOCK]
    q = q.view(items, TILE, spec.kv_heads, repeat, -1).permute(0, 2, 3, 1, 4)
    q = q.reshape(items, spec.kv_heads, 1, repeat * TILE, -1)
    scores = (q.expand(-1, -1, blocks, -1, -1) @ k.transpose(-1, -2)) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.view(items, spec.kv_heads, blocks, repeat, TILE, BLOCK).masked_fill_(~seen.transpose(2, 3), -torch.inf)
    weight = torch.exp(scores - scores.amax((2, 5), keepdim=True))
    total = weight.sum(-1, keepdim=True).cumsum(2)[:, :, -1]
    # Sums over blocks are taken in order, so that the zeros of blocks further on change nothing.
    mixed = (weight.view(items, spec.kv_heads, blocks, repeat * TILE, BLOCK) @ v).cumsum(2)[:, :, -1]
    mixed = mixed.view(items, spec.kv_heads, repeat, TILE, -1) / total
    return mixed.permute(0, 3, 1, 2, 4).reshape(items, TILE, spec.heads, -1)


def make(dtype: torch.dtype, device: torch.device | str) -> RefOps:
    return RefOps(dtype, device)
