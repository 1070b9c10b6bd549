"""Native CPU kernels: every op against float64 or `ref` on fresh random input, outputs poisoned, on each instruction set."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from backends import gguf_file
from backends.base import Sampling
from backends.engine import sampler
from backends.errors import MissingRequirement
from backends.kernels import AttentionSpec, Batch, KVLayer, QWeight, cpu, native_abi, native_build, ref

EVEX = ("-mavx2", "-mfma", "-mf16c", "-mavx512vl", "-mavx512vnni", "-DGAINZ_EVEX")     # AVX-512VL's form of AVX-VNNI


def library(isa: str):
    if isa == "avxvnni" and "avx_vnni" not in native_build.features():
        if "avx512" not in native_build.usable():
            pytest.skip("neither AVX-VNNI nor AVX-512 VNNI here")
        return native_build.library(isa, flags=EVEX)
    if isa not in native_build.usable():
        pytest.skip(f"no {isa} here")
    return native_build.library(isa)


# With BF16 or without it, AVX-512 differs in products with float matrices alone: only those are tested on both.
BEST = "avx512bf16" if "avx512bf16" in native_build.usable() else "avx512"
OTHERS = ("avxvnni", "avx2", "neon", "portable")


@pytest.fixture(scope="session", params=[BEST, *OTHERS])
def context(request):
    return native_abi.Context(library(request.param), 2)


@pytest.fixture(scope="session", params=["avx512bf16", "avx512", *OTHERS])
def float_context(request):
    return native_abi.Context(library(request.param), 2)


@pytest.fixture
def ops(context):
    return cpu.CpuOps(None, context, 2)


@pytest.fixture
def rng():
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)                                        # shown when a test fails
    return torch.Generator().manual_seed(seed)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)).item()


def weight(rng, n, k, bits, group, kind, *, perm=False, wide=False) -> QWeight:
    groups = -(-k // group)
    scale = torch.rand(n, groups, generator=rng) * 0.02 + 0.001
    number = scale if wide else scale.half()
    zero = bias = None
    if kind == "center":
        zero = torch.full((n, groups), 2 ** (bits - 1), dtype=torch.uint8)
    elif kind == "zero":
        zero = torch.randint(0, 2**bits, (n, groups), generator=rng, dtype=torch.int16)
    else:
        bias = (torch.randn(n, groups, generator=rng) * 0.05).to(number.dtype)
    codes = torch.randint(0, 2**bits, (n, k), generator=rng, dtype=torch.uint8)
    return QWeight(codes, number, zero, bias, bits, group, torch.randperm(k, generator=rng) if perm else None)


def in_eight_bits(x: torch.Tensor) -> torch.Tensor:
    """What the activations become: codes round(x * 127 / max|x|) with a scale for each 32 columns."""
    rows, k = x.shape
    blocks = torch.nn.functional.pad(x, (0, -k % 32)).view(rows, -1, 32)
    most = blocks.abs().amax(-1, keepdim=True)
    return ((blocks * (torch.full_like(most, 127.0) / most)).round().double() * (most / 127).double()).view(rows, -1)[:, :k]


def test_contexts_share_their_threads_and_may_be_used_at_the_same_time(context, rng):
    """One model loads while another answers; and two callers of one pool take turns."""
    path = context.path if hasattr(context, "path") else None
    if path is None or not path.exists():
        pytest.skip("an emulated processor")
    others = [native_abi.Context(path, 2) for _ in range(2)]
    assert others[0]._pool is others[1]._pool and native_abi.Context(path, 1)._pool is not others[0]._pool
    x, weights = torch.randn(5, 96, generator=rng), [torch.randn(320, 96, generator=rng) for _ in others]

    def work(which: int) -> list[torch.Tensor]:
        ops = cpu.CpuOps(torch.float32, others[which], 2)
        packed = ops.pack(weights[which])
        return [ops.matmul(ops.act(x), packed).clone() for _ in range(200)]

    with ThreadPoolExecutor(2) as threads:
        for found, w in zip(threads.map(work, range(2)), weights):
            assert all(torch.equal(one, found[0]) for one in found) and error(found[0], x.double() @ w.double().T) < 1e-6
    pools = len(native_abi._pools)
    single = native_abi.Context(path, 3)
    assert len(native_abi._pools) == pools + 1
    del single
    assert len(native_abi._pools) == pools


# ---------------------------------------------------------------------------------------------- matrices
@pytest.mark.parametrize("kind", ["center", "zero", "bias"])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 1024])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_quantized_product(ops, rng, bits, group, kind):
    for n, k, wide in ((48, 256, False), (50, 208, False), (33, 100, False), (17, 320, True)):
        w = weight(rng, n, k, bits, min(group, k), kind, wide=wide)
        bias = torch.randn(n, generator=rng) if n == 50 else None
        x = torch.randn(11, k, generator=rng)
        packed = ops.pack(w, bias)
        exact = in_eight_bits(x) @ w.dequantize().double().T + (0 if bias is None else bias.double())
        found = ops.matmul(ops.act(x), packed)
        assert found.shape == (11, n)
        assert error(found, exact) < (5e-4 if wide else 5e-6)   # wide: scales not of float16 are rounded to it
        stream = torch.ones(11, n)
        ops.matmul_add(ops.act(x), packed, stream)
        assert error(stream, exact + 1) < (5e-4 if wide else 5e-6)


@pytest.mark.parametrize("bits, group, kind, perm, n, k", [
    (4, 32, "bias", False, 50, 224), (4, 64, "center", False, 33, 576), (3, 16, "zero", False, 16, 112),
    (4, 24, "zero", True, 35, 120), (8, 32, "center", False, 83, 288), (6, 16, "center", False, 17, 64),
    (8, 128, "bias", False, 40, 100)])
def test_activations_in_float32(context, rng, bits, group, kind, perm, n, k):
    ops = cpu.CpuOps(None, context, 2, eight_bits=False)
    w, bias = weight(rng, n, k, bits, group, kind, perm=perm), torch.randn(n, generator=rng)
    x, packed = torch.randn(9, k, generator=rng), ops.pack(w, bias)
    ops.matmul(ops.act(x), packed).fill_(torch.nan)            # the workspace that the next product fills
    whole = ops.matmul(ops.act(x), packed).clone()
    assert error(whole, x.double() @ w.dequantize().double().T + bias.double()) < 1e-6
    for count in (1, 2, 3, 5):
        assert torch.equal(ops.matmul(ops.act(x[3:3 + count].clone()), packed), whole[3:3 + count])
    assert ops.detail.endswith("activations in float32")


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_codes_are_exact(ops, rng, bits):
    """Integers all through: nothing may be lost when a width is stored in the next one."""
    w = QWeight(torch.randint(0, 2**bits, (40, 96), generator=rng, dtype=torch.uint8), torch.ones(40, 3),
                torch.full((40, 3), 2 ** (bits - 1), dtype=torch.uint8), None, bits, 32)
    x = torch.randint(-127, 128, (13, 96), generator=rng).float()
    x[:, ::32] = 127.0
    x[4:9] = 127.0                                             # the largest sums there are
    w.codes[7:21] = 2**bits - 1
    assert torch.equal(ops.matmul(ops.act(x), ops.pack(w)).double(), x.double() @ w.dequantize().double().T)


@pytest.mark.parametrize("group", [8, 24, 40, 32])
def test_act_order_and_odd_groups_are_gathered(ops, rng, group):
    w = weight(rng, 35, 120, 4, group, "zero", perm=True)
    x = torch.randn(6, 120, generator=rng)
    packed = ops.pack(w)
    assert error(ops.matmul(ops.act(x), packed), x.double() @ w.dequantize().double().T) < 0.02
    ids = torch.tensor([0, 34, 17, 0])
    assert error(ops.embed(packed, ids, 3.0), w.dequantize()[ids] * 3) < 1e-6


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_stored_blocks_are_laid_out_as_their_codes_would_be(ops, rng, kind):
    from backends.engine import gguf_blocks
    weights, size = {title: (count, width) for title, count, width in gguf_file.TYPES.values()}[kind]
    for n, k, top in ((48, 512, 0x3b), (35, 256, 0x3b), (1, 768, 0x03)):
        raw = torch.randint(0, 256, (n, k // weights, size), generator=rng, dtype=torch.uint8)
        for place in {"Q6_K": (209,), "Q4_0": (1,), "Q8_0": (1,)}.get(kind, (1, 3)):
            raw[..., place] &= top                             # numbers are finite; with 0x03 too small for float16's products
        rows, bias = raw.view(n, -1), torch.randn(n, generator=rng)
        x, codes = torch.randn(5, k, generator=rng), gguf_blocks.unpack(kind, rows.numpy(), size)
        wanted = ops.matmul(ops.act(x), ops.pack(codes, bias)).clone()
        whole = gguf_blocks.stored(kind, rows, k, size)
        assert whole.shape == codes.shape and torch.equal(whole.dequantize(), codes.dequantize())
        assert torch.equal(ops.matmul(ops.act(x), ops.pack(whole, bias)), wanted)
        halves = [gguf_blocks.stored(kind, part, k, size) for part in (rows[:n // 2], rows[n // 2:])]
        assert torch.equal(ops.matmul(ops.act(x), ops.pack(QWeight.cat(halves), bias)), wanted)


def test_extreme_scales_and_zeros(ops, rng):
    tiny = weight(rng, 16, 64, 4, 32, "center")
    tiny.scale = tiny.scale.float() * 1e-6                     # below float16's normal range: kept in float32
    odd = weight(rng, 16, 64, 8, 32, "zero")
    odd.zero = torch.full((16, 2), 256, dtype=torch.int16)     # a stored 255 plus one: no byte holds it
    x = torch.randn(3, 64, generator=rng)
    for w in (tiny, odd):
        assert error(ops.matmul(ops.act(x), ops.pack(w)), in_eight_bits(x) @ w.dequantize().double().T) < 1e-5


FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def as_met(context, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a float matrix of ``dtype`` meets: the rows themselves, or rounded where the processor multiplies bfloat16."""
    return x.to(dtype).double() if dtype == torch.bfloat16 and context.isa == "avx512-bf16" else x.double()


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_product(float_context, rng, dtype):
    ops = cpu.CpuOps(dtype, float_context, 2)
    for n, k in ((48, 256), (50, 203), (33, 100), (5, 15), (200, 1500), (1, 1), (17, 2049)):
        w, bias = torch.randn(n, k, generator=rng).to(dtype), torch.randn(n, generator=rng)
        packed = ops.pack(w, bias if n != 17 else None)
        for rows in (16, 109):                                 # 109: a band of its own, and tiles of every height
            x = torch.randn(rows, k, generator=rng)
            exact = as_met(float_context, x, dtype) @ w.double().T + (bias.double() if n != 17 else 0)
            ops.matmul(ops.act(x), packed).fill_(torch.nan)    # the workspace that comes next
            assert error(ops.matmul(ops.act(x), packed), exact) < 1e-6
            stream = torch.ones(rows, n)
            ops.matmul_add(ops.act(x), packed, stream)
            assert error(stream, exact + 1) < 1e-6
        assert torch.equal(ops.embed(packed, torch.tensor([0, n - 1]), 2.0), w[[0, n - 1]].float() * 2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_float_row_does_not_see_its_neighbours(float_context, rng, dtype):
    ops = cpu.CpuOps(dtype, float_context, 2)
    for n, k in ((83, 576), (300, 1100)):
        packed = ops.pack(torch.randn(n, k, generator=rng), torch.randn(n, generator=rng))
        x = torch.randn(230, k, generator=rng)
        whole = ops.matmul(ops.act(x), packed).clone()
        for count in (*range(1, 19), 40, 97, 129):
            start = int(torch.randint(0, 230 - count, (1,), generator=rng))
            assert torch.equal(ops.matmul(ops.act(x[start:start + count].clone()), packed),
                               whole[start:start + count]), count


@pytest.mark.parametrize("dtype", FLOATS)
def test_threads_do_not_change_float_bits(float_context, rng, dtype):
    w, x = torch.randn(500, 300, generator=rng), torch.randn(120, 300, generator=rng)
    found = []
    for threads in (1, 3):
        ops = cpu.CpuOps(dtype, native_abi.Context(float_context.path, threads), threads)
        found.append(ops.matmul(ops.act(x), ops.pack(w)).clone())
    assert torch.equal(*found)


def test_nan_and_infinity_pass_a_float_product(float_context, rng):
    for dtype in FLOATS:
        ops, x = cpu.CpuOps(dtype, float_context, 2), torch.randn(20, 64, generator=rng)
        x[1, 3], x[7, 9] = torch.nan, torch.inf
        found = ops.matmul(ops.act(x), ops.pack(torch.randn(20, 64, generator=rng)))
        assert found[1].isnan().all() and not found[7].isfinite().any()
        assert found[[i for i in range(20) if i not in (1, 7)]].isfinite().all()


def test_a_row_does_not_see_its_neighbours(ops, rng):
    for bits, group, kind, k in ((4, 32, "bias", 224), (4, 64, "center", 576), (4, 16, "zero", 96), (8, 32, "center", 288),
                                 (6, 16, "center", 64)):
        packed = ops.pack(weight(rng, 83, k, bits, group, kind))
        x = torch.randn(300, k, generator=rng)
        whole = ops.matmul(ops.act(x), packed).clone()
        for count in (*range(1, 17), 40, 129):
            start = int(torch.randint(0, 300 - count, (1,), generator=rng))
            assert torch.equal(ops.matmul(ops.act(x[start:start + count].clone()), packed),
                               whole[start:start + count]), count


@pytest.mark.parametrize("bits, group, kind, perm, inner", [
    (4, 32, "bias", False, 96), (4, 64, "center", False, 160), (8, 32, "center", True, 64), (6, 16, "center", False, 32),
    (4, 32, "zero", False, 40), (0, 0, "float", False, 64)])
def test_a_gated_product_is_the_product_and_its_activation(ops, rng, bits, group, kind, perm, inner):
    w = weight(rng, 2 * inner, 128, bits, group, kind, perm=perm) if bits else torch.randn(2 * inner, 128, generator=rng)
    both, down = ops.pack(w, torch.randn(2 * inner, generator=rng)), ops.pack(weight(rng, 20, inner, 4, 32, "center"))
    for rows in (1, 2, 7, 8, 13, 17, 131):
        x = ops.act(torch.randn(rows, 128, generator=rng))
        apart = ops.glu(ops.matmul(x, both), "silu")
        floats, product = apart.floats.clone(), ops.matmul(apart, down).clone()
        ops.glu(torch.full((rows, 2 * inner), torch.nan), "silu")                  # the workspace that both fill
        found = ops.gated(x, both, "silu")
        assert torch.equal(found.floats, floats) and torch.equal(ops.matmul(found, down), product), rows


def test_threads_do_not_change_bits(context, ops, rng):
    w, x = weight(rng, 500, 256, 4, 32, "center"), torch.randn(9, 256, generator=rng)
    wanted = ops.matmul(ops.act(x), ops.pack(w)).clone()
    for threads in (1, 3, 5):
        other = cpu.CpuOps(None, native_abi.Context(context.path, threads), threads)
        for _ in range(50):                                    # late wakers, many short jobs
            assert torch.equal(other.matmul(other.act(x), other.pack(w)), wanted)


# ---------------------------------------------------------------------------------------------- rows
@pytest.mark.parametrize("width", [576, 100, 33, 7])
def test_rows(ops, rng, width):
    x, w = torch.randn(5, width, generator=rng) * 3, torch.randn(width, generator=rng)
    exact = ref.rms(x.double(), w.double(), 1e-5)
    assert error(ops.norm(x, w, 1e-5).floats, exact) < 1e-6
    stream = x.clone()
    ops.norm_add(x, w, 1e-5, stream)
    assert error(stream, x + exact) < 1e-6
    both = torch.randn(5, 2 * width, generator=rng) * 5
    for kind, function in ref.ACTIVATIONS.items():
        assert error(ops.glu(both, kind).floats, function(both[:, :width].double()) * both[:, width:]) < 2e-6


def test_logits_with_softcap(ops, rng):
    w, x = weight(rng, 70, 64, 4, 32, "center"), torch.randn(3, 64, generator=rng) * 100
    plain = in_eight_bits(x) @ w.dequantize().double().T
    assert error(ops.logits(ops.act(x), ops.pack(w), 5.0), 5 * torch.tanh(plain / 5)) < 1e-5


def test_nan_is_not_swallowed(ops, rng):
    w, x = ops.pack(weight(rng, 20, 96, 4, 32, "center")), torch.randn(3, 96, generator=rng)
    x[1, 70] = torch.nan
    found = ops.matmul(ops.act(x), w)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


def test_denormals_stay(ops):
    ops.act(torch.ones(1, 32))
    assert (torch.tensor([1e-40]) * 1.0).item() > 0
    assert not any("fast-math" in flag for flag in native_build.COMMON)


# ---------------------------------------------------------------------------------------------- attention
def pages(dtype: torch.dtype, heads: int, width: int, count: int) -> KVLayer:
    """Poisoned: what nobody wrote must not matter."""
    shape = (count, heads, 16, width)
    if dtype == torch.uint8:
        return KVLayer(*(torch.full(shape, 255, dtype=dtype) for _ in range(2)),
                       *(torch.full(shape[:3], torch.nan) for _ in range(4)))
    return KVLayer(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))


