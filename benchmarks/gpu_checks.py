"""Every op of the Triton target against the specification, on the device: what `benchmarks/gpu.py` runs first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from backends.base import LayerKV, Step
from backends.engine.kv import PAGE, PagedKV
from backends.kernels import AttentionSpec, Batch, QWeight
from backends.kernels.ref import ACTIVATIONS, RefOps, rms
from backends.kernels.triton import TritonOps
from backends.kernels.triton_matmul import FEW
from benchmarks.gpu_models import Format, make_decoder

BOUND = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 1e-5}


@dataclass(frozen=True)
class Check:
    """Relative distance to the specification and what is allowed; 0 allowed: the same bits."""

    name: str
    distance: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.distance <= self.allowed


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    wanted = wanted.double()
    distance = float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))
    return distance if distance == distance else float("inf")


def weight(n: int, k: int, bits: int, group: int, kind: str, device: torch.device) -> QWeight:
    groups = -(-k // group)
    draw = lambda high, *shape: torch.randint(0, high, shape, device=device)  # noqa: E731
    scale = torch.rand(n, groups, device=device).mul_(0.02).add_(0.01).half()
    zero = {"center": torch.full((n, groups), 2 ** (bits - 1), device=device), "zero": draw(2 ** bits, n, groups)}.get(kind)
    bias = torch.randn(n, groups, device=device).mul_(0.05) if kind == "bias" else None
    return QWeight(draw(2 ** bits, n, k).to(torch.uint8), scale, None if zero is None else zero.to(torch.int16), bias, bits, group,
                   torch.randperm(k, device=device) if kind == "zero" else None)


def products(ops: TritonOps) -> Iterator[Check]:
    for bits, group, kind, n, k in ((4, 128, "center", 512, 4096), (4, 32, "bias", 300, 1056), (4, 16, "zero", 96, 512),
                                    (8, 128, "center", 512, 2048), (8, 32, "zero", 100, 576), (4, 40, "zero", 64, 200)):
        w = weight(n, k, bits, group, kind, ops.device)
        packed, dense = ops.pack(w), w.dequantize().double()
        for rows in (1, 7, FEW, 50, 300):
            x = torch.randn(rows, k, device=ops.device, dtype=ops.dtype)
            out = ops.matmul(x, packed)
            yield Check(f"{bits}-bit group {group} {kind}, {rows} rows", apart(out, x.double() @ dense.T), BOUND[ops.dtype])
            if rows == FEW:
                alone = torch.cat([ops.matmul(x[i:i + 1].contiguous(), packed) for i in range(rows)])
                yield Check(f"{bits}-bit group {group} {kind}: alone and among {FEW}", float((alone != out).sum()), 0)
        ids = torch.tensor([0, n - 1], device=ops.device)
        yield Check(f"{bits}-bit group {group} {kind}: rows of a table", apart(ops.embed(ops.pack_table(w), ids), dense[ids]),
                    BOUND[ops.dtype])
    floats = ops.pack(torch.randn(500, 1000, device=ops.device))
    x = torch.randn(FEW, 1000, device=ops.device, dtype=ops.dtype)
    yield Check("float weights", apart(ops.matmul(x, floats), x.double() @ floats.weight.double().T), BOUND[ops.dtype])
    alone = torch.cat([ops.matmul(row[None].contiguous(), floats) for row in x])
    yield Check(f"float weights: alone and among {FEW}", float((alone != ops.matmul(x, floats)).sum()), 0)


def rows(ops: TritonOps) -> Iterator[Check]:
    x, w = torch.randn(9, 4096, device=ops.device, dtype=ops.dtype), torch.rand(4096, device=ops.device)
    yield Check("norm", apart(ops.norm(x, w, 1e-5), rms(x, w, 1e-5)), BOUND[ops.dtype])
    for kind, function in ACTIVATIONS.items():
        gate, up = x.double().chunk(2, -1)
        yield Check(kind, apart(ops.glu(x, kind), function(gate) * up), BOUND[ops.dtype])


def batch_of(sequences: list[tuple[int, int]], half: int, device: torch.device) -> Batch:
    """Sequences of (tokens there, rows now); pages from the top down."""
    counts = torch.tensor([rows for _, rows in sequences])
    lengths = torch.tensor([before + rows for before, rows in sequences], dtype=torch.int32)
    used = -(-int(lengths.max()) // PAGE)
    pages = torch.arange(len(sequences) * used - 1, -1, -1, dtype=torch.int32).view(len(sequences), used)
    positions = torch.cat([torch.arange(before, before + rows) for before, rows in sequences])
    owner = torch.repeat_interleave(torch.arange(len(sequences)), counts)
    slots = pages[owner, positions // PAGE].long() * PAGE + positions % PAGE
    angle = positions[None, :, None] / 10000 ** (torch.arange(half) / half)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32)
    return Batch(*(t.to(device) for t in (torch.zeros_like(positions), positions, starts, lengths, pages, slots, positions[:0],
                                          angle.cos().float(), angle.sin().float())))


def attention(ops: TritonOps) -> Iterator[Check]:
    ref = RefOps(torch.float32, ops.device)
    for heads, kv_heads, width, window, cap in ((32, 8, 128, None, None), (9, 3, 64, 200, None), (8, 4, 256, None, 50.0)):
        spec = AttentionSpec(0, heads, kv_heads, width, width ** -0.5, window, cap, 0)
        for kind in ops.kv_types[:1] + ("int8",):
            layers = [PagedKV((LayerKV(kv_heads, width, width),), 512, kind, ops.device).layers[0] for _ in range(2)]
            for sequences in ([(0, 700), (0, 33)], [(700, 1), (33, 1)], [(701, 3), (34, 5)], [(704, 40), (39, 200)]):
                # the page table must stay the same from pass to pass
                batch = batch_of(sequences, width // 2, ops.device)
                batch.pages = torch.arange(128, device=ops.device, dtype=torch.int32).view(2, 64).contiguous()
                owner = torch.repeat_interleave(torch.arange(2, device=ops.device), (batch.starts[1:] - batch.starts[:-1]).long())
                batch.slots = batch.pages[owner, batch.positions // PAGE].long() * PAGE + batch.positions % PAGE
                x = torch.randn(len(batch.ids), (heads + 2 * kv_heads) * width, device=ops.device, dtype=ops.dtype)
                found, wanted = ops.attend(x, spec, layers[0], batch), ref.attend(x.float(), spec, layers[1], batch)
                yield Check(f"attention {heads}/{kv_heads} heads of {width}, {kind}, {len(batch.ids)} rows", apart(found, wanted),
                            2 * BOUND[ops.dtype])


def passes(ops: TritonOps, count: int = 24) -> Iterator[Check]:
    """A whole decoder: recorded passes against ordinary ones, a sequence alone and among others."""
    decoder, _ = make_decoder("tiny", Format("4 bits", 4, 32), ops, 4096, ops.kv_types[0])
    prompts = [[5 + i, 9, 2 * i + 1] * (1 + i // 2) for i in range(3)]        # 12 rows: few enough to be alike
    together = _greedy(decoder, prompts, count)
    alone = [_greedy(decoder, [prompt], count)[0] for prompt in prompts]
    yield Check("recorded passes: three sequences together and alone", float(together != alone), 0)
    yield Check("passes that could not be recorded", float(any("CUDA graphs" in note for note in ops.notes)), 0)


def _greedy(decoder, prompts: list[list[int]], count: int) -> list[list[int]]:
    slots, feeds, texts = [decoder.open(p, reuse=False) for p in prompts], list(prompts), [[] for _ in prompts]
    for _ in range(count):
        for slot, feed in zip(slots, feeds):
            decoder.reserve(slot, len(feed))
        found = decoder.extend([Step(slot, feed, 1) for slot, feed in zip(slots, feeds)])
        feeds = [[int(row[-1].argmax())] for row in found]
        for text, feed in zip(texts, feeds):
            text += feed
    for slot in slots:
        decoder.release(slot)
    return texts


def all_checks(ops: TritonOps, whole: bool) -> Iterator[Check]:
    """``whole`` False: what costs little compiling."""
    for part in (products, rows, attention, passes) if whole else (rows, passes):
        yield from part(ops)
