"""The Triton target's kernels, computed by Triton's interpreter on the CPU. Run by tests/test_triton.py in a process of its own,
since the interpreter has to be chosen before Triton is imported. Fresh random input each time, outputs poisoned."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from backends.base import LayerKV
from backends.engine.kv import PagedKV
from backends.kernels import AttentionSpec, KVLayer
from backends.kernels.ref import ACTIVATIONS, RefOps, rms
from backends.kernels.triton import TritonOps
from backends.kernels.triton_graphs import Graphs
from backends.kernels.triton_matmul import Tile, Ending, multiply_packed, splits_for
from tests.test_ref_ops import batch_of, qweight
from tests.triton_fakes import FakeRecorder

CLOSE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    torch.manual_seed(seed)
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **kind: poisoned(plain(*shape, **kind)))
    monkeypatch.setattr(torch, "empty_like", lambda like, **kind: poisoned(plain(like.shape, dtype=like.dtype)))


@pytest.fixture
def rows_by_themselves(monkeypatch):
    """The interpreter's products are a BLAS's, which may add up a row by its place in a tile; here each row is one product."""
    def dot(self, a, b, d, *_):
        return interpreter.TensorHandle(np.stack([np.matmul(row, b.data, dtype=d.data.dtype) for row in a.data]) + d.data, d.dtype.scalar)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


def make(dtype=torch.float32, processors=2) -> TritonOps:
    return TritonOps(dtype, torch.device("cpu"), processors)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


# ---------------------------------------------------------------------------------------------- matrices
KINDS = [(40, 128, 4, 32, True, False), (33, 100, 4, 16, False, True), (48, 128, 8, 64, True, False), (20, 70, 4, 40, False, False),
         (17, 150, 3, 1024, True, True), (66, 256, 4, 128, True, False), (18, 96, 8, 16, False, False), (16, 65, 5, 32, True, False)]


@pytest.mark.parametrize(("n", "k", "bits", "group", "zero", "perm", "dtype"), [
    (*KINDS[0], torch.float32), (*KINDS[1], torch.bfloat16), (*KINDS[2], torch.float16), (*KINDS[3], torch.float32),
    (*KINDS[5], torch.bfloat16), (*KINDS[7], torch.float32),
    *(pytest.param(*kind, dtype, marks=pytest.mark.slow) for kind in KINDS for dtype in CLOSE)])
def test_packed_product(n, k, bits, group, zero, perm, dtype):
    ops, w, bias = make(dtype), qweight(n, k, bits, group, zero=zero, perm=perm), torch.randn(n)
    packed, dense = ops.pack(w, bias), w.dequantize().double()
    x = torch.randn(19, k).to(dtype)
    wanted = x.double() @ dense.T + bias.double()
    assert apart(ops.matmul(x[:3], packed), wanted[:3]) < CLOSE[dtype]
    assert apart(ops.matmul(x, packed), wanted) < CLOSE[dtype]
    stream = torch.ones(3, n, dtype=dtype)
    ops.matmul_add(x[:3], packed, stream)
    assert apart(stream, wanted[:3] + 1) < CLOSE[dtype]
    assert apart(ops.logits(x[:2], packed, 5.0), 5 * torch.tanh(wanted[:2] / 5)) < 2e-6       # float32 whatever the type
    ids = torch.tensor([0, n - 1, 3])
    assert apart(ops.embed(packed, ids, 3.0), dense[ids] * 3) < CLOSE[dtype]
    assert bool(ops.notes) == (bits in (3, 5))


def test_codes_are_exact_and_nan_is_not_swallowed():
    for bits, dtype in ((4, torch.bfloat16), (8, torch.bfloat16), (8, torch.float16)):
        w = qweight(20, 64, bits, 32, zero=True)
        w.scale, w.zero = torch.ones_like(w.scale), torch.randint(0, 2**bits + 1, w.zero.shape, dtype=torch.int16)
        ops = make(dtype)
        eye, packed = torch.eye(64)[:8].to(dtype), ops.pack(w)
        assert torch.equal(ops.logits(eye, packed), w.dequantize().T[:8])
        eye[3, 40] = torch.nan
        found = ops.logits(eye, packed)
        assert found[3].isnan().all() and found[[0, 1, 2, 4]].isfinite().all()


def test_constant_zeros_take_no_memory():
    w, ops = qweight(32, 128, 4, 32, zero=True), make()
    w.zero = torch.full_like(w.zero, 8)
    packed = ops.pack(w)
    assert packed.offset is None and packed.nbytes == 32 * (128 / 2 + 4 * 2)
    x = torch.randn(2, 128)
    assert apart(ops.matmul(x, packed), x @ w.dequantize().T) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float_product(dtype):
    ops, w, bias = make(dtype), torch.randn(50, 203).to(dtype), torch.randn(50)
    packed = ops.pack(w, bias)
    for rows in (3, 20):
        x = torch.randn(rows, 203).to(dtype)
        assert apart(ops.matmul(x, packed), x.double() @ w.double().T + bias.double()) < CLOSE[dtype]
    assert apart(ops.embed(packed, torch.tensor([1, 49]), 2.0), w[[1, 49]].double() * 2) < CLOSE[dtype]


@pytest.mark.usefixtures("rows_by_themselves")
def test_splits_change_no_row_among_others():
    """Wide enough to be split among programs; 1 to 16 rows give the bits that they give together."""
    ops = make(torch.bfloat16, processors=4)
    for packed, k in ((ops.pack(qweight(20, 1088, 4, 64, zero=False)), 1088), (ops.pack(torch.randn(20, 1100)), 1100)):
        assert splits_for(20, packed.steps if hasattr(packed, "steps") else 18, 4) > 1
        x = torch.randn(16, k).bfloat16()
        whole = ops.matmul(x, packed)
        for count in (1, 7):
            start = int(torch.randint(0, 16 - count, ()))
            assert torch.equal(ops.matmul(x[start:start + count].clone(), packed), whole[start:start + count])


def test_tiles_of_other_shapes_give_the_same():
    ops, w, x = make(), qweight(50, 192, 4, 32, zero=True), torch.randn(5, 192)
    packed, wanted = ops.pack(w), x @ w.dequantize().T
    for tile in (Tile(16, 32, 4, 2), Tile(128, 16, 4, 2)):
        out = torch.empty(5, 50)
        multiply_packed(x, packed, Ending(out), 2, tile)
        assert apart(out, wanted) < 2e-6


# ---------------------------------------------------------------------------------------------- rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows(dtype):
    ops, x, weight = make(dtype), (torch.randn(3, 100) * 3).to(dtype), torch.randn(100)
    exact = rms(x, weight, 1e-5)
    assert apart(ops.norm(x, weight, 1e-5), exact) < CLOSE[dtype]
    stream = x.clone()
    ops.norm_add(x, weight, 1e-5, stream)
    assert apart(stream, x.float() + exact) < CLOSE[dtype]
    both = (torch.randn(2, 140) * 4).to(dtype)
    for kind, function in ACTIVATIONS.items():
        assert apart(ops.glu(both, kind), function(both[:, :70].double()) * both[:, 70:].double()) < CLOSE[dtype]


# ---------------------------------------------------------------------------------------------- attention
CASES = {"grouped": {}, "window": {"window": 7}, "wide window": {"window": 140}, "softcap": {"softcap": 1.5},
         "no rotation": {"rope": None}, "head norms": {"q_norm": torch.rand(24) + .5, "k_norm": torch.rand(24) + .5},
         "three queries": {"heads": 3, "kv_heads": 1}, "one query": {"heads": 2, "kv_heads": 2}}


def spec_of(**changes) -> AttentionSpec:
    return AttentionSpec(**{"layer": 0, "heads": 4, "kv_heads": 1, "head_dim": 24, "scale": .3} | changes)


def pages(spec: AttentionSpec, kind: str) -> KVLayer:
    layer = PagedKV((LayerKV(spec.kv_heads, 24, 24),), 64, kind).layers[0]
    for tensor in (layer.k, layer.v, layer.k_scale, layer.k_low, layer.v_scale, layer.v_low):
        if tensor is not None:
            poisoned(tensor)
    return layer


def filled(spec: AttentionSpec, kind: str, batch) -> tuple[KVLayer, KVLayer]:
    """The same history in two caches, written by the specification."""
    rows = torch.randn(len(batch.ids), (spec.heads + 2 * spec.kv_heads) * 24)
    both = pages(spec, kind), pages(spec, kind)
    for layer in both:
        RefOps().attend(rows, spec, layer, batch)
    return both


@pytest.mark.parametrize(("name", "kind"), [
    ("grouped", "int8"), ("wide window", "float32"), ("softcap", "float32"), ("head norms", "bfloat16"), ("three queries", "int8"),
    *(pytest.param(name, kind, marks=pytest.mark.slow) for name in CASES for kind in ("float32", "bfloat16", "int8"))])
def test_attention(name, kind):
    """A long history and a short one, then one token, and a few, and a prompt; each as the specification has it."""
    spec = spec_of(**CASES[name])
    ours, theirs = filled(spec, kind, batch_of([(0, 150), (0, 3)]))
    for batch in (batch_of([(150, 2), (3, 1)]), batch_of([(152, 1), (4, 16)])):
        x = torch.randn(len(batch.ids), (spec.heads + 2 * spec.kv_heads) * 24)
        found, wanted = make().attend(x, spec, ours, batch), RefOps().attend(x, spec, theirs, batch)
        assert apart(found, wanted) < (CLOSE[torch.bfloat16] if kind == "bfloat16" else 1e-5)   # it cuts off what a GPU rounds
    for a, b in ((ours.k, theirs.k), (ours.v, theirs.v)):
        a, b = a.float().nan_to_num(), b.float().nan_to_num()
        assert torch.allclose(a, b, rtol=2**-7, atol=1 if kind == "int8" else 1e-6)


def test_half_precision_attention():
    for dtype in (torch.float16, torch.bfloat16):
        spec, kind = spec_of(), str(dtype).removeprefix("torch.")
        ours, theirs = filled(spec, kind, batch_of([(0, 40)]))
        batch, x = batch_of([(40, 1)]), torch.randn(1, 6 * 24).to(dtype)
        assert apart(make(dtype).attend(x, spec, ours, batch), RefOps().attend(x.float(), spec, theirs, batch)) < CLOSE[dtype]


@pytest.mark.usefixtures("rows_by_themselves")
def test_attention_of_a_row_alone_and_among_others():
    for changes in ({}, {"window": 40}):
        spec = spec_of(**changes)
        layer, _ = filled(spec, "float32", batch_of([(0, 150), (0, 28), (0, 3)]))
        x = torch.randn(6, 6 * 24)
        together = batch_of([(150, 1), (28, 4), (3, 1)])
        whole = make().attend(x, spec, layer, together)
        assert whole.isfinite().all()
        rows = 0
        for s, (before, count) in enumerate([(150, 1), (28, 4), (3, 1)]):
            for i in range(count):
                alone = batch_of([(before + i, 1)])
                alone.pages, alone.slots = together.pages[s:s + 1], together.slots[rows:rows + 1]
                assert torch.equal(make().attend(x[rows:rows + 1], spec, layer, alone)[0], whole[rows])
                rows += 1


# ---------------------------------------------------------------------------------------------- recorded passes
def test_padding_of_a_recorded_pass_changes_nothing():
    """Three sequences in a bucket of four: a pass of attention and a product, replayed, equals the ordinary one bit for bit,
    and writes to no page that is not its own."""
    ops, spec = make(), spec_of()
    w, out = ops.pack(qweight(6 * 24, 32, 4, 32, zero=True)), ops.pack(qweight(32, 4 * 24, 4, 32, zero=True))
    table, join, ones = ops.pack_table(qweight(50, 32, 8, 32, zero=True)), ops.pack(torch.randn(32, 32)), torch.ones(32)

    def forward(batch, kv):
        x = ops.embed(table, batch.ids)
        ops.matmul_add(ops.norm(batch.states, ones, 1e-5), join, x)
        ops.matmul_add(ops.attend(ops.matmul(x, w), spec, kv[0], batch), out, x)
        return x

    history = batch_of([(0, 20), (0, 9), (0, 33)])
    (layer, other), notes = filled(spec, "float32", history), []
    graphs, kv, plain = Graphs(FakeRecorder(), 16, notes.append), [layer], [other]
    for step in range(4):
        batch = batch_of([(20 + step, 1), (9 + step, 1), (33 + step, 1)])
        batch.ids, batch.states = torch.randint(0, 50, batch.ids.shape), torch.randn(len(batch.ids), 32)
        batch.cos = batch.sin = torch.ones(1, len(batch.ids), 3)
        assert torch.equal(graphs.run(forward, batch, kv), forward(batch, plain))
        assert torch.equal(layer.k.nan_to_num(), other.k.nan_to_num()) and torch.equal(layer.v.nan_to_num(), other.v.nan_to_num())
    assert graphs.replays(batch) and not notes
