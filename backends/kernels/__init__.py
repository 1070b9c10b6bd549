"""The op table: what a decoder asks of a target, and the one weight format that every file format is translated into.

`ref.py` is the specification of every op, in plain torch; `aten.py`, `cpu.py`, `triton.py` are targets, one file each.
A target is an object with the methods of `Ops`; it is chosen once, at load (`choose`), and never branched on later.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Act = Any      # what `norm`, `glu`, `attend`, `act` return and `matmul` takes: a Tensor, or quantized rows; opaque to callers
Linear = Any   # what `pack` returns; has ``rows`` (N), ``columns`` (K) and ``nbytes``


@dataclass
class QWeight:
    """A quantized matrix [N, K], transient: each target packs it into its own layout.

    codes  uint8 [N, K], values 0 … 2**bits - 1
    scale  float [N, G], G = ceil(K / group); the last group may be ragged
    zero   uint8/int16 [N, G]: w = (code - zero) * scale, or None
    bias   float [N, G]: w = code * scale + bias, or None. Exactly one of zero and bias is given.
    perm   int64 [K] or None: act-order. Column j of ``codes`` multiplies input feature perm[j].
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: Tensor | None
    bits: int
    group: int
    perm: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K] in the order of the input features."""
        n, k = self.shape
        groups = self.scale.shape[1]
        dense = torch.zeros(n, groups * self.group, device=self.codes.device)       # the last group may be ragged
        dense[:, :k] = self.codes
        grouped, scale = dense.view(n, groups, self.group), self.scale.to(torch.float32)[..., None]
        if self.bias is not None:
            grouped.mul_(scale).add_(self.bias.to(torch.float32)[..., None])
        else:
            grouped.sub_(self.zero.to(torch.float32)[..., None]).mul_(scale)
        dense = dense[:, :k]
        if self.perm is None:
            return dense.to(dtype).contiguous()
        out = torch.empty_like(dense)
        out[:, self.perm] = dense
        return out.to(dtype).contiguous()

    @staticmethod
    def cat(parts: Sequence[QWeight]) -> QWeight | None:
        """One matrix of several that share an input, stacked by rows (q, k, v; gate, up); None where bits, group, kind of
        offset or the permutation differ: an act-order index belongs to the input side and must be the same."""
        first = parts[0]
        if all(isinstance(part, StoredWeight) and part.kind == first.kind and part.shape[1] == first.shape[1] for part in parts):
            return StoredWeight(first.kind, [rows for part in parts for rows in part.held], first.shape[1], first.bits,
                                first.group, first.unpack)
        for part in parts[1:]:
            same_perm = (part.perm is None) == (first.perm is None) and (first.perm is None or torch.equal(part.perm, first.perm))
            if not same_perm or (part.bits, part.group, part.bias is None, part.shape[1]) != (
                    first.bits, first.group, first.bias is None, first.shape[1]):
                return None
        stack = lambda name: None if getattr(first, name) is None else torch.cat([getattr(p, name) for p in parts])  # noqa: E731
        return QWeight(stack("codes"), stack("scale"), stack("zero"), stack("bias"), first.bits, first.group, first.perm)


@dataclass(frozen=True)
class FileRows:
    """Rows of blocks, ``shape`` = (rows, bytes of a row), that lie at ``at`` in their file still, one after another.
    ``heads`` > 0: in each of so many heads rows 2j and 2j + 1 are meant to be row j of its first and of its second half.
    ``read``: these rows in the order that is meant, uint8 [rows, bytes of a row]; ``name``: for people."""

    name: str
    path: Path
    at: int
    shape: tuple[int, int]
    heads: int
    read: Callable[[], Tensor]


class StoredWeight(QWeight):
    """A `QWeight` that lies in the blocks of its file still: a target that lays such blocks out by itself reads ``parts``
    (uint8 [rows, bytes of a row], one below the other) of ``kind`` ("Q4_0" …), or, where nobody has read them yet, the
    ``places`` where they lie; for everybody else codes, scale … are made when first asked for."""

    def __init__(self, kind: str, held: Sequence[Tensor | FileRows], columns: int, bits: int, group: int,
                 unpack: Callable[[Tensor], QWeight]) -> None:
        self.kind, self.held, self.columns, self.unpack = kind, tuple(held), columns, unpack
        self.bits, self.group, self.perm = bits, group, None

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.held), self.columns

    @property
    def places(self) -> tuple[FileRows, ...] | None:
        return self.held if all(isinstance(part, FileRows) for part in self.held) else None

    @cached_property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(part.read() if isinstance(part, FileRows) else part for part in self.held)

    @cached_property
    def _plain(self) -> QWeight:
        return self.unpack(self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts))

    codes = property(lambda self: self._plain.codes)
    scale = property(lambda self: self._plain.scale)
    zero = property(lambda self: self._plain.zero)
    bias = property(lambda self: self._plain.bias)


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention, fixed at load. ``scale`` multiplies q·k; ``rope`` indexes the batch's tables (None: no rotation);
    q_norm, k_norm: float32 [head_dim] RMS weights applied per head before the rotation, or None."""

    layer: int                          # which of the KV cache's layers
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None           # a token sees itself and the window - 1 before it
    softcap: float | None = None
    rope: int | None = 0
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_eps: float = 1e-6