def batch(before, counts, tables, half) -> Batch:
    positions = torch.cat([torch.arange(b, b + c) for b, c in zip(before, counts)])
    sequence = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    lengths = torch.tensor([b + c for b, c in zip(before, counts)], dtype=torch.int32)
    used = -(-int(lengths.max()) // 16)
    angle = positions[:, None] / 10000 ** (torch.arange(half) / half)
    return Batch(torch.zeros_like(positions), positions, starts, lengths, tables[:, :used].contiguous(),
                 tables[sequence, positions // 16].long() * 16 + positions % 16, torch.arange(len(positions)),
                 angle.cos()[None].contiguous(), angle.sin()[None].contiguous())


SHAPES = [  # heads, kv_heads, head_dim, rotated, window, softcap, head norms
    (9, 3, 64, 64, None, None, False), (4, 4, 32, 32, 20, None, True), (8, 2, 80, 40, 130, 30.0, True), (6, 1, 20, 20, None,
        None, False),
    (2, 2, 256, 64, 140, 50.0, False)]


def specified(x, spec, kv, given, paired):
    """What `ref` gives; where keys are in 8 bits, so are the queries: codes round(127 q / max|q|), a scale a row and head.
    ``paired``: queries, keys and values are rounded to bfloat16 (scores are powers of two, of queries scaled before)."""
    q = ref.place(x, spec, kv, given)
    if kv.k.dtype == torch.uint8:
        most = q.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        q = (q * (127 / most)).round() * (most / 127)
    elif paired:
        unit = spec.scale * (1 if spec.softcap else math.log2(math.e))
        q, kv = (q * unit).bfloat16().float() / unit, KVLayer(kv.k.bfloat16(), kv.v.bfloat16())
    return ref.attend_pages(q, spec, kv, given).flatten(1)


@pytest.fixture(params=["float32", "bfloat16"])
def attention_ops(context, rng, request):
    """Attention is as exact as the products: in bfloat16 where quantized weights meet 8 bits and the processor has it."""
    ops = cpu.CpuOps(None, context, 2)
    if request.param == "bfloat16":
        if context.isa != "avx512-bf16":
            pytest.skip("no products of bfloat16 pairs here")
        ops.pack(weight(rng, 16, 32, 4, 32, "center"))
    return ops, request.param == "bfloat16"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8], ids=str)
