"""Checks and times the Triton target on one NVIDIA GPU, against transformers and, where installed, GPTQModel.

    python -m benchmarks.gpu [--quick] [--budget 480] [--json FILE]

Unattended: every op is checked against the specification first, then ops, then whole models of Llama's 1B and 8B shapes with
random weights made on the device. Nothing is fetched. No section is begun that the budget (seconds) has no room for; what was
left out, or failed, stands at the end. Exit code 0: all checks passed; 1: there is no GPU to run on; 2: a check or section failed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30


@dataclass
class Report:
    """Rows for the table, and what did not come about."""

    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    def section(self, name: str, needs: float, work: Callable[[], None], memory: float = 0.0) -> None:
        """``needs`` seconds, by experience or guess; ``memory`` GiB."""
        free = torch.cuda.mem_get_info()[0] / GIB
        if self.left() < needs or free < memory:
            why = f"{self.left():.0f} s left of {needs:.0f} needed" if self.left() < needs else f"{free:.0f} GiB free of {memory:.0f}"
            self.left_out.append(f"{name} ({why})")
            return
        began = time.monotonic()
        print(f"[{self.seconds - self.left():4.0f} s] {name} …", flush=True)
        try:
            work()
        except Exception as error:  # noqa: BLE001  unattended: one section that fails must not cost the others
            traceback.print_exc()
            self.failed.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        gc.collect()
        torch.cuda.empty_cache()
        print(f"        {time.monotonic() - began:.1f} s", flush=True)

    def add(self, model: str, engine: str, what: str, tokens: float, read: float | None = None) -> None:
        """``tokens`` a second; ``read`` bytes a second, for the share of the bandwidth."""
        share = None if read is None else read / self.facts["bandwidth"]
        self.rows.append({"model": model, "engine": engine, "what": what, "tokens_per_second": tokens, "share": share})
        print(f"        {model} {engine}: {what} {tokens:,.0f} tok/s" + ("" if share is None else f", {share:.0%} of the bandwidth"),
              flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="checks, ops and the 1B shape only")
    parser.add_argument("--budget", type=float, default=480, help="seconds after which nothing new is begun")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device here (or this build of torch has no CUDA); nothing was run.", file=sys.stderr)
        return 1
    if importlib.util.find_spec("triton") is None:
        print("Triton is not installed; nothing was run.", file=sys.stderr)
        return 1
    report = Report(args.budget)
    torch.manual_seed(0)
    with torch.inference_mode():
        _run(report, args.quick)
    print(_table(report))
    if args.json:
        args.json.write_text(json.dumps({"facts": report.facts, "rows": report.rows, "left_out": report.left_out,
                                         "failed": report.failed}, indent=1))
    return 2 if report.failed else 0


def _run(report: Report, quick: bool) -> None:
    report.facts = machine()
    report.section("checks", 90, lambda: checks(report))
    report.section("products", 20, lambda: products(report))
    report.section("tiles", 20, lambda: tiles(report))
    for shape in ("1B",) if quick else ("1B", "8B"):
        big = shape == "8B"
        report.section(f"{shape} 4 bits", 60 if big else 30, lambda s=shape: ours(report, s, 4, quick), 12 if big else 6)
        report.section(f"{shape} bfloat16", 60 if big else 30, lambda s=shape: ours(report, s, 0, quick), 40 if big else 8)
        report.section(f"{shape} transformers", 70 if big else 40, lambda s=shape: theirs(report, s, quick), 40 if big else 8)
        if not quick:
            report.section(f"{shape} 8 bits", 60 if big else 30, lambda s=shape: ours(report, s, 8, quick), 20 if big else 8)
    if importlib.util.find_spec("gptqmodel") is None:
        report.left_out.append("GPTQModel (not installed)")
    else:
        report.section("1B GPTQModel", 60, lambda: gptqmodel(report), 8)


# ---------------------------------------------------------------------------------------------- the machine
def machine() -> dict[str, Any]:
    import triton
    facts = torch.cuda.get_device_properties(0)
    found = {"gpu": facts.name, "capability": f"{facts.major}.{facts.minor}", "memory_gib": round(facts.total_memory / GIB),
             "processors": facts.multi_processor_count, "torch": torch.__version__, "cuda": torch.version.cuda,
             "triton": triton.__version__, "python": platform.python_version(), "bandwidth": bandwidth()}
    print(f"{found['gpu']}, {found['memory_gib']} GiB, {found['processors']} processors; torch {found['torch']}, triton "
          f"{found['triton']}; {found['bandwidth'] / 1e9:,.0f} GB/s read", flush=True)
    return found


def bandwidth() -> float:
    """Bytes a second that the device reads: the best of sums over a GiB and half of what a copy moves twice."""
    block = torch.zeros(GIB // 4, dtype=torch.float32, device="cuda")
    other = torch.empty_like(block)
    return max(GIB / _seconds(block.sum), 2 * GIB / _seconds(lambda: other.copy_(block)))


def _seconds(work: Callable[[], Any]) -> float:
    from backends.kernels.triton_int4 import time_on_device
    return time_on_device(torch.device("cuda", torch.cuda.current_device()), work)


def _ops(race: bool = False):
    from backends.kernels import triton
    from backends.kernels.triton import TritonOps
    made = triton.make("bfloat16", 0)
    return made if race else TritonOps(made.dtype, made.device, made.processors, made.detail)


# ---------------------------------------------------------------------------------------------- ops
def checks(report: Report) -> None:
    from backends.kernels.triton import TritonOps
    from benchmarks.gpu_checks import all_checks
    ops, wrong, count = _ops(), [], 0
    others = TritonOps(torch.float16, ops.device, ops.processors), TritonOps(torch.float32, ops.device, ops.processors)
    for target in (ops, *others):
        for check in all_checks(target, whole=target is ops):
            count += 1
            if not check.ok:
                wrong.append(f"{target.dtype} {check.name}: {check.distance:.2e}, allowed {check.allowed:.0e}")
                print("        WRONG", wrong[-1], flush=True)
    report.facts["checks"] = count
    print(f"        {count} checks, {len(wrong)} wrong", flush=True)
    if wrong:
        report.failed.append(f"{len(wrong)} of {count} checks: {wrong[0]}")


def products(report: Report) -> None:
    """Each matrix of the 8B shape: microseconds, share of the bandwidth at few rows, TFLOP/s at many; torch's int4 beside it."""
    from backends.kernels import triton_int4 as int4
    from backends.kernels.triton_matmul import Ending
    from benchmarks.gpu_models import Format, RandomSource, SHAPES
    ops = _ops()
    for bits in (4, 8):
        source = RandomSource(SHAPES["8B"], Format("", bits), ops.device, ops.dtype)
        for module in ("q_proj", "gate_proj", "down_proj"):
            w, _ = source.linear(module)
            layouts = {"ours": ops.pack(w)} | ({"torch int4": int4.pack_aten(w, None, ops.device)} if int4.fits(w, ops.dtype) else {})
            for name, matrix in layouts.items():
                line = []
                for rows in (1, 4, 16, 64, 512):
                    x = torch.randn(rows, matrix.columns, device=ops.device, dtype=ops.dtype)
                    end = Ending(torch.empty(rows, matrix.rows, device=ops.device, dtype=ops.dtype))
                    took = _seconds(lambda x=x, m=matrix, e=end: ops._product(x, m, e))
                    what = f"{matrix.nbytes / took / report.facts['bandwidth']:.0%}" if rows <= 16 else \
                        f"{2 * rows * matrix.rows * matrix.columns / took / 1e12:.0f} TFLOP/s"
                    line.append(f"{rows} rows {took * 1e6:.1f} µs ({what})")
                print(f"        {bits} bits, {matrix.rows} × {matrix.columns}, {name}: " + ", ".join(line), flush=True)
    print("        Matrices that fit the second-level cache can show more than the memory's bandwidth.", flush=True)


