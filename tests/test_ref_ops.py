"""The specification against plain formulas, and its promise: a row's bits depend on that row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backends.engine.kv import PAGE, PagedKV
from backends.base import LayerKV
from backends.kernels import AttentionSpec, Batch, QWeight
from backends.kernels.ref import RefOps

HEADS, KV_HEADS, WIDTH = 4, 2, 24            # a width that is no power of two


def qweight(n: int, k: int, bits: int, group: int, *, zero: bool, perm: bool = False) -> QWeight:
    groups = -(-k // group)
    codes = torch.randint(0, 2 ** bits, (n, k), dtype=torch.uint8)
    scale = (torch.rand(n, groups) * .1 + .01).half().float()
    return QWeight(codes, scale, torch.randint(0, 2 ** bits, (n, groups), dtype=torch.uint8) if zero else None,
                   None if zero else torch.randn(n, groups), bits, group, torch.randperm(k) if perm else None)


def by_hand(w: QWeight) -> Tensor:
    """w in the order of the input features, column by column."""
    n, k = w.shape
    out = torch.zeros(n, k)
    for column in range(k):
        code, group = w.codes[:, column].float(), column // w.group
        scale = w.scale[:, group]
        value = code * scale + w.bias[:, group] if w.zero is None else (code - w.zero[:, group].float()) * scale
        out[:, column if w.perm is None else int(w.perm[column])] = value
    return out


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize(("bits", "group", "k"), [
    (2, 16, 64), (3, 32, 96), (4, 32, 96), (4, 64, 96), (4, 1024, 208), (5, 32, 64), (8, 32, 65)])
def test_packed_product(bits: int, group: int, k: int, zero: bool) -> None:
    torch.manual_seed(bits + k)
    weight, bias, x = qweight(48, k, bits, group, zero=zero), torch.randn(48), torch.randn(5, k)
    ops = RefOps()
    packed = ops.pack(weight, bias)
    torch.testing.assert_close(ops.matmul(x, packed), x @ by_hand(weight).T + bias, rtol=1e-5, atol=1e-4)
    assert packed.nbytes <= 48 * (k * (4 if bits <= 4 else 8) / 8 + 1 + 8 * -(-k // group)) + 48 * 4 + 64


@pytest.mark.parametrize("group", [8, 24])
def test_act_order_goes_to_the_activations(group: int) -> None:
    torch.manual_seed(1)
    weight, x, ops = qweight(32, 48, 4, group, zero=True, perm=True), torch.randn(3, 48), RefOps()
    dense = by_hand(weight)
    torch.testing.assert_close(ops.matmul(x, ops.pack(weight)), x @ dense.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ops.embed(ops.pack(weight), torch.tensor([3, 0, 31]), 2.0), dense[[3, 0, 31]] * 2)


def test_the_whole_weight_dequantizes_alike() -> None:
    torch.manual_seed(2)
    for zero in (True, False):
        weight = qweight(8, 48, 4, 32, zero=zero, perm=True)
        torch.testing.assert_close(weight.dequantize(), by_hand(weight))


def test_scales_that_half_cannot_hold_are_kept_whole() -> None:
    weight = qweight(16, 32, 4, 32, zero=True)
    weight.scale = weight.scale + 1e-6
    ops = RefOps()
    torch.testing.assert_close(ops.embed(ops.pack(weight), torch.arange(16)), by_hand(weight), rtol=0, atol=0)


def test_norms_glu_and_caps() -> None:
    torch.manual_seed(3)
    ops, x, w = RefOps(), torch.randn(3, 32), torch.rand(32)
    wanted = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w
    torch.testing.assert_close(ops.norm(x, w, 1e-5), wanted)
    y = torch.ones(3, 32)
    ops.norm_add(x, w, 1e-5, y)
    torch.testing.assert_close(y, wanted + 1)
    gate, up = x.chunk(2, -1)
    for kind, f in (("silu", torch.nn.SiLU()), ("gelu", torch.nn.GELU()), ("gelu_tanh", torch.nn.GELU("tanh"))):
        torch.testing.assert_close(ops.glu(x, kind), f(gate) * up)
    head = ops.pack(torch.randn(9, 32))
    torch.testing.assert_close(ops.logits(x, head, 2.0), 2 * torch.tanh(x @ head.weight.T / 2))


# ---------------------------------------------------------------------------------------------- attention
def batch_of(sequences: list[tuple[int, int]], width: int = WIDTH) -> Batch:
    """Sequences of (tokens already there, rows now), pages handed out from the top down: order is nothing to rely on."""
    counts = [rows for _, rows in sequences]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    lengths = torch.tensor([before + rows for before, rows in sequences], dtype=torch.int32)
    most, pages, free = -(-int(lengths.max()) // PAGE), [], 63
    for length in lengths.tolist():
        used = -(-length // PAGE)
        pages.append([free - i for i in range(used)] + [0] * (most - used))
        free -= used
    pages = torch.tensor(pages, dtype=torch.int32)
    positions = torch.cat([torch.arange(before, before + rows) for before, rows in sequences])
    of = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor(counts))
    slots = pages[of, positions // PAGE].long() * PAGE + positions % PAGE
    angle = positions[None, :, None] * torch.tensor([1.0, .1, .01])
    ids, wanted = torch.zeros_like(positions), positions[:0]
    return Batch(ids, positions, starts, lengths, pages, slots, wanted, angle.cos(), angle.sin())


def naive(history: Tensor, spec: AttentionSpec, rope: bool) -> Tensor:
    """All positions of one sequence from its rows [T, (heads + 2 kv_heads) * width], by the textbook."""
    length = history.shape[0]
    rows = history.view(length, -1, spec.head_dim)
    q, k, v = rows.split((spec.heads, spec.kv_heads, spec.kv_heads), 1)
    rms = lambda x, w: x if w is None else x / (x.pow(2).mean(-1, keepdim=True) + spec.norm_eps).sqrt() * w  # noqa: E731
    q, k = rms(q, spec.q_norm), rms(k, spec.k_norm)
    if rope:
        turn = torch.polar(torch.ones(length, 1, 3), torch.arange(length)[:, None, None] * torch.tensor([1.0, .1, .01]))
        q, k = (torch.cat([(c := torch.complex(x[..., :3], x[..., 3:6]) * turn).real, c.imag, x[..., 6:]], -1)
                for x in (q, k))
    k, v = (x.repeat_interleave(spec.heads // spec.kv_heads, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    scores[:, (distance < 0) | (distance >= (spec.window or 10**9))] = -torch.inf
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def spec_of(**changes) -> AttentionSpec:
    return AttentionSpec(**({"layer": 0, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": WIDTH, "scale": .3} | changes))


VARIANTS = {"plain": {}, "window": {"window": 7}, "wide window": {"window": 40}, "softcap": {"softcap": 1.5},
            "no rotation": {"rope": None}, "head norms": {"q_norm": torch.rand(WIDTH), "k_norm": torch.rand(WIDTH)},
            "one kv head": {"kv_heads": 1},
            "as many kv heads": {"kv_heads": HEADS}}


def pages_of(kv_heads: int, kind: str = "float32") -> PagedKV:
    """Pages full of NaN: what has not been written must not be read."""
    kv = PagedKV((LayerKV(kv_heads, WIDTH, WIDTH),), 64, kind)
    for tensor in (kv.layers[0].k, kv.layers[0].v):
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    return kv


@pytest.mark.parametrize("name", VARIANTS)
def test_attention_over_pages(name: str) -> None:
    """Three ragged sequences: a prompt, a chunk that goes on, one token more; each equals the textbook alone."""
    torch.manual_seed(4)
    spec = spec_of(**VARIANTS[name])
    wide = (spec.heads + 2 * spec.kv_heads) * WIDTH
    history = [torch.randn(length, wide) for length in (37, 90, 130)]
    ops, kv = RefOps(), pages_of(spec.kv_heads)
    first = batch_of([(0, 37), (0, 70), (0, 129)])
    second = batch_of([(37, 0), (70, 20), (129, 1)])
    second.pages = batch_of([(0, 37), (0, 90), (0, 130)]).pages
    first.pages = second.pages
    for batch in (first, second):
        of = torch.repeat_interleave(torch.arange(3), batch.starts.diff())
        batch.slots = batch.pages[of, batch.positions // PAGE].long() * PAGE + batch.positions % PAGE
    out = ops.attend(torch.cat([history[0], history[1][:70], history[2][:129]]), spec, kv.layers[0], first)
    more = ops.attend(torch.cat([history[1][70:], history[2][129:]]), spec, kv.layers[0], second)
    got = [out[:37], torch.cat([out[37:107], more[:20]]), torch.cat([out[107:], more[20:]])]
    for rows, past in zip(got, history):
        torch.testing.assert_close(rows, naive(past, spec, spec.rope is not None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8"])
def test_rows_do_not_see_their_neighbours(kind: str) -> None:
    """Bit for bit: alone, in chunks, and beside a sequence four times as long."""
    torch.manual_seed(5)
    spec, ops = spec_of(), RefOps()
    mine, other = torch.randn(70, (HEADS + 2 * KV_HEADS) * WIDTH), torch.randn(290, (HEADS + 2 * KV_HEADS) * WIDTH)
    alone = ops.attend(mine, spec, pages_of(KV_HEADS, kind).layers[0], batch_of([(0, 70)]))
    beside = ops.attend(torch.cat([other, mine]), spec, pages_of(KV_HEADS, kind).layers[0], batch_of([(0, 290), (0, 70)]))
    assert torch.equal(alone, beside[290:])
    kv, rows = pages_of(KV_HEADS, kind).layers[0], []
    for low, high in ((0, 1), (1, 33), (33, 34), (34, 69), (69, 70)):
        batch = batch_of([(low, high - low)])
        rows.append(ops.attend(mine[low:high], spec, kv, batch))
    assert torch.equal(alone, torch.cat(rows))


@pytest.mark.parametrize("weight", ["float", "4 bits", "8 bits with bias"])
@pytest.mark.parametrize(("n", "k"), [(48, 64), (576, 576), (192, 1536)])
def test_products_do_not_depend_on_the_number_of_rows(weight: str, n: int, k: int) -> None:
    torch.manual_seed(6)
    made = {"float": lambda: torch.randn(n, k), "4 bits": lambda: qweight(n, k, 4, 32, zero=True),
            "8 bits with bias": lambda: qweight(n, k, 8, 64, zero=False)}[weight]()
    ops = RefOps()
    w, x = ops.pack(made), torch.randn(45, k)
    whole, norm = ops.matmul(x, w), torch.rand(k)
    for count in (1, 2, 7, 16, 17, 31):
        for low in range(0, 45 - count, 11):
            part = x[low:low + count].contiguous()
            assert torch.equal(ops.matmul(part, w), whole[low:low + count])
            assert torch.equal(ops.norm(part, norm, 1e-6), ops.norm(x, norm, 1e-6)[low:low + count])


# ---------------------------------------------------------------------------------------------- int8 cache
def fill(kv: PagedKV, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Write k, v [T, heads, width]; what the cache gives back."""
    from backends.kernels.ref import load_pages, store_rows
    layer, slots = kv.layers[0], torch.arange(k.shape[0]) + 3 * PAGE
    store_rows(layer.k, slots, k, layer.k_scale, layer.k_low)
    store_rows(layer.v, slots, v, layer.v_scale, layer.v_low)
    table = torch.arange(3, 3 + -(-k.shape[0] // PAGE))[None]
    stored = ((layer.k, layer.k_scale, layer.k_low), (layer.v, layer.v_scale, layer.v_low))
    read = [load_pages(pages, table, scale, low)[0].flatten(1, 2).transpose(0, 1)[:k.shape[0]]
            for pages, scale, low in stored]
    return read[0], read[1]


def test_int8_error_is_at_most_half_a_step_with_an_outlier_channel() -> None:
    """KV-05: one channel of K fifty times the others."""
    torch.manual_seed(7)
    k, v = torch.randn(200, KV_HEADS, WIDTH), torch.randn(200, KV_HEADS, WIDTH)
    k[..., 5] *= 50
    for given_, got in zip((k, v), fill(pages_of(KV_HEADS, "int8"), k, v)):
        step = (given_.amax(-1) - given_.amin(-1)) / 255
        assert ((given_ - got).abs() <= step[..., None] * .5 * (1 + 1e-4)).all()


def test_int8_range_is_that_of_the_values_alone() -> None:
    """KV-06: data in [5, 10] over a width that is no power of two: no padding zero widens the range."""
    kv = pages_of(KV_HEADS, "int8")
    k = torch.linspace(5, 10, WIDTH).repeat(1, KV_HEADS, 1)
    fill(kv, k, k)
    torch.testing.assert_close(kv.layers[0].k_scale[3, :, 0], torch.full((KV_HEADS,), 5 / 255))
    torch.testing.assert_close(kv.layers[0].k_low[3, :, 0], torch.full((KV_HEADS,), 5.0))


def test_int8_values_come_from_v() -> None:
    """KV-07: K = 1 and V = -1 everywhere; the output is -1."""
    spec, rows = spec_of(rope=None), torch.ones(20, HEADS + 2 * KV_HEADS, WIDTH)
    rows[:, HEADS + KV_HEADS:] = -1
    out = RefOps().attend(rows.flatten(1), spec, pages_of(KV_HEADS, "int8").layers[0], batch_of([(0, 20)]))
    torch.testing.assert_close(out, torch.full_like(out, -1.0))


def test_int8_is_asymmetric() -> None:
    k = torch.rand(1, KV_HEADS, WIDTH) * 1e-3 + 1000
    got, _ = fill(pages_of(KV_HEADS, "int8"), k, k)
    assert (got - k).abs().max() < 2e-4
