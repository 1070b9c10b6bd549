"""How fast a loaded model prefills and decodes, ours alone: no page, no scheduler, no sampling beyond argmax.

    python -m benchmarks.decode MODEL [--kernels cpu] [--threads 2] [--contexts 100,4000] [--rows 1,4] [--prefill 512]

Times of single steps are given as the fastest, the median and the 90th percentile, since one core borrowed by somebody else
shows in the tail. Beside them stand a read-bandwidth probe taken in the same minutes and the rate at which a step of one
row reads the weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from backends.base import Step
from backends.registry import load_decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--kv-type", default="auto")
    parser.add_argument("--contexts", type=numbers, default=[100])
    parser.add_argument("--rows", type=numbers, default=[1])
    parser.add_argument("--prefill", type=numbers, default=[512])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    most = max(*args.contexts, *args.prefill) + args.steps + 16
    decoder = load_decoder(args.model, kernels=args.kernels, threads=args.threads, kv_type=args.kv_type, context=most,
                           streams=max(args.rows),
                           prefix_cache=False)
    report = {"model": str(args.model), "machine": machine(),
              "kernels": f"{decoder.arch.ops.name} {decoder.arch.ops.detail}",
              "kv_type": decoder.kv.kv_type, "weights_bytes": decoder.arch.weights_bytes(), "prefill": [], "decode": []}
    for tokens in args.prefill:
        best = min(prefill(decoder, tokens) for _ in range(args.repeat))
        report["prefill"].append({"tokens": tokens, "tokens_per_second": round(tokens / best, 1)})
    for context in args.contexts:
        for rows in args.rows:
            report["decode"].append(decode(decoder, context, rows, args.steps))
    report["read_bandwidth_gb_per_second"] = round(bandwidth() / 1e9, 1)
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def machine() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")] or [platform.machine()]
    return f"{names[0]}, {torch.get_num_threads()} threads"


def fill(decoder, slot, tokens: int) -> None:
    for start in range(0, tokens, 512):
        part = [(7919 * i + 11) % min(decoder.vocab.size, 30000) for i in range(start, min(start + 512, tokens))]
        if not decoder.reserve(slot, len(part)):
            raise SystemExit("The KV cache is too small for these contexts.")
        decoder.extend([Step(slot, part, 1)])


def prefill(decoder, tokens: int) -> float:
    slot = decoder.open([0])
    start = time.perf_counter()
    fill(decoder, slot, tokens)
    took = time.perf_counter() - start
    decoder.release(slot)
    return took


def decode(decoder, context: int, rows: int, steps: int) -> dict:
    slots = [decoder.open([0]) for _ in range(rows)]
    for slot in slots:
        fill(decoder, slot, context)
    tokens, times = [7] * rows, []
    for _ in range(steps):
        start = time.perf_counter()
        for slot in slots:
            decoder.reserve(slot, 1)
        logits = decoder.extend([Step(slot, [token], 1) for slot, token in zip(slots, tokens)])
        tokens = [int(row[-1].argmax()) for row in logits]
        times.append(time.perf_counter() - start)
    for slot in slots:
        decoder.release(slot)
    times = sorted(times[3:])                                  # the first passes are recorded and checked
    median = statistics.median(times)
    return {"context": context, "rows": rows, "fastest_ms": round(times[0] * 1e3, 3), "median_ms": round(median * 1e3, 3),
            "p90_ms": round(times[int(len(times) * 0.9)] * 1e3, 3), "tokens_per_second": round(rows / median, 1),
            "weights_gb_per_second": round(decoder.arch.weights_bytes() / median / 1e9, 1)}


def bandwidth(size: int = 1 << 28) -> float:
    """Bytes a second of the best of several sums over a buffer far larger than the caches."""
    data = torch.ones(size // 8, dtype=torch.int64)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return size / best


if __name__ == "__main__":
    main()
