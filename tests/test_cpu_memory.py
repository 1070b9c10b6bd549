"""The arena of packed weights: pieces do not overlap, begin at cache lines, and their memory goes when they do."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from backends.kernels import cpu_memory
from backends.kernels.cpu_memory import BLOCK, HUGE, LINE, Arena
from tests.gguf_maker import byte_vocabulary, random_blocks, write


@pytest.fixture(params=["advised", "refused"])
def arena(request, monkeypatch):
    if request.param == "refused":
        monkeypatch.setattr(cpu_memory, "allowed", lambda: False)
    elif not cpu_memory.allowed():
        pytest.skip("this system gives no huge pages")
    return Arena()


def test_pieces_are_apart_aligned_and_zero(arena):
    sizes = [1, 63, 64, 65, 4096, BLOCK // 8, BLOCK // 8 + 1, 3 * HUGE + 5, 1000] + [BLOCK // 9] * 9
    pieces = [arena.take(size) for size in sizes]
    spans = sorted((piece.data_ptr(), piece.numel()) for piece in pieces)
    assert [piece.numel() for piece in pieces] == sizes
    assert all(not start % LINE for start, _ in spans)
    assert all(start + size <= later for (start, size), (later, _) in zip(spans, spans[1:]))
    assert not any(piece.any() for piece in pieces)


def test_kept_values_are_a_copy(arena):
    values = torch.arange(60, dtype=torch.float16).view(6, 10).t()
    kept = arena.keep(values)
    assert kept.is_contiguous() and torch.equal(kept, values) and kept.data_ptr() != values.data_ptr()


def test_memory_comes_and_goes(arena):
    process = psutil.Process()
    before = process.memory_info().rss
    held = arena.take(20 * HUGE).fill_(1)
    assert process.memory_info().rss - before > 19 * HUGE
    del held
    gc.collect()
    assert process.memory_info().rss - before < 2 * HUGE


def test_a_loaded_model_holds_its_weights_once_and_the_cache_it_has_written(tmp_path):
    """A 4-bit Llama of 67 million weights, as `benchmarks/memory.py` measures the 1.2 B: nothing near a second copy, in
    whatever type, and of eight contexts only the one that is full."""
    hidden, inner, layers, vocab = 1024, 4096, 4, 320
    shapes = {"token_embd": (vocab, hidden)} | {
        f"blk.{layer}.{name}": shape for layer in range(layers) for name, shape in {
            "attn_q": (hidden, hidden), "attn_k": (hidden, hidden), "attn_v": (hidden, hidden), "attn_output": (hidden, hidden),
            "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}.items()}
    tensors = {f"{name}.weight": (random_blocks("Q4_0", *shape, seed=i), "Q4_0") for i, (name, shape) in enumerate(shapes.items())}
    norms = ["output_norm", *(f"blk.{layer}.{name}" for layer in range(layers) for name in ("attn_norm", "ffn_norm"))]
    tensors |= {f"{name}.weight": np.ones(hidden, np.float32) for name in norms}
    file = write(tmp_path / "m.gguf", "llama", {
        "block_count": layers, "embedding_length": hidden, "feed_forward_length": inner, "attention.head_count": 16,
        "context_length": 2048, "attention.layer_norm_rms_epsilon": 1e-5, **byte_vocabulary(vocab)}, tensors)
    done = subprocess.run([sys.executable, "-m", "benchmarks.memory", str(file), "--context", "512", "--full", "1"],
                          capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    found = json.loads(done.stdout)
    assert found["weights"] > 36 and found["a_full_context"] in (8, 16)      # 512 tokens of 4 layers, in 16 or 32 bits
    twin = 64                                                                 # MiB of the same weights in 8 bits
    assert found["load_peak"] < found["weights"] + twin
    assert found["full"][0]["peak"] < found["weights"] + found["a_full_context"] + 1.5 * twin   # with a pass's own memory
