"""Llama shapes with random weights, made on the device: what `benchmarks/gpu.py` loads, and how steps of them are timed.

No file is read and nothing is fetched. Knows shapes, decoders and clocks; nothing of tables or budgets.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backends.base import Cancel, Step, Vocab
from backends.engine import arch
from backends.engine.kv import PAGE, PagedKV
from backends.engine.runner import PagedDecoder
from backends.kernels import Ops, QWeight

BASE = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 128256,
        "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2, "attention_bias": False, "mlp_bias": False}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "1B": BASE | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                  "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
    "8B": BASE | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                  "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False},
    "tiny": BASE | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320,
                    "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}}
CHUNK = 512                  # tokens of a prompt in one pass


@dataclass(frozen=True)
class Format:
    """``bits`` 0: floats in the compute type. Symmetric groups, as GPTQ makes them; embeddings stay floats."""

    name: str
    bits: int = 0
    group: int = 128

    def bytes_per_weight(self) -> float:
        return 2.0 if not self.bits else self.bits / 8 + 2 / self.group


class RandomSource:
    """A `WeightSource` whose numbers keep activations near 1. ``read_bytes``: of matrices that a step of one row reads."""

    def __init__(self, config: Mapping[str, Any], format: Format, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.format, self.device, self.dtype = config, format, device, dtype
        self.read_bytes = 0
        self._draw = torch.Generator(device=device).manual_seed(1)

    def names(self) -> Collection[str]:
        return ()

    def tensor(self, name: str) -> Tensor:
        return torch.ones(self.config["hidden_size"], device=self.device)

    def linear(self, module: str) -> tuple[QWeight | Tensor, None]:
        shape, read = self._shape(module), module != "model.embed_tokens" or self.config["tie_word_embeddings"]
        quantized = self.format.bits and module not in ("model.embed_tokens", "lm_head")
        self.read_bytes += int(read * shape[0] * shape[1] * (self.format.bytes_per_weight() if quantized else 2))
        return (self._quantized(*shape) if quantized else self._floats(*shape)), None

    def close(self) -> None: ...

    def _shape(self, module: str) -> tuple[int, int]:
        config, last = self.config, module.rsplit(".", 1)[-1]
        hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        q, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
        return {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q),
                "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}.get(
                    last, (config["vocab_size"], hidden))

    def _floats(self, n: int, k: int) -> Tensor:
        return torch.randn(n, k, generator=self._draw, device=self.device, dtype=self.dtype).mul_(k ** -0.5)

    def _quantized(self, n: int, k: int) -> QWeight:
        bits, group = self.format.bits, min(self.format.group, k)
        groups = -(-k // group)
        codes = torch.randint(0, 2 ** bits, (n, k), generator=self._draw, device=self.device, dtype=torch.uint8)
        spread = 2 ** bits / 12 ** 0.5                        # of codes about their mean
        scale = torch.rand(n, groups, generator=self._draw, device=self.device).add_(0.5).mul_(k ** -0.5 / spread).half()
        zero = torch.full((n, groups), 2 ** (bits - 1), dtype=torch.uint8, device=self.device)
        return QWeight(codes, scale, zero, None, bits, group)


def make_decoder(shape: str, format: Format, ops: Ops, tokens: int, kv_type: str) -> tuple[PagedDecoder, RandomSource]:
    """A decoder with pages for ``tokens`` tokens in all."""
    config = SHAPES[shape]
    source = RandomSource(config, format, ops.device, ops.dtype)
    built = arch.build(source, ops, lambda _: None, Cancel())
    kv = PagedKV(built.layers, -(-tokens // PAGE) + 32, kv_type, ops.device)
    vocab = Vocab(config["vocab_size"], frozenset({2}), "random")
    return PagedDecoder(built, kv, vocab, config["max_position_embeddings"], device=ops.device, prefixes=False), source


def fill(decoder: PagedDecoder, tokens: int) -> Any:
    """A slot that holds ``tokens`` tokens."""
    slot, vocab = decoder.open([0], reuse=False), decoder.vocab.size
    for start in range(0, tokens, CHUNK):
        part = [(7919 * i + 11) % vocab for i in range(start, min(start + CHUNK, tokens))]
        if not decoder.reserve(slot, len(part)):
            raise RuntimeError("The benchmark gave itself too few pages.")
        rows = decoder.extend([Step(slot, part, 1)])[0]
    if not bool(torch.isfinite(rows).all()):
        raise RuntimeError("The model's output is not a number.")
    return slot


def prefill_seconds(decoder: PagedDecoder, tokens: int, rounds: int = 3) -> float:
    best = float("inf")
    for _ in range(rounds + 1):                               # the first compiles
        began = time.perf_counter()
        slot = fill(decoder, tokens)
        best = min(best, time.perf_counter() - began)
        decoder.release(slot)
    return best


def decode_seconds(decoder: PagedDecoder, rows: int, context: int, steps: int = 48, warm: int = 8) -> float:
    """The median step of ``rows`` sequences after ``context`` tokens each; logits arrive on the host."""
    slots = [fill(decoder, context) for _ in range(rows)]
    tokens, times = [11] * rows, []
    for _ in range(warm + steps):
        for slot in slots:
            decoder.reserve(slot, 1)
        began = time.perf_counter()
        found = decoder.extend([Step(slot, [token], 1) for slot, token in zip(slots, tokens)])
        times.append(time.perf_counter() - began)
        tokens = [int(row[-1].argmax()) for row in found]
    for slot in slots:
        decoder.release(slot)
    return statistics.median(times[warm:])