def test_attention(attention_ops, rng, dtype, shape):
    ops, paired = attention_ops
    paired &= dtype != torch.float32                           # a cache in float32 is for whoever wants its numbers
    heads, kv_heads, width, rotated, window, cap, norms = shape
    norm = [torch.rand(width, generator=rng) + 0.5 if norms else None for _ in "qk"]
    spec = AttentionSpec(0, heads, kv_heads, width, width**-0.5, window, cap, 0, *norm)
    total = [int(n) for n in torch.randint(1, 230, (3,), generator=rng)]
    tables = torch.randperm(70, generator=rng)[:69].view(3, 23).to(torch.int32)
    rows = [torch.randn(n, (heads + 2 * kv_heads) * width, generator=rng) for n in total]
    ours, theirs = pages(dtype, kv_heads, width, 70), pages(dtype, kv_heads, width, 70)
    done, found = [0, 0, 0], [[], [], []]
    while done != total:                                       # any chunking, any company
        live = [s for s in range(3) if done[s] < total[s]]
        counts = [min(total[s] - done[s], int(torch.tensor([1, 1, 5, 40, 100])[torch.randint(5, (1,),
            generator=rng)])) for s in live]
        given = batch([done[s] for s in live], counts, tables[live], rotated // 2)
        x = torch.cat([rows[s][done[s]:done[s] + c] for s, c in zip(live, counts)])
        y = ops.attend(x, spec, ours, given).floats.clone()
        bound = {torch.uint8: 4e-3, torch.bfloat16: 1e-3}.get(dtype, 2e-4)
        assert error(y, specified(x, spec, theirs, given, paired)) < (4e-3 if paired else bound)
        for s, part in zip(live, y.split(counts)):
            found[s].append(part)
            done[s] += len(part)
    for s in range(3):
        y = ops.attend(rows[s], spec, pages(dtype, kv_heads, width, 70),
                       batch([0], [total[s]], tables[[s]], rotated // 2)).floats
        assert torch.equal(y, torch.cat(found[s]))


def test_attention_is_as_exact_as_the_products(context, rng):
    can = context.isa == "avx512-bf16"
    quantized, floats = weight(rng, 16, 32, 4, 32, "center"), torch.randn(16, 32, generator=rng)
    for packed, eight_bits, rounded in ((quantized, True, can), (quantized, False, False), (floats.half(), True, False),
                                        (floats, True, False), (floats.bfloat16(), True, can)):
        ops = cpu.CpuOps(None, context, 1, eight_bits)
        ops.pack(packed)
        spec, x = AttentionSpec(0, 2, 2, 32, 32**-0.5), torch.randn(20, 6 * 32, generator=rng)
        given, dtype = batch([0], [20], torch.arange(4, dtype=torch.int32)[None], 16), torch.float16
        found = ops.attend(x, spec, pages(dtype, 2, 32, 4), given).floats
        off = error(found, specified(x, spec, pages(dtype, 2, 32, 4), given, False))
        assert (5e-4 < off < 1e-2) if rounded else off < 2e-4
        assert ops.kv_types[0] == ("bfloat16" if rounded else "float16") and len(set(ops.kv_types)) == 4


# ---------------------------------------------------------------------------------------------- sampling
def test_scan_finds_what_the_plain_one_finds(ops, rng):
    for size in (1, 15, 16, 333, 49152):
        logits = (torch.randn(size, generator=rng) * 3).numpy()
        logits[::7] = logits[0]                                # equals
        logits[1::97], logits[2::89] = -np.inf, np.nan
        place = np.uint64(int(torch.randint(2**62, (1,), generator=rng)) * 3)
        for level in (float(logits[0]), -2.0, -np.inf, np.inf):
            assert np.array_equal(ops.scan.above(logits, level), sampler.PLAIN.above(logits, level))
            for bound in (0, 2**31, 2**32 - 2**20):
                for found, wanted in zip(ops.scan.lucky(logits, level, place, bound),
                                         sampler.PLAIN.lucky(logits, level, place, bound)):
                    assert np.array_equal(found, wanted) and found.dtype == wanted.dtype


@pytest.mark.parametrize("extra", [{}, {"top_k": 40}, {"top_p": .9}, {"min_p": .02}, {"top_k": 99, "top_p": .8, "min_p": .01}],
                         ids=str)
def test_a_native_scan_changes_no_draw(ops, rng, extra):
    logits = (torch.randn(5000, generator=rng) * 2).numpy()
    for position in range(60):
        sampling = Sampling(temperature=(0.3, 0.8, 1.5, 3.0)[position % 4], **extra)
        wanted = sampler.choose(logits, sampling, 5, position)
        assert sampler.choose(logits, sampling, 5, position, scan=ops.scan) == wanted


# ---------------------------------------------------------------------------------------------- replay
def toy(ops, rng, extra=None):
    """A one-layer pass made of ops; ``extra`` does something between them."""
    table, out = ops.pack(weight(rng, 40, 64, 8, 32, "center")), ops.pack(weight(rng, 64, 64, 4, 32, "center"))
    qkv, norm = ops.pack(weight(rng, 128, 64, 4, 32, "zero")), torch.rand(64, generator=rng)
    spec = AttentionSpec(0, 2, 1, 32, 0.2)

    def forward(given, kv):
        x = ops.embed(table, given.ids)
        if extra:
            x = extra(x, given)
        ops.matmul_add(ops.attend(ops.matmul(ops.norm(x, norm, 1e-5), qkv), spec, kv[0], given), out, x)
        return x

    return forward


FOREIGN = {"none": None, "in place": lambda x, given: x.add_(given.positions[:, None] * 0.01),
           "fresh": lambda x, given: x + given.positions[:, None] * 0.01}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_replay_equals_the_ordinary_pass_or_is_refused(ops, rng, foreign):
    forward = toy(ops, rng, FOREIGN[foreign])
    replayed, kv, plain_kv = ops.replay(), (pages(torch.float16, 1, 32, 9),), (pages(torch.float16, 1, 32, 9),)
    tables = torch.randperm(9, generator=rng)[:8].view(2, 4).to(torch.int32)
    for step in range(20):
        given = batch([step, step], [1, 1], tables, 16)
        given.ids = torch.randint(0, 40, (2,), generator=rng)
        assert torch.equal(replayed.run(forward, given, kv).clone(), forward(given, plain_kv))
    assert replayed.replays(2) is (foreign == "none")


# ---------------------------------------------------------------------------------------------- the build
def test_no_compiler_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(MissingRequirement, match="compiler"):
        cpu.make("auto", 1)


def test_failed_build_is_said_and_leaves_nothing(monkeypatch, tmp_path):
    fake = tmp_path / "cxx"
    fake.write_text("#!/bin/sh\nif [ \"$1\" = --version ]; then echo fake 1; exit 0; fi\necho no such luck >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    with pytest.raises(MissingRequirement, match="could not be built") as caught:
        native_build.library("portable", tmp_path / "cache")
    assert "no such luck" in caught.value.evidence["said"] and not list((tmp_path / "cache").iterdir())


def test_builds_at_once_share_one_file(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: native_build.library("portable", tmp_path, ("-O0",)), range(2)))
    assert paths[0] == paths[1] and list(tmp_path.iterdir()) == [paths[0]]
    assert native_abi.Context(paths[0], 1).isa == "portable"
