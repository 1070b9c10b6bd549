"""The Triton target: `Ops` on an NVIDIA GPU, with packed weights, paged attention and passes recorded as CUDA graphs.

The residual stream is bfloat16 or float16 (or float32, for whoever asks for it), sums are float32. Up to `FEW` rows a row's
bits do not depend on its company; above, packed matrices meet larger tiles, and float ones the vendor's GEMM.
"""

from __future__ import annotations

import subprocess
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.errors import InvalidRequest, MissingRequirement
from backends.kernels import AttentionSpec, Batch, KVLayer, QWeight
from backends.kernels import triton_attention as attention
from backends.kernels import triton_int4 as int4
from backends.kernels import triton_rows as lines
from backends.kernels.triton_graphs import CudaRecorder, Graphs
from backends.kernels.triton_matmul import FEW, Ending, multiply_float, multiply_packed
from backends.kernels.triton_pack import FloatMatrix, PackedMatrix, bias_on, pack

DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CAPABILITY = (8, 0)             # the oldest that Triton's compiler supports
Matrix = FloatMatrix | PackedMatrix | int4.AtenMatrix


class TritonOps:
    """See `backends.kernels.Ops`. ``processors``: of the device, for the shape of launches. ``race``: which of two layouts of a
    matrix is faster here (`triton_int4`); None: ours, always."""

    name = "triton"
    row_independent: int | None = FEW

    def __init__(self, dtype: torch.dtype, device: torch.device, processors: int, detail: str = "",
                 race: int4.Race | None = None) -> None:
        self.dtype = self.weight_dtype = dtype
        self.device, self.processors = device, processors
        self.weight_dtype = dtype
        own = str(dtype).removeprefix("torch.")
        self.detail = f"{detail or device.type}, {own}"
        self.kv_types = (own, *(kind for kind in ("bfloat16", "float16", "int8", "float32") if kind != own))
        self.notes: list[str] = []
        self._race = race

    # ------------------------------------------------------------------------------------------ matrices
    def pack(self, weight: QWeight | Tensor, bias: Tensor | None = None) -> Matrix:
        if not isinstance(weight, QWeight):
            return FloatMatrix(weight.to(self.device, self.dtype).contiguous(), bias_on(bias, self.device))
        ours = self._pack(weight, bias)
        return ours if self._race is None else self._race.faster(weight, ours, self._product, self._note)

    def pack_table(self, weight: QWeight | Tensor) -> FloatMatrix | PackedMatrix:
        """Ours always: ATen's layout has no rows to read."""
        return self._pack(weight, None) if isinstance(weight, QWeight) else self.pack(weight)

    def _pack(self, weight: QWeight, bias: Tensor | None) -> PackedMatrix:
        if weight.bits not in (4, 8):
            self._note(f"{weight.bits}-bit weights take {4 if weight.bits < 4 else 8} bits in memory")
        return pack(weight, bias, self.device)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def embed(self, table: FloatMatrix | PackedMatrix, ids: Tensor, scale: float = 1.0) -> Tensor:
        if isinstance(table, FloatMatrix):
            rows = table.weight[ids]
            return rows if scale == 1.0 else (rows.to(torch.float32) * scale).to(self.dtype)
        out = self._new(ids.shape[0], table.columns)
        lines.embed(table, ids, scale, out)
        return out

    def matmul(self, a: Tensor, w: Matrix) -> Tensor:
        out = self._new(a.shape[0], w.rows)
        self._product(a, w, Ending(out))
        return out

    def matmul_add(self, a: Tensor, w: Matrix, x: Tensor) -> None:
        self._product(a, w, Ending(x, add=True))

    def logits(self, a: Tensor, w: Matrix, softcap: float | None = None) -> Tensor:
        out = self._new(a.shape[0], w.rows, torch.float32)
        self._product(a, w, Ending(out, softcap=softcap))
        return out

    def _product(self, a: Tensor, w: Matrix, end: Ending) -> None:
        """Every product ends here; ``end.out`` is contiguous."""
        if a.shape[1] != w.columns:
            raise ValueError(f"rows of {a.shape[1]} do not fit a matrix of {w.columns} columns")
        if a.shape[0] == 0:
            return
        if isinstance(w, PackedMatrix):
            multiply_packed(a if w.feature is None else lines.gather(a, w.feature), w, end, self.processors)
        elif isinstance(w, FloatMatrix) and a.shape[0] <= FEW:
            multiply_float(a, w, end, self.processors)
        else:
            _finish(F.linear(a, w.weight) if isinstance(w, FloatMatrix) else w.product(a), w.bias, end)

    # ------------------------------------------------------------------------------------------ rows
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = self._new(*x.shape)
        lines.norm(x.contiguous(), weight, eps, out)
        return out

    def norm_add(self, y: Tensor, weight: Tensor, eps: float, x: Tensor) -> None:
        lines.norm(y.contiguous(), weight, eps, x, add=True)

    def act(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).contiguous()

    def glu(self, gate_up: Tensor, kind: str) -> Tensor:
        out = self._new(gate_up.shape[0], gate_up.shape[1] // 2)
        lines.glu(gate_up.contiguous(), kind, out)
        return out

    def attend(self, qkv: Tensor, spec: AttentionSpec, kv: KVLayer, batch: Batch) -> Tensor:
        return attention.attend(qkv.contiguous(), spec, kv, batch)

    def _new(self, rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(rows, width, dtype=dtype or self.dtype, device=self.device)

    # ------------------------------------------------------------------------------------------ recording
    def replay(self) -> Graphs | None:
        """For one decoder: its passes of few rows as one CUDA graph each."""
        return Graphs(CudaRecorder(), FEW, self._note) if self.device.type == "cuda" else None


def _finish(product: Tensor, bias: Tensor | None, end: Ending) -> None:
    """What the kernels do at the end of a product, for one that came from a library."""
    total = product.to(torch.float32)
    total = total if bias is None else total.add_(bias)
    total = total if end.softcap is None else end.softcap * torch.tanh(total / end.softcap)
    end.out.copy_(total.add_(end.out) if end.add else total)


def make(dtype: str, threads: int) -> TritonOps:
    """The target on the current CUDA device. Raises MissingRequirement where Triton does not support it or cannot build a
    kernel, InvalidRequest for a type that it cannot do. ``threads``: of no use here."""
    if dtype not in DTYPES:
        raise InvalidRequest(f"The Triton kernels do not know the type {dtype!r}.", field="dtype",
                             remedy=f"Use {', '.join(DTYPES)}.")
    if torch.version.hip:
        raise MissingRequirement("they are written for NVIDIA's devices, and this build of torch is for AMD's", kernels="triton")
    device = torch.device("cuda", torch.cuda.current_device())
    facts = torch.cuda.get_device_properties(device)
    if (facts.major, facts.minor) < CAPABILITY:
        raise MissingRequirement(f"{facts.name} has compute capability {facts.major}.{facts.minor}, Triton needs "
                                 f"{CAPABILITY[0]}.{CAPABILITY[1]}", kernels="triton")
    time = partial(int4.time_on_device, device)
    ops = TritonOps(DTYPES[dtype], device, facts.multi_processor_count, facts.name, int4.Race(DTYPES[dtype], time))
    try_out(ops)
    return ops


def try_out(ops: TritonOps) -> None:
    """One launch now, since Triton builds its launcher with the system's C compiler when it is first used."""
    try:
        found = ops.norm(torch.full((1, 16), 3.0, dtype=ops.dtype, device=ops.device), torch.ones(16, device=ops.device), 0.0)
        right = bool(torch.allclose(found.to(torch.float32), torch.ones(1, 16, device=ops.device), atol=1e-2))
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MissingRequirement(
            f"Triton could not build and run a first kernel: {reason}", kernels="triton",
            remedy="Install a C compiler and Python's headers (Debian and Ubuntu: build-essential, python3-dev).") from error
    if not right:
        raise MissingRequirement("a first Triton kernel gave wrong numbers on this device", kernels="triton")
