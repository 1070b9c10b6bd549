"""What is measured: the arms that run, and which of them are compared under which promise. Data only, in the issue's order.

An arm is one engine at one piece of work on one model. A comparison is a ratio of two arms of the same round, where a list of
opponents stands for the best of them. ``scale`` "read" multiplies tokens by the bytes that each one reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Arm:
    """``figure``: "decode" and "prefill" are tokens a second, "step" and "first" seconds, "probe" bytes a second."""

    peer: str
    model: str
    figure: str = "decode"
    prompt: int = 32                    # tokens
    tokens: int = 96
    streams: int = 1
    options: Mapping[str, object] = field(default_factory=dict)      # of Gainz's load
    fresh: bool = True                  # another prompt in each round, so that no cache can answer
    note: str = ""

    @property
    def key(self) -> str:
        return f"{self.peer} {self.model}{f' {self.note}' if self.note else ''}"

    @property
    def context(self) -> int:
        return -(-(self.prompt + self.tokens + 16) // 256) * 256


@dataclass(frozen=True)
class Comparison:
    ours: str
    theirs: tuple[str, ...]
    target: float
    label: str
    most: bool = False                  # the ratio may be at most the target, not at least
    scale: str = ""


@dataclass(frozen=True)
class Workload:
    name: str
    title: str
    arms: tuple[Arm, ...]
    comparisons: tuple[Comparison, ...]


Q41, Q40, PURE, OWN, BF16 = "starter-q4_1", "starter-q4_0", "starter-q4_0-pure", "starter-g64-h4", "starter-bf16"
BIG, BIG16 = "1.2b-q4_0", "1.2b-bf16"


def decode_starter() -> Workload:
    arms = [Arm("gainz", OWN), Arm("gainz", Q41), Arm("llama", Q41), Arm("llama", Q40), Arm("llama", PURE), Arm("openvino", Q41)]
    return Workload("decode-starter", "decode, one stream, starter", tuple(arms), (
        Comparison(f"gainz {OWN}", (f"llama {Q41}", f"llama {Q40}"), 1.8, "own 4 bits, group 64, 4-bit head / llama.cpp's best"),
        Comparison(f"gainz {OWN}", (f"llama {PURE}",), 1.8, "the same / llama.cpp Q4_0 with a Q4_0 head"),
        Comparison(f"gainz {OWN}", (f"openvino {Q41}",), 3.0, "the same / OpenVINO GenAI"),
        Comparison(f"gainz {Q41}", (f"llama {Q41}",), 2.0, "Q4_1 file / llama.cpp, same file"),
        Comparison(f"gainz {Q41}", (f"llama {Q40}",), 1.2, "Q4_1 file / llama.cpp Q4_0")))


def decode_big() -> Workload:
    arms = (Arm("gainz", BIG, tokens=64), Arm("llama", BIG, tokens=64), Arm("probe", "memory", "probe", tokens=3))
    return Workload("decode-1.2b", "decode, one stream, 1.2 B Q4_0", arms, (
        Comparison(f"gainz {BIG}", (f"llama {BIG}",), 1.05, "Q4_0 file / llama.cpp, same file"),
        Comparison(f"gainz {BIG}", ("probe memory",), 0.92, "bytes read / read-bandwidth probe", scale="read")))


def decode_bf16() -> Workload:
    arms = (Arm("gainz", BF16, tokens=48), Arm("transformers", BF16, tokens=48), Arm("vllm", BF16, tokens=48))
    return Workload("decode-bf16", "decode, one stream, starter bf16", arms, (
        Comparison(f"gainz {BF16}", (f"transformers {BF16}",), 3.2, "/ transformers"),
        Comparison(f"gainz {BF16}", (f"vllm {BF16}",), 2.0, "/ vLLM CPU")))


def streams() -> Workload:
    work = {"streams": 16, "tokens": 48}
    arms = (Arm("gainz", Q41, **work), Arm("gainz", OWN, **work), Arm("llama", Q41, **work), Arm("llama", Q40, **work),
            Arm("vllm", BF16, **work))
    best = (f"llama {Q41}", f"llama {Q40}")
    return Workload("streams", "16 streams, starter, whole engine", arms, (
        Comparison(f"gainz {Q41}", (f"vllm {BF16}",), 3.0, "Q4_1 file / vLLM CPU bf16"),
        Comparison(f"gainz {Q41}", best, 2.0, "Q4_1 file / llama.cpp parallel, its best"),
        Comparison(f"gainz {OWN}", (f"vllm {BF16}",), 3.0, "own 4 bits / vLLM CPU bf16"),
        Comparison(f"gainz {OWN}", best, 2.0, "own 4 bits / llama.cpp parallel, its best")))


def prefill(name: str, length: int) -> Workload:
    work = {"figure": "prefill", "prompt": length, "tokens": 1}
    if name == "starter":
        ours, opponents = [Q41, BF16], [("llama", Q41), ("llama", Q40), ("openvino", Q41), ("transformers", BF16)]
    elif name == "1.2b":
        ours, opponents = [BIG], [("llama", BIG)]
    else:
        ours, opponents = [BIG16], [("transformers", BIG16)]
    arms = [Arm("gainz", model, **work) for model in ours] + [Arm(peer, model, **work) for peer, model in opponents]
    keys = [f"{peer} {model}" for peer, model in opponents]
    floats = [key for key in keys if key.endswith("bf16")]                # a float model is held against float peers
    compared = [Comparison(f"gainz {model}", tuple(floats if model.endswith("bf16") else keys), 1.1, f"{model} / the best peer")
                for model in ours]
    return Workload(f"prefill-{name}-{length}", f"prefill, {length:,} tokens, {name}", tuple(arms), tuple(compared))


def rows() -> Workload:
    arms = (Arm("gainz", BIG, "step", streams=4, tokens=32, note="4 rows"), Arm("gainz", BIG, "step", tokens=32, note="1 row"))
    return Workload("rows", "4 rows against 1, 1.2 B Q4_0", arms, (
        Comparison(f"gainz {BIG} 4 rows", (f"gainz {BIG} 1 row",), 1.35, "time of a step", most=True),))


def load() -> Workload:
    arms = tuple(Arm(peer, Q41, "first", prompt=8, tokens=1) for peer in ("gainz", "llama"))
    return Workload("load", "load to first token, starter Q4_1, warm process", arms, (
        Comparison(f"gainz {Q41}", (f"llama {Q41}",), 1.0, "seconds / llama.cpp's", most=True),))


def context(name: str, model: str, kv_type: str, target: float) -> Workload:
    work = {"figure": "step", "tokens": 32, "fresh": False, "options": {"kv_type": kv_type, "context": 4352}}
    long, short = Arm("gainz", model, prompt=4000, note="4,000", **work), Arm("gainz", model, prompt=100, note="100", **work)
    return Workload(f"context-{name}", f"step at 4,000 tokens against 100, {name}", (long, short), (
        Comparison(long.key, (short.key,), target, f"time of a step, {kv_type} KV", most=True),))


def workloads() -> tuple[Workload, ...]:
    """All of them, in the order of the table."""
    lengths = [prefill(name, length) for name in ("starter", "1.2b", "1.2b-bf16") for length in (512, 2000)]
    return (decode_starter(), decode_big(), decode_bf16(), streams(), *lengths, rows(), load(),
            context("1.2b-int8", BIG, "int8", 1.6), context("1.2b-f16", BIG, "float16", 1.6),
            context("starter-int8", Q41, "int8", 1.7), context("starter-f16", Q41, "float16", 2.2))