def tiles(report: Report) -> None:
    """Which tile suits this device: for whoever tunes `triton_matmul`'s table."""
    from backends.kernels.triton_matmul import FEW_TILE, MANY_TILE, WIDE_TILE, Ending, Tile, multiply_packed
    from benchmarks.gpu_models import Format, RandomSource, SHAPES
    ops = _ops()
    packed = ops.pack(RandomSource(SHAPES["8B"], Format("", 4), ops.device, ops.dtype).linear("gate_proj")[0])
    few = [Tile(n, 16, warps, stages) for n in (32, 64, 128) for warps in (2, 4) for stages in (3, 5)]
    many = [Tile(n, m, warps, 3) for n, m, warps in ((64, 64, 4), (128, 64, 4), (128, 128, 8), (64, 128, 4), (128, 256, 8))]
    for rows, table in ((1, [FEW_TILE, *few]), (512, [MANY_TILE, WIDE_TILE, *many])):
        x = torch.randn(rows, packed.columns, device=ops.device, dtype=ops.dtype)
        end, found = Ending(torch.empty(rows, packed.rows, device=ops.device, dtype=ops.dtype)), {}
        for tile in dict.fromkeys(table):
            if report.left() > 60:
                found[tile] = _seconds(lambda x=x, e=end, t=tile: multiply_packed(x, packed, e, ops.processors, t))
        best = sorted(found, key=found.get)
        print(f"        {rows} rows: " + "; ".join(f"{t.outputs}×{t.rows} w{t.warps} s{t.stages} {found[t] * 1e6:.0f} µs" for t in best),
              flush=True)


