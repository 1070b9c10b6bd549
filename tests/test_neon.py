"""The NEON kernels, cross-compiled and run by qemu-user on emulated processors: the very tests of the other instruction sets.

An emulator is slow, so `make test` runs a part and `make neon` all of it. Where the cross compiler or the emulator is missing,
the tests are skipped, and say so.
"""

from __future__ import annotations

import gc
from itertools import product

import pytest
import torch

from backends.kernels import cpu
from tests import neon_remote, test_cpu_kernels as cases
from tests.test_cpu_kernels import rng  # noqa: F401, the same random numbers

pytestmark = pytest.mark.skipif(bool(neon_remote.missing()), reason=neon_remote.missing() or "-")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("neon")


@pytest.fixture(scope="module")
def descriptors():
    with pytest.MonkeyPatch.context() as patch:
        yield neon_remote.Descriptors(patch)


@pytest.fixture(scope="module")
def driver(folder):
    return neon_remote.build(folder, "neon")


# neoverse-n1: dot products and no i8mm; max: everything the emulator knows
@pytest.fixture(scope="module", params=["neoverse-n1", pytest.param("max", marks=pytest.mark.slow)])
def context(request, driver, descriptors):
    gc.collect()
    gc.freeze()                                                # what is there already is not looked through at every call
    made = neon_remote.RemoteContext(driver, request.param, descriptors)
    yield made
    made.close()
    gc.unfreeze()


@pytest.fixture
def ops(context):
    assert context.isa == "neon-dotprod"
    return cpu.CpuOps(None, context, 2)


@pytest.mark.parametrize("bits, group, kind", [*product((4, 8), (16, 64), ("center", "zero", "bias")), (6, 32, "center"),
                                               (3, 128, "zero")])
def test_quantized_product(ops, rng, bits, group, kind):  # noqa: F811
    cases.test_quantized_product(ops, rng, bits, group, kind)


@pytest.mark.parametrize("bits, group, kind, perm, inner", [(4, 32, "bias", False, 64), (8, 32, "center", True, 32)])
def test_a_gated_product(ops, rng, bits, group, kind, perm, inner):  # noqa: F811
    cases.test_a_gated_product_is_the_product_and_its_activation(ops, rng, bits, group, kind, perm, inner)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_exact(ops, rng, bits):  # noqa: F811
    cases.test_codes_are_exact(ops, rng, bits)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K"])
def test_stored_blocks_are_laid_out_as_their_codes_would_be(ops, rng, kind):  # noqa: F811
    cases.test_stored_blocks_are_laid_out_as_their_codes_would_be(ops, rng, kind)


@pytest.mark.parametrize("group", [24, 32])
def test_act_order_and_odd_groups_are_gathered(ops, rng, group):  # noqa: F811
    cases.test_act_order_and_odd_groups_are_gathered(ops, rng, group)


def test_extreme_scales_and_zeros(ops, rng):  # noqa: F811
    cases.test_extreme_scales_and_zeros(ops, rng)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_float_product(context, rng, dtype):  # noqa: F811
    cases.test_float_product(context, rng, dtype)


def test_a_row_does_not_see_its_neighbours(ops, rng):  # noqa: F811
    for bits, group, kind, k in ((4, 32, "bias", 96), (4, 16, "zero", 96), (8, 32, "center", 64)):
        packed = ops.pack(cases.weight(rng, 35, k, bits, group, kind))
        x = torch.randn(40, k, generator=rng)
        whole = ops.matmul(ops.act(x), packed).clone()
        for count in (1, 2, 3, 5, 7, 16):
            assert torch.equal(ops.matmul(ops.act(x[11:11 + count].clone()), packed), whole[11:11 + count]), count


@pytest.mark.parametrize("width", [576, 33, 7])
def test_rows(ops, rng, width):  # noqa: F811
    cases.test_rows(ops, rng, width)


def test_logits_with_softcap(ops, rng):  # noqa: F811
    cases.test_logits_with_softcap(ops, rng)


def test_nan_is_not_swallowed(ops, rng):  # noqa: F811
    cases.test_nan_is_not_swallowed(ops, rng)


@pytest.mark.parametrize("shape", [cases.SHAPES[1], *(pytest.param(shape, marks=pytest.mark.slow) for shape in cases.SHAPES
                                                      if shape != cases.SHAPES[1])], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8], ids=str)
def test_attention(ops, rng, dtype, shape):  # noqa: F811
    cases.test_attention((ops, False), rng, dtype, shape)


@pytest.mark.parametrize("foreign", cases.FOREIGN)
def test_replay(ops, rng, foreign):  # noqa: F811
    cases.test_replay_equals_the_ordinary_pass_or_is_refused(ops, rng, foreign)


# ---------------------------------------------------------------------------------------------- older processors
def test_a_processor_without_dot_products_is_refused(driver, descriptors):
    context = neon_remote.RemoteContext(driver, "cortex-a72", descriptors)
    context.close()
    assert context.isa == ""


@pytest.mark.slow
def test_the_portable_kernels_serve_it(folder, descriptors, rng):  # noqa: F811
    context = neon_remote.RemoteContext(neon_remote.build(folder, "portable"), "cortex-a72", descriptors)
    ops = cpu.CpuOps(None, context, 2)
    assert context.isa == "portable"
    cases.test_codes_are_exact(ops, rng, 4)
    cases.test_rows(ops, rng, 100)
    cases.test_attention((ops, False), rng, torch.float16, cases.SHAPES[0])
    context.close()
