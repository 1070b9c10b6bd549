"""The GPU benchmark where there is no GPU: what it says then, its budget, its table, and that its models and checks hold on `ref`."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from backends.kernels.ref import RefOps
from benchmarks import gpu, gpu_models

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--quick"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and "no CUDA device" in told.err


@pytest.fixture
def report(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 << 30, 24 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return gpu.Report(100.0, {"gpu": "G", "torch": "2", "triton": "3", "bandwidth": 1e12, "checks": 7})


def test_nothing_is_begun_without_time_or_memory_and_a_failure_costs_only_itself(report, capsys) -> None:
    done = []

    def fails() -> None:
        raise ValueError("a kernel\nwith a long story")

    report.section("works", 10, lambda: done.append(1), 4)
    report.section("too long", 1000, lambda: done.append(2))
    report.section("too big", 10, lambda: done.append(3), 16)
    report.section("fails", 10, fails)
    assert done == [1] and report.failed == ["fails: ValueError: a kernel"]
    assert report.left_out[0].startswith("too long (") and report.left_out[1] == "too big (8 GiB free of 16)"


def test_the_table_sets_us_beside_transformers(report) -> None:
    report.add("1B", "Gainz 4-bit", "decode, 1 streams", 300.0, 7.5e11)
    report.add("1B", "transformers bfloat16", "decode, 1 streams", 60.0)
    report.left_out.append("8B (no time)")
    table = gpu._table(report).splitlines()
    assert "| 1B | Gainz 4-bit | decode, 1 streams | 300 | 75% | 5.00 × |" in table
    assert table[-1] == "Left out: 8B (no time)"


@pytest.mark.parametrize("bits", [0, 4])
def test_its_models_run_and_count_what_a_step_reads(bits: int) -> None:
    ops = RefOps(torch.bfloat16)
    decoder, source = gpu_models.make_decoder("tiny", gpu_models.Format("", bits, 32), ops, 256, "bfloat16")
    layer = 64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 96
    weight = 2 if not bits else bits / 8 + 2 / 32
    assert source.read_bytes == int(320 * 64 * 2) + int(2 * layer * weight)
    assert gpu_models.decode_seconds(decoder, 2, 20, steps=3, warm=1) > 0 and decoder.pool.used == 0
    assert gpu_models.prefill_seconds(decoder, 40, rounds=1) > 0


@needs_triton
def test_its_checks_of_rows_and_passes_hold_for_the_specification() -> None:
    from benchmarks import gpu_checks
    ops = RefOps()
    for found in (list(gpu_checks.rows(ops)), list(gpu_checks.passes(ops, 2))):
        assert found and all(check.ok for check in found), found
    assert not gpu_checks.Check("", float("nan"), 1.0).ok
    assert gpu_checks.apart(torch.tensor([torch.nan]), torch.ones(1)) == float("inf")


@needs_triton
def test_the_checkpoint_for_gptqmodel_is_one_that_we_read_too(tmp_path) -> None:
    from safetensors import safe_open
    from backends.base import ModelDir
    from backends.quant_config import read_quantization
    from benchmarks import gpu_gptq
    gpu_gptq.write(tmp_path, "tiny", torch.device("cpu"))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.get_tensor("model.layers.1.mlp.down_proj.qweight").shape == (96 // 8, 64)
        assert file.get_tensor("model.layers.0.self_attn.q_proj.scales").dtype == torch.float16
    quantization = read_quantization(ModelDir.of(tmp_path))
    assert (quantization.method, quantization.bits) == ("gptq", 4)