@dataclass
class Batch:
    """One forward pass: packed ragged rows. Made by the runner; S sequences, R rows in all.

    ids        int64 [R]
    positions  int64 [R]            place of the row in its sequence, from 0
    starts     int32 [S + 1]        rows of sequence s: starts[s] … starts[s+1] - 1
    lengths    int32 [S]            tokens in the cache after this pass
    pages      int32 [S, P]         page table, padded with 0
    slots      int64 [R]            page * page_size + offset where the row's K and V go
    wanted     int64 [W]            rows whose logits are asked for
    cos, sin   float32 [T, R, rot/2] rotation tables for these rows, one for each rope kind T; rot = rotated width
    states     float32 [R, H]       for a draft that reads them: its verifier's residual stream at the token before; else None
    """

    ids: Tensor
    positions: Tensor
    starts: Tensor
    lengths: Tensor
    pages: Tensor
    slots: Tensor
    wanted: Tensor
    cos: Tensor
    sin: Tensor
    states: Tensor | None = None


class Ahead(NamedTuple):
    """Which ids a model is to guess one after another: ``most`` of them, up to the first from ``known`` on (None: all are known).
    ``places`` None: always the likeliest. Else as `engine/sampler.py` draws, with these keys of noise, uint64, one for each id.

    ``ends``: float64 edges between bands of probability, the rate of each band, and needs: an id is followed by another while the
    product of the rates of all so far exceeds needs[how many those are]. None: made to the end."""

    most: int
    known: int | None = None
    places: array | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    ends: tuple[array, array, array] | None = None


class Guesses(NamedTuple):
    """What came of an `Ahead`: the ids, the probability of each, and which tokens were read for them, guesses included."""

    ids: list[int]
    sure: list[float]
    read: list[int]


@dataclass
class KVLayer:
    """Pages of one layer. k: [pages, kv_heads, page_size, key_width], v: the same with value_width, in the cache's type.

    int8 (asymmetric, one scale and zero point for each token and head): k, v are uint8, x = code * scale + low;
    k_scale, k_low, v_scale, v_low: float32 [pages, kv_heads, page_size]; scale = (max - min) / 255, low = min.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    k_low: Tensor | None = None
    v_scale: Tensor | None = None
    v_low: Tensor | None = None


class Ops(Protocol):
    """Activations x are the residual stream, [R, H] in ``dtype``, contiguous. Everything returned is fresh or workspace that
    stays valid until the same op is called again with the same shape; results of one row never depend on other rows up
    to ``row_independent`` rows."""

    name: str                           # "ref", "aten", "cpu"
    detail: str                         # shown to people: "avx512-vnni, 2 threads"
    dtype: torch.dtype                  # of the residual stream
    weight_dtype: torch.dtype | None    # of float matrices; None: as they are stored
    device: torch.device
    row_independent: int | None         # rows up to which a row's bits do not depend on the others; None: any number
    kv_types: tuple[str, ...]           # types of KV cache it reads, best first; asked once the weights are packed
    notes: list[str]                    # what `pack` did that was not as stored, in words for people

    def pack(self, weight: QWeight | Tensor, bias: Tensor | None = None) -> Linear:
        """A matrix [N, K], quantized or float, in this target's layout. ``bias``: float [N] added to the product."""

    def pack_table(self, weight: QWeight | Tensor) -> Linear:
        """`pack` for a matrix that `embed` reads as well as, with tied heads, `matmul`. (`pack` itself where both are alike.)"""

    def embed(self, table: Linear, ids: Tensor, scale: float = 1.0) -> Tensor:
        """Rows of a packed matrix as activations: x [R, H] = table[ids] * scale."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Act:
        """RMS norm, ready for `matmul`: x / sqrt(mean(x²) + eps) * weight (float32 inside)."""

    def act(self, x: Tensor) -> Act:
        """Any rows made ready for `matmul`."""

    def matmul(self, a: Act, w: Linear) -> Tensor:
        """a @ w.T + bias, [R, N]."""

    def matmul_add(self, a: Act, w: Linear, x: Tensor) -> None:
        """x += a @ w.T + bias, in place."""

    def norm_add(self, y: Tensor, weight: Tensor, eps: float, x: Tensor) -> None:
        """x += rms_norm(y) * weight, in place (Gemma's norms after a block)."""

    def glu(self, gate_up: Tensor, kind: Literal["silu", "gelu_tanh", "gelu"]) -> Act:
        """gate_up [R, 2 I] → f(gate) * up, [R, I]."""

    def attend(self, qkv: Tensor, spec: AttentionSpec, kv: KVLayer, batch: Batch) -> Act:
        """qkv [R, (heads + 2 kv_heads) * head_dim] → head norms, rotation (halves: x1 cos - x2 sin, x2 cos + x1 sin), write
        K and V at batch.slots, causal attention over the pages; [R, heads * head_dim]."""

    def logits(self, a: Act, w: Linear, softcap: float | None = None) -> Tensor:
        """float32 [R, N]; softcap: cap * tanh(x / cap)."""

    # Optional: loading() is a context; within it `pack` may return before the matrix is there, and nothing may be computed: it
    # is read and laid out while the caller does something else. Leaving the context waits; BrokenFile where a file ended early.
    # Optional: gated(a, w, kind) is glu(matmul(a, w), kind) in one, the same numbers.
    # Optional: replay() gives an object for one decoder whose run(forward, batch, kv) returns what forward(batch, kv) does, a
    # pass made of ops alone, at less cost for few rows. A target that has no use for it lacks the method. With it goes
    # optionally chain(replay, kv, head, width, turns, names, columns): few rows of one sequence (`cpu_passes.py`), and ids guessed
    # ahead (`cpu_chain.py`), in one call.


def choose(name: str, device: str, dtype: str, threads: int, activations: str = "auto") -> tuple[Ops, tuple[str, ...]]:
    """The target asked for, or the best there is for "auto", and notes on what was passed over and why."""
    from backends.kernels import select
    return select.choose(name, device, dtype, threads, activations)
