"""The native CPU target: `Ops` over the kernels in `native/`, which are built on first use (`native_build`).

The residual stream is float32 whatever the weights are. A matrix with quantized weights meets activations in 8 bits, a
scale for each 32 of them, or in float32 where 8 bits are switched off; a float matrix meets float32 rows, or rows rounded to
bfloat16 where it is bfloat16 itself and the processor multiplies that. One arithmetic at every number of rows.
Not for two callers at once: results live in workspace that the next call of the same op and shape reuses.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from backends.errors import InvalidRequest
from backends.kernels import (
    AttentionSpec, Batch, KVLayer, QWeight, cpu_chain, cpu_load, cpu_memory, cpu_pack, cpu_passes, cpu_replay, cpu_scan, cpu_words)
from backends.kernels import native_abi as abi, native_build
from backends.kernels.cpu_pack import NativeLinear
from backends.kernels.cpu_words import Rows

FEW = 16                        # rows up to which passes are replayed and workspaces kept
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CpuOps:
    """See `backends.kernels.Ops` for what each op means."""

    name = "cpu"
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype | None, context: abi.Context, threads: int, eight_bits: bool = True) -> None:
        self.weight_dtype, self.threads = dtype, threads
        self.detail = f"{context.isa}, {threads} thread{'s' if threads > 1 else ''}"
        if cpu_memory.allowed():
            self.detail += ", huge pages"
        self.row_independent: int | None = None
        self.notes: list[str] = []
        self._context, self._call, self._pairs = context, context.call, context.isa == "avx512-bf16"
        self._arena = cpu_memory.Arena()
        self._loading: cpu_load.Loading | None = None
        self.scan = cpu_scan.NativeScan(context)
        self._eight_bits, self._quantized, self._paired = eight_bits, False, False
        self._small: dict[tuple, Rows | Tensor] = {}
        self._large: dict[tuple, Rows | Tensor] = {}
        self._large_rows = 0
        self._bound: dict[int, tuple[object, int, tuple]] = {}      # descriptors of specs, KV layers and weights by identity
        self._batch: Batch | None = None
        self._batch_line, self._batch_keep = abi.words(*(0,) * abi.BATCH_WORDS), ()
        self._batch_at = abi.address(self._batch_line)
        self._eps: dict[float, int] = {}

    @property
    def kv_types(self) -> tuple[str, ...]:
        """Attention is as exact as the products: where those are in 8 bits or in bfloat16 it is computed in bfloat16, if the
        processor multiplies that, and then keys and values are kept so."""
        return ("bfloat16", "float16", "float32", "int8") if self._paired else ("float16", "bfloat16", "float32", "int8")

    # ------------------------------------------------------------------------------------------ matrices
    def pack(self, weight: QWeight | Tensor, bias: Tensor | None = None) -> NativeLinear:
        bias = None if bias is None else bias.detach().to("cpu", torch.float32).contiguous()
        if isinstance(weight, QWeight):
            self._say_activations()
            self._note_width(weight.bits)
            return cpu_pack.pack_quantized(self._context, self._arena, weight, bias, self._loading)
        dtype = self.weight_dtype or (weight.dtype if weight.dtype in cpu_pack.TYPES else torch.float32)
        self._paired |= dtype == torch.bfloat16 and self._pairs
        return cpu_pack.pack_dense(self._context, self._arena, weight, bias, dtype)

    pack_table = pack                                          # rows can be read from every layout here

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within, quantized matrices of files are read and laid out by threads of their own, while the caller goes on."""
        self._loading = cpu_load.Loading(self._context, self.threads)
        try:
            yield
            self._loading.finish()
        finally:
            self._loading.close()
            self._loading = None

    def _say_activations(self) -> None:
        said = ", activations in 8 bits" if self._eight_bits else ", activations in float32"
        if not self.detail.endswith(said):
            self.detail += said
        self._quantized = self._eight_bits
        self._paired |= self._eight_bits and self._pairs

    def _note_width(self, bits: int) -> None:
        note = f"{bits}-bit weights take {4 if bits < 4 else 8} bits in memory"
        if bits not in (4, 8) and note not in self.notes:
            self.notes.append(note)

    def embed(self, table: NativeLinear, ids: Tensor, scale: float = 1.0) -> Tensor:
        if ids.dtype != torch.int64 or not ids.is_contiguous():
            ids = ids.to(torch.int64).contiguous()
        rows = ids.shape[0]
        x = self._matrix("embed", rows, table.columns)
        self._call(abi.EMBED, table.address, ids.data_ptr(), rows, x.data_ptr(), self._real(scale))
        return x

    def matmul(self, a: Rows, w: NativeLinear) -> Tensor:
        rows = a.floats.shape[0]
        out = self._matrix("matmul", rows, w.rows)
        self._call(abi.MATMUL, self._ready(a, w), w.address, rows, out.data_ptr(), 0)
        return out

    def matmul_add(self, a: Rows, w: NativeLinear, x: Tensor) -> None:
        rows = a.floats.shape[0]
        _check_stream(x, rows, w.rows)
        self._call(abi.MATMUL, self._ready(a, w), w.address, rows, x.data_ptr(), 1)

    def logits(self, a: Rows, w: NativeLinear, softcap: float | None = None) -> Tensor:
        rows = a.floats.shape[0]
        out = torch.empty(rows, w.rows, dtype=torch.float32)   # fresh: callers keep logits
        self._call(abi.LOGITS, self._ready(a, w), w.address, rows, out.data_ptr(), self._real(softcap or 0.0))
        return out

    def _ready(self, a: Rows, w: NativeLinear) -> int:
        if a.floats.shape[1] != w.columns:
            raise ValueError(f"rows of {a.floats.shape[1]} do not fit a matrix of {w.columns} columns")
        if w.quantized and self._quantized and not a.quantized:                # made before the first quantized matrix was packed
            a = self.act(a.floats)
        return a.address

    # ------------------------------------------------------------------------------------------ rows
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Rows:
        x = _floats(x)
        rows, width = x.shape
        out = self._rows("norm", rows, width)
        self._call(abi.NORM, x.data_ptr(), rows, self._weight(weight), self._real(eps), out.address)
        return out

    def act(self, x: Tensor) -> Rows:
        x = _floats(x)
        rows, width = x.shape
        out = self._rows("act", rows, width)
        self._call(abi.ACT, x.data_ptr(), rows, out.address)
        return out

    def norm_add(self, y: Tensor, weight: Tensor, eps: float, x: Tensor) -> None:
        y = _floats(y)
        rows, width = y.shape
        _check_stream(x, rows, width)
        self._call(abi.NORM_ADD, y.data_ptr(), rows, self._weight(weight), self._real(eps), x.data_ptr(), width)

    def glu(self, gate_up: Tensor, kind: str) -> Rows:
        gate_up = _floats(gate_up)
        rows, width = gate_up.shape
        out = self._rows("glu", rows, width // 2)
        self._call(abi.GLU_OP, gate_up.data_ptr(), rows, abi.GLU[kind], out.address)
        return out

    def gated(self, a: Rows, w: NativeLinear, kind: str) -> Rows:
        rows = a.floats.shape[0]
        out = self._rows("glu", rows, w.rows // 2)
        self._call(abi.GATED, self._ready(a, w), w.address, rows, abi.GLU[kind], out.address)
        return out

    def attend(self, qkv: Tensor, spec: AttentionSpec, kv: KVLayer, batch: Batch) -> Rows:
        qkv = _floats(qkv)
        rows = qkv.shape[0]
        out = self._rows("attend", rows, spec.heads * kv.v.shape[3])
        if self._batch is not batch:
            self.bind(batch)
        self._call(abi.ATTEND, qkv.data_ptr(), rows, self._once(spec, self._describe_spec),
                   self._once(kv, cpu_words.describe_kv),
                   self._batch_at, out.address)
        return out

    def _describe_spec(self, spec: AttentionSpec) -> tuple[int, tuple]:
        return cpu_words.describe_spec(spec, self._paired)

    # ------------------------------------------------------------------------------------------ recording
    def replay(self) -> cpu_replay.Replay:
        """For one decoder: its passes as one native call each, where the rows are few."""
        return cpu_replay.Replay(self, FEW)

    def chain(self, replay: cpu_replay.Replay, kv: Sequence[KVLayer], head: Callable[[Tensor], Tensor], width: int, turns: cpu_passes.Turns,
              names: Tensor | None, columns: int) -> cpu_chain.Chain:
        """For one decoder over one cache: few rows of one sequence, and ids guessed ahead, in one native call."""
        return cpu_chain.Chain(self, replay, kv, head, width, turns, names, columns)

    @contextmanager
    def recording(self) -> Iterator[list[tuple[int, ...]]]:
        """The instructions issued within, which run as well."""
        lines: list[tuple[int, ...]] = []
        call = self._call

        def note(*line: int) -> None:
            lines.append(line)
            call(*line)

        self._call = note
        try:
            yield lines
        finally:
            self._call = call

    def run(self, program: array) -> None:
        self._context.run(program)

    def run_chain(self, chain: int) -> None:
        """``chain``: the address of its descriptor. It uses the batch descriptor, which holds nothing afterwards."""
        self._batch = None
        self._call(abi.CHAIN, chain)

    @property
    def batch_address(self) -> int:
        return self._batch_at

    def bind(self, batch: Batch) -> None:
        """Make ``batch`` the one that `attend` sees: its tensors' addresses go into the one descriptor."""
        self._batch, self._batch_keep = batch, cpu_words.fill_batch(self._batch_line, batch)

    def workspace(self) -> list[object]:
        return list(self._small.values())

    def addresses(self) -> set[int]:
        """Where the small workspaces lie."""
        return {(kept if isinstance(kept, Tensor) else kept.floats).data_ptr() for kept in self._small.values()}

    def poison(self) -> None:
        """NaN into every small workspace: what a replay does not compute itself then shows."""
        for kept in self._small.values():
            (kept if isinstance(kept, Tensor) else kept.floats).fill_(torch.nan)

    # ------------------------------------------------------------------------------------------ workspace and descriptors
    def _matrix(self, op: str, rows: int, width: int) -> Tensor:
        key = (op, rows, width)
        found = self._store(rows).get(key)
        if found is None:
            found = self._store(rows)[key] = torch.empty(rows, width, dtype=torch.float32)
        return found

    def _rows(self, op: str, rows: int, width: int) -> Rows:
        key = (op, rows, width, self._quantized)
        found = self._store(rows).get(key)
        if found is None:
            found = self._store(rows)[key] = cpu_words.make_rows(rows, width, self._quantized)
        return found

    def _store(self, rows: int) -> dict:
        """Small shapes are kept for good, of the large ones those of one number of rows. What a caller holds, lives on."""
        if rows <= FEW:
            return self._small
        if rows != self._large_rows:
            self._large.clear()
            self._large_rows = rows
        return self._large

    def _once(self, value: object, describe) -> int:
        found = self._bound.get(id(value))
        if found is None:                                      # the value is kept, so that its identity stays its own
            found = self._bound[id(value)] = (value, *describe(value))
        return found[1]

    def _weight(self, weight: Tensor) -> int:
        return self._once(weight, cpu_words.describe_weight)

    def _real(self, value: float) -> int:
        found = self._eps.get(value)
        if found is None:
            found = self._eps[value] = abi.bits(value)
        return found


def _floats(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.to(torch.float32).contiguous()


def _check_stream(x: Tensor, rows: int, width: int) -> None:
    if x.dtype != torch.float32 or not x.is_contiguous() or x.shape != (rows, width):
        raise ValueError(f"the residual stream must be contiguous float32 [{rows}, {width}], not {x.dtype} {tuple(x.shape)}")


def make(dtype: str, threads: int, isa: str = "", activations: str = "auto") -> CpuOps:
    """The target. ``dtype``: the type float matrices are kept in ("auto": as they are stored). ``isa`` forces an instruction
    set, for tests. ``activations`` "float32": quantized weights meet rows as they are, not in 8 bits. Raises MissingRequirement where the kernels cannot be built or this processor lacks them."""
    if dtype not in DTYPES:
        raise InvalidRequest(f"The native kernels do not know the type {dtype!r}.", field="dtype",
                             remedy=f"Use {', '.join(DTYPES)}.")
    return CpuOps(DTYPES[dtype], abi.Context(native_build.library(isa), threads), threads, activations != "float32")
