"""Plain against drafted decoding of the same model, in turns: what lookup brings where a text is copied, and what it costs where
nothing repeats.

    python -m benchmarks.speculation MODEL [--dtype bfloat16] [--pairs 5] [--tokens 256]

Each pair is one plain and one drafted answer to the same question, the order changing from pair to pair; the ratio is that of
their decode times, token for token the same text. The first pair warms up and does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backends.base import Cancel, DraftSpec, Event, Message, Request, Sampling
from backends.registry import load_model

LINES = [f"    {name}_{verb} = {verb}({name}, limit={limit})  # keep {name} below {limit}" for name, verb, limit in (
    ("river", "measure", 40), ("harbour", "count", 12), ("meadow", "weigh", 7), ("engine", "sample", 300), ("ledger", "read", 16),
    ("window", "open", 2), ("bridge", "cross", 81), ("garden", "water", 5), ("letter", "send", 60), ("signal", "trace", 9))]
COPIED = "def collect(limit):\n" + "\n".join(LINES) + "\n    return river_measure\n"
EDIT = f"Here is a Python function.\n\n{COPIED}\nHere is the same function, renamed to gather:\n\ndef gather(limit):\n{LINES[0]}\n"


@dataclass(frozen=True)
class Workload:
    name: str
    prompt: str | tuple[Message, ...]
    sampling: Sampling
    drafts: tuple[str, ...]
    expected: str


def workloads(tokens: int, own: str) -> Iterator[Workload]:
    yield Workload("copy-heavy edit", EDIT, Sampling(max_tokens=tokens, ignore_eos=True), ("lookup",),
                   "at least 1.7 in bfloat16, 1.5 in 4 bits")
    yield Workload("random text, nothing repeats", "Random words:", Sampling(temperature=3.0, seed=7, max_tokens=tokens,
                                                                            ignore_eos=True), ("lookup", own, f"lookup+{own}"),
                   "at least 0.97")
    yield Workload("story", (Message("user", "Tell a story about a lighthouse keeper."),),
                   Sampling(temperature=0.7, seed=3, max_tokens=tokens, ignore_eos=True), ("lookup",), "at least 0.97")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype, kernels=args.kernels, threads=args.threads, context=2048, streams=2)
    report: dict[str, Any] = {"model": str(args.model), "kernels": model.info.kernels, "rows": []}
    for work in workloads(args.tokens, model.info.name):
        for draft in work.drafts:
            row = {"workload": work.name, "draft": draft, "expected": work.expected, **pairs(model, work, draft, args.pairs)}
            report["rows"].append(row)
            print(json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    model.close()


def pairs(model: Any, work: Workload, draft: str, count: int) -> dict[str, Any]:
    ratios, speeds, told, first = [], {"plain": [], "drafted": []}, None, None
    for turn in range(count + 1):
        order = ("plain", "drafted") if turn % 2 else ("drafted", "plain")
        took, ids = {}, {}
        for kind in order:
            last, ids[kind] = answer(model, work, DraftSpec(draft) if kind == "drafted" else None)
            took[kind] = last.timing.decode_seconds
            told = last.usage.speculation or told
        if ids["plain"] != ids["drafted"]:
            raise SystemExit("The drafted answer is another one than the plain answer.")
        if turn == 0:
            first = took["plain"] / took["drafted"]
            continue
        ratios.append(took["plain"] / took["drafted"])
        for kind in order:
            speeds[kind].append((len(ids[kind]) - 1) / took[kind])
    return {"ratio": round(statistics.median(ratios), 3), "ratios": [round(ratio, 3) for ratio in ratios], "first": round(first, 3),
            **{kind: round(statistics.median(values), 1) for kind, values in speeds.items()},
            "acceptance": told.acceptance, "tokens_per_pass": told.tokens_per_pass, "speedup_told": told.speedup,
            "lengths": asdict(told)["lengths"], "resting": told.resting}


def answer(model: Any, work: Workload, draft: DraftSpec | None) -> tuple[Event, list[int]]:
    ids: list[int] = []
    for event in model.generate(Request(work.prompt, work.sampling, draft), Cancel()):
        ids += event.ids
        if event.last:
            return event, ids
    raise SystemExit("The answer did not end.")


if __name__ == "__main__":
    main()
