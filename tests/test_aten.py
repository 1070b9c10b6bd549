"""ATen's operators against the specification, and the choice of a target."""

from __future__ import annotations

import os

import pytest
import torch

from backends.base import InvalidRequest, LayerKV, MissingRequirement
from backends.engine.kv import PagedKV
from backends.kernels import select
from backends.kernels.aten import AtenOps, Float, Int4
from backends.kernels.ref import RefOps
from tests.test_ref_ops import KV_HEADS, VARIANTS, WIDTH, batch_of, qweight, spec_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted).norm() / wanted.norm())


def aten(dtype: torch.dtype = torch.float32) -> AtenOps:
    return AtenOps(dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize(("bits", "group", "perm"), [
    (4, 32, False), (4, 64, True), (4, 128, False), (3, 32, False), (2, 64, False)])
def test_int4_product(bits: int, group: int, perm: bool, zero: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(bits)
    weight, bias, x = qweight(80, 256, bits, group, zero=zero, perm=perm), torch.randn(80), torch.randn(9, 256)
    ops = aten(dtype)
    packed = ops.pack(weight, bias)
    assert isinstance(packed, Int4) and packed.nbytes < 80 * 256 * (4 + 64 / group + 1) / 8 + 8 * 256
    assert error(ops.matmul(x.to(dtype), packed), x @ weight.dequantize().T + bias) < TOLERANCE[dtype]
    assert bool(ops.notes) == (bits < 4)


@pytest.mark.parametrize(("bits", "group", "n", "word"), [
    (8, 32, 48, "8-bit"), (4, 16, 48, "groups of 16"), (4, 32, 40, "rows")])
def test_what_it_cannot_multiply_is_unpacked_and_said(bits: int, group: int, n: int, word: str) -> None:
    weight, x, ops = qweight(n, 64, bits, group, zero=True, perm=True), torch.randn(3, 64), aten()
    packed = ops.pack(weight)
    assert isinstance(packed, Float) and len(ops.notes) == 1 and word in ops.notes[0] and "float32" in ops.notes[0]
    torch.testing.assert_close(ops.matmul(x, packed), x @ weight.dequantize().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("perm", [True, False])
@pytest.mark.parametrize("how", ["pack", "pack_table"])
def test_rows_of_an_int4_table(how: str, perm: bool) -> None:
    weight, ops, ids = qweight(96, 64, 4, 32, zero=True, perm=perm), aten(), torch.tensor([95, 0, 7, 7])
    torch.testing.assert_close(ops.embed(getattr(ops, how)(weight), ids, 3.0), weight.dequantize()[ids] * 3)


@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("name", VARIANTS)
def test_attention(name: str, kind: str) -> None:
    torch.manual_seed(8)
    spec = spec_of(**VARIANTS[name])
    outs = []
    for ops in (RefOps(), aten()):
        torch.manual_seed(9)
        layer = PagedKV((LayerKV(spec.kv_heads, WIDTH, WIDTH),), 64, kind).layers[0]
        wide = (spec.heads + 2 * spec.kv_heads) * WIDTH
        full = batch_of([(0, 50), (0, 21), (0, 130)])
        ops.attend(torch.randn(201, wide), spec, layer, full)
        step = batch_of([(50, 1), (21, 5), (130, 1)])
        outs.append(ops.attend(torch.randn(7, wide), spec, layer, step))
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)


def test_half_precision_cache_and_rows() -> None:
    torch.manual_seed(10)
    ops, layer = aten(torch.bfloat16), PagedKV((LayerKV(KV_HEADS, WIDTH, WIDTH),), 64, "bfloat16").layers[0]
    spec = spec_of()
    rows = torch.randn(40, (spec.heads + 2 * KV_HEADS) * WIDTH)
    got = ops.attend(rows.bfloat16(), spec, layer, batch_of([(0, 40)]))
    exact = PagedKV((LayerKV(KV_HEADS, WIDTH, WIDTH),), 64, "float32").layers[0]
    wanted = RefOps().attend(rows, spec, exact, batch_of([(0, 40)]))
    assert got.dtype == torch.bfloat16 and error(got, wanted) < 1e-2


# ---------------------------------------------------------------------------------------------- the choice
@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_asked_for_by_name() -> None:
    ops, notes = select.choose("ref", "cpu", "auto", 1)
    assert (ops.name, ops.dtype, notes) == ("ref", torch.float32, ()) and torch.get_num_threads() == 1
    ops, _ = select.choose("aten", "cpu", "auto", 2)
    assert (ops.name, ops.dtype) == ("aten", torch.bfloat16) and torch.get_num_threads() == 2 and "2 threads" in ops.detail
    assert select.choose("aten", "cpu", "float16", 1)[0].dtype == torch.float16
    with pytest.raises(InvalidRequest):
        select.choose("fast", "cpu", "auto", 1)


def test_auto_passes_over_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    real = select._make

    def make(name: str, *rest):
        if name == "cpu":
            raise MissingRequirement("it needs a C++ compiler")
        return real(name, *rest)

    monkeypatch.setattr(select, "_make", make)
    ops, notes = select.choose("auto", "cpu", "auto", 1)
    assert ops.name == "aten" and notes == ("kernels cpu not used: it needs a C++ compiler",)
    assert select.choose("auto", "cpu", "float32", 1)[0].name == "ref"


def test_devices_that_are_not_there() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(MissingRequirement):
            select.choose("auto", "cuda", "auto", 1)
    with pytest.raises(InvalidRequest):
        select.choose("triton", "cpu", "auto", 1)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
def test_default_threads_follow_the_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert select.default_threads() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert 1 <= select.default_threads() <= len(allowed)
