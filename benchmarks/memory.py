"""How much memory a model takes: while it loads, and with so many contexts of its cache written to the last token.

    python -m benchmarks.memory MODEL [--context 2048] [--streams 8] [--full 1,8]

Everything is counted above a process that has its libraries already and no model: resident bytes, and the most there ever
were, which is what a machine must have. A GGUF file's own pages in the system's cache are not the process's.
Linux and macOS. Prints JSON, in MiB.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import resource
from pathlib import Path

import psutil

MIB = 1 << 20
LIBRARIES = ("torch", "numpy", "tokenizers", "jinja2", "backends.engine.assemble", "backends.engine.gguf_text",
             "backends.engine.gguf_weights", "backends.engine.local", "backends.kernels.cpu")
CHUNK = 256                 # tokens of a pass, as the engine has them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--full", default="1", help="how many contexts to fill, one figure after another")
    parser.add_argument("--kv-type", default="auto")
    args = parser.parse_args()
    for name in LIBRARIES:
        importlib.import_module(name)
    from backends.registry import load_decoder
    start = psutil.Process().memory_info().rss
    decoder = load_decoder(args.model, context=args.context, streams=args.streams, kv_type=args.kv_type)
    report = {"model": args.model, "context": args.context, "streams": args.streams, "kv_type": decoder.kv.kv_type,
              "weights": decoder.arch.weights_bytes() / MIB, "a_full_context": decoder.kv.bytes_per_token * args.context / MIB,
              "libraries": start / MIB, "load_peak": peak(start), "full": []}
    slots: list = []
    for count in map(int, args.full.split(",")):
        while len(slots) < count:
            slots.append(filled(decoder, args.context, len(slots)))
        report["full"].append({"contexts": count, "peak": peak(start)})
    print(json.dumps(report, indent=1))


def filled(decoder, context: int, number: int):
    """A slot with ``context`` tokens, each different from the same place of other slots, the last one decoded alone."""
    from backends.base import Step
    slot, tokens = decoder.open([0]), [(7919 * i + 13 * number + 11) % decoder.vocab.size for i in range(context)]
    for start in [*range(0, context - 1, CHUNK), context - 1]:
        part = tokens[start:min(start + CHUNK, context - (start < context - 1))]
        if not decoder.reserve(slot, len(part)):
            raise SystemExit("The KV cache is too small for so many full contexts.")
        decoder.extend([Step(slot, part, 1)])
    return slot


def peak(start: int) -> float:
    """MiB above ``start`` bytes. Linux: of this program alone, since ru_maxrss begins with what its parent had; it counts bytes
    on macOS."""
    status = Path("/proc/self/status")
    if status.exists():
        most = int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
    else:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (most - start) / MIB


if __name__ == "__main__":
    main()
