"""Every launch of the Triton target, compiled to machine code for real GPUs. No device is needed for that, nor for knowing
whether a program fits a consumer card's shared memory; what the code computes is shown by tests/test_triton.py."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from backends.kernels import AttentionSpec, KVLayer
from tests.test_ref_ops import batch_of, qweight

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None or bool(os.environ.get("TRITON_INTERPRET")),
                                reason="no Triton compiler here")
SHARED = {80: 99 << 10, 89: 99 << 10, 90: 227 << 10}     # bytes a program may have: of consumer cards, also for 8.0
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int16: "i16",
         torch.int32: "i32", torch.int64: "i64"}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Launches:
    """In place of launching: what would be compiled, once for each kind of arguments."""

    def __init__(self) -> None:
        self.found = {}

    def run(self, kernel, *args, grid, warmup, num_warps=4, num_stages=3, **constants):
        signature, values, hints = {}, {}, {}
        for place, (parameter, value) in enumerate(zip(kernel.params, [*args, *constants.values()])):
            name = parameter.name
            value = constants.get(name, value)
            if parameter.is_constexpr or value is None or type(value) is int and value == 1 and not parameter.do_not_specialize:
                signature[name], values[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = "*" + NAMES[value.dtype]
                hints[place,] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                    hints[place,] = [["tt.divisibility", 16]]
        key = (kernel.__name__, *signature.items(), *values.items(), *hints, num_warps, num_stages)
        self.found.setdefault(str(key), (kernel, signature, values, hints, {"num_warps": num_warps, "num_stages": num_stages}))

    def compile(self, capability: int):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        for kernel, signature, values, hints, options in self.found.values():
            source = ASTSource(kernel, signature, values, hints)
            yield kernel.__name__, triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.fixture
def launches(monkeypatch, tmp_path):
    from triton.runtime import JITFunction
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    noted = Launches()
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **named: noted.run(kernel, *args, **named))
    return noted


def ops(dtype: str):
    from backends.kernels.triton import TritonOps
    return TritonOps(DTYPES[dtype], torch.device("cpu"), 132)


def products(target, rows: int, **kind) -> None:
    packed = target.pack(qweight(128, 2048, kind["bits"], kind["group"], zero=kind["zero"]), torch.zeros(128))
    x = torch.zeros(rows, 2048, dtype=target.dtype)
    target.matmul(x, packed)
    target.matmul_add(x, packed, torch.zeros(rows, 128, dtype=target.dtype))


def check(launches, *capabilities: int) -> None:
    assert launches.found
    for capability in capabilities:
        for name, made in launches.compile(capability):
            assert made.asm["cubin"][:4] == b"\x7fELF" and made.metadata.shared <= SHARED[capability], (name, capability, made.metadata.shared)


def test_a_product_compiles(launches) -> None:
    target = ops("bfloat16")
    target.matmul(torch.zeros(3, 2048, dtype=target.dtype), target.pack(qweight(128, 2048, 4, 128, zero=True)))
    target.matmul(torch.zeros(3, 512, dtype=target.dtype), target.pack(torch.zeros(64, 512)))
    check(launches, 90)
    assert {kernel[0].__name__ for kernel in launches.found.values()} == {"packed_product", "float_product", "add_parts"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_compile(launches, dtype: str) -> None:
    target = ops(dtype)
    products(target, 1, bits=4, group=128, zero=True)
    products(target, 300, bits=4, group=32, zero=False)
    products(target, 50, bits=8, group=16, zero=True)
    target.logits(torch.zeros(4, 512, dtype=target.dtype), target.pack(torch.zeros(64, 512)), 30.0)
    check(launches, 89, 90)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("width", "int8", "window"), [
    (64, False, None), pytest.param(128, True, 4096, marks=SLOW), pytest.param(256, True, None, marks=SLOW)])
def test_attention_compiles(launches, width: int, int8: bool, window: int | None) -> None:
    target = ops("bfloat16")
    spec = AttentionSpec(0, 8, 2, width, 0.1, window, 50.0 if width == 256 else None, 0, *[torch.ones(width)] * 2)
    shape, dtype = (8, 2, 16, width), torch.uint8 if int8 else torch.bfloat16
    kv = KVLayer(*(torch.zeros(shape, dtype=dtype) for _ in "kv"), *(torch.zeros(shape[:3]) for _ in range(4 * int8)))
    for counts in ([(40, 1)], [(0, 30)]):
        batch = batch_of(counts)
        target.attend(torch.zeros(len(batch.ids), 12 * width, dtype=target.dtype), spec, kv, batch)
    check(launches, 89 if int8 else 90)


@pytest.mark.slow
def test_row_kernels_compile(launches) -> None:
    target = ops("float16")
    table, x = target.pack_table(qweight(64, 256, 4, 24, zero=True, perm=True)), torch.zeros(3, 256, dtype=torch.float16)
    target.embed(table, torch.tensor([1, 2, 3]))
    target.matmul(target.norm(x, torch.ones(256), 1e-5), table)
    for kind in ("silu", "gelu", "gelu_tanh"):
        target.glu(x, kind)
    target.norm_add(x, torch.ones(256), 1e-5, x.clone())
    check(launches, 89, 90)