# ---------------------------------------------------------------------------------------------- whole models
def _loads(quick: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Streams of decoding, tokens of prompts."""
    return ((1, 16), (512,)) if quick else ((1, 4, 16), (512, 2000))


def ours(report: Report, shape: str, bits: int, quick: bool) -> None:
    from benchmarks.gpu_models import Format, decode_seconds, make_decoder, prefill_seconds
    ops, name = _ops(race=True), f"{bits}-bit group 128" if bits else "bfloat16"
    streams, prompts = _loads(quick)
    decoder, source = make_decoder(shape, Format(name, bits), ops, 16 * 256 + 2048, ops.kv_types[0])
    for rows in streams:
        took = decode_seconds(decoder, rows, 128)
        read = source.read_bytes + rows * 128 * decoder.kv.bytes_per_token
        report.add(shape, f"Gainz {name}", f"decode, {rows} streams", rows / took, read / took)
    for tokens in prompts:
        report.add(shape, f"Gainz {name}", f"prefill of {tokens}", tokens / prefill_seconds(decoder, tokens))
    for note in ops.notes:
        print(f"        note: {note}", flush=True)


def theirs(report: Report, shape: str, quick: bool) -> None:
    """transformers' own decoder and `generate`, bfloat16, its defaults."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from benchmarks.gpu_models import SHAPES
    config = LlamaConfig(**{key: value for key, value in SHAPES[shape].items() if key != "model_type"})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    _generate(report, shape, "transformers bfloat16", model, quick)


def _generate(report: Report, shape: str, name: str, model: Any, quick: bool) -> None:
    streams, prompts = _loads(quick)

    def seconds(rows: int, prompt: int, new: int) -> float:
        ids = torch.randint(10, 30000, (rows, prompt), device="cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new,
                       pad_token_id=0)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(1, 128, 4)
    for rows in streams:
        report.add(shape, name, f"decode, {rows} streams", rows * 32 / (seconds(rows, 128, 33) - seconds(rows, 128, 1)))
    for tokens in prompts:
        report.add(shape, name, f"prefill of {tokens}", tokens / min(seconds(1, tokens, 1) for _ in range(3)))


def gptqmodel(report: Report) -> None:
    from benchmarks.gpu_gptq import load
    _generate(report, "1B", "GPTQModel 4-bit group 128", load(), quick=False)


# ---------------------------------------------------------------------------------------------- the table
def _table(report: Report) -> str:
    facts = report.facts
    lines = ["", f"{facts['gpu']}, torch {facts['torch']}, triton {facts['triton']}, {facts['bandwidth'] / 1e9:,.0f} GB/s measured; "
             f"{facts.get('checks', 0)} checks; {report.seconds - report.left():.0f} s.", "",
             "| model | engine | what | tok/s | share of bandwidth | against transformers |", "|---|---|---|---|---|---|"]
    base = {(row["model"], row["what"]): row["tokens_per_second"] for row in report.rows if row["engine"].startswith("transformers")}
    for row in report.rows:
        other, share = base.get((row["model"], row["what"])), row["share"]
        ratio = f"{row['tokens_per_second'] / other:.2f} ×" if other else ""
        lines.append(f"| {row['model']} | {row['engine']} | {row['what']} | {row['tokens_per_second']:,.0f} | "
                     f"{'' if share is None else f'{share:.0%}'} | {ratio} |")
    lines += [f"Left out: {text}" for text in report.left_out] + [f"FAILED: {text}" for text in report.failed]
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
