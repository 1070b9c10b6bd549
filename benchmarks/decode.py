"""How fast a loaded model prefills and decodes: the bare decoder, and the whole engine of one process around it.

    python -m benchmarks.decode MODEL [--kernels cpu] [--threads 2] [--contexts 100,4000] [--rows 1,4] [--prefill 512]
                                      [--streams 1,16]

Times of single steps are given as the fastest, the median and the 90th percentile, since one core borrowed by somebody else
shows in the tail. "decode" is the decoder with argmax; "engine" has scheduler, sampling, text and events too, greedily and
with temperature, top-k, top-p and min-p. Between them a read-bandwidth probe is taken again and again, over memory of the kind
that the weights lie in (huge pages where the system gives them), and the rate at which a step of one row reads the weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from backends.base import Cancel, Request, Sampling, Step
from backends.engine.loop import Engine
from backends.kernels.cpu_memory import mapped
from backends.registry import load_model
from gainz_ui.services.doctor import cpu_name

SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--kv-type", default="auto")
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--contexts", type=numbers, default=[100])
    parser.add_argument("--rows", type=numbers, default=[1])
    parser.add_argument("--prefill", type=numbers, default=[512])
    parser.add_argument("--streams", type=numbers, default=[])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    most = max(*args.contexts, *args.prefill) + args.steps + 16
    model = load_model(args.model, kernels=args.kernels, threads=args.threads, kv_type=args.kv_type, context=most,
                       activations=args.activations, streams=max(*args.rows, *args.streams, 1), prefix_cache=False)
    decoder = model.decoder
    probes = [bandwidth()]
    report = {"model": str(args.model), "machine": machine(), "kernels": model.info.kernels, "kv_type": decoder.kv.kv_type,
              "weights_bytes": decoder.arch.weights_bytes(), "prefill": [], "decode": [], "engine": []}
    for tokens in args.prefill:
        best = min(prefill(decoder, tokens) for _ in range(args.repeat))
        report["prefill"].append({"tokens": tokens, "tokens_per_second": round(tokens / best, 1)})
    for context in args.contexts:
        for rows in args.rows:
            report["decode"].append(decode(decoder, context, rows, args.steps))
            probes.append(bandwidth())
    for streams in args.streams:
        for sampling in (Sampling(), SAMPLED):
            report["engine"].append(through_engine(model, streams, sampling, args.steps))
            probes.append(bandwidth())
    report["read_bandwidth_gb_per_second"] = [round(probe / 1e9, 1) for probe in probes]
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def machine() -> str:
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


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
        tokens = [int(row[-1].numpy().argmax()) for row in logits]
        times.append(time.perf_counter() - start)
    for slot in slots:
        decoder.release(slot)
    return {"context": context, "rows": rows, **summary(times, rows),
            "weights_gb_per_second": round(decoder.arch.weights_bytes() / statistics.median(times[3:]) / 1e9, 1)}


def summary(times: list[float], rows: int) -> dict:
    """Of steps; the first ones are recorded and checked, and do not count."""
    times = sorted(times[3:])
    median = statistics.median(times)
    return {"fastest_ms": round(times[0] * 1e3, 3), "median_ms": round(median * 1e3, 3),
            "p90_ms": round(times[int(len(times) * 0.9)] * 1e3, 3), "tokens_per_second": round(rows / median, 1)}


def through_engine(model, streams: int, sampling: Sampling, steps: int) -> dict:
    """Steps of the engine's loop in which every stream gets one token."""
    engine, times, produced = Engine(), [], 0

    def sink(event) -> None:
        nonlocal produced
        produced += len(event.ids)

    engine.attach(model)
    for number in range(streams):
        wanted = replace(sampling, max_tokens=steps, ignore_eos=True, seed=number)
        engine.submit(model, Request(tuple((7919 * i + number) % 9973 for i in range(1, 81)), wanted), Cancel(), sink)
    while True:
        before, start = produced, time.perf_counter()
        if not engine.step():
            break
        if produced - before == streams:
            times.append(time.perf_counter() - start)
    engine.detach(model)
    return {"streams": streams, "sampling": "greedy" if sampling.temperature == 0 else "temperature, top-k, top-p, min-p",
            **summary(times, streams)}


def bandwidth(size: int = 1 << 28) -> float:
    """Bytes a second of the best of several sums over a buffer far larger than the caches."""
    data = mapped(size).view(torch.int64).fill_(1)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return size / best


if __name__ == "__main__":
    main()
