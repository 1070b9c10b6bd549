"""Memory a load will need against memory there is, before anything is read. Light: headers, file sizes and arithmetic.

    weights    floats in the compute type; quantized weights keep their bits (2 and 3 become 4; 5, 6 and 7 become 8)
    kv         context × streams × bytes of a token, in whole pages, at most `MOST` of what is free beside the weights:
               streams share the pages, so one full context is the least, and a full one for each stream the most
    workspace  activations of one prompt chunk, one row of logits for each stream, and what the libraries keep

Context 0 means: the trained one, or less where that of all streams would take more than half of what is free beside the
weights. The same rule as in `engine/room.py`, which decides once the weights are there. An estimate errs upwards; what a
load really took stands in `ModelInfo.peak_bytes` beside it.
"""

from __future__ import annotations

from backends.base import LocalOptions, MemoryEstimate, ModelDir
from backends.facts import ModelFacts, Stored, describe, pages
from backends.memory import gpu_memory, machine_memory, resident, torch_is_for

__all__ = ["ModelFacts", "describe", "estimate", "estimate_facts", "free_memory", "machine_memory", "resident", "resolve"]

WIDTH = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
CHUNK = 256                             # most rows of one pass
BASE = 48 << 20                         # libraries' own buffers, tokenizer, bookkeeping
AUTOMATIC, MOST = 0.5, 0.9              # of the memory beside the weights: what an automatic context takes, and any
UNKNOWN_CONTEXT = 2048                  # where the files do not say what the model was trained for


def estimate(model: ModelDir, options: LocalOptions, free: int | None = None) -> MemoryEstimate:
    """``free`` in bytes; None: what the chosen device has now. Raises what `describe` raises."""
    return estimate_facts(describe(model), options, free)


def estimate_facts(facts: ModelFacts, options: LocalOptions, free: int | None = None) -> MemoryEstimate:
    device, dtype, kv_type = resolve(options)
    free = free_memory(device) if free is None else free
    weights, workspace = weights_bytes(facts, dtype), workspace_bytes(facts, options, dtype)
    token, trained = token_bytes(facts, kv_type), facts.trained_context or UNKNOWN_CONTEXT
    spare = max(0, free - weights - workspace)
    most = _whole_pages(MOST * spare / token) if token else max(trained, options.context)
    fits = _whole_pages(AUTOMATIC * spare / (token * options.streams)) if token else trained
    context = options.context or max(16, min(trained, fits))
    kv = token * max(pages(context), min(most, pages(context) * options.streams))
    return MemoryEstimate(weights, kv, workspace, free, context, min(trained, most), _notes(facts, options, trained))


def resolve(options: LocalOptions) -> tuple[str, str, str]:
    """(device, compute type, type of the cache) that "auto" stands for."""
    device = options.device if options.device != "auto" else "cuda" if torch_is_for("cuda") and gpu_memory() else "cpu"
    dtype = options.dtype if options.dtype != "auto" else "float32" if options.kernels == "ref" else "bfloat16"
    return device, dtype, options.kv_type if options.kv_type != "auto" else dtype


def free_memory(device: str) -> int:
    """Bytes. Devices that share the machine's memory, and those whose driver says nothing, count as the machine."""
    gpu = gpu_memory() if device == "cuda" else None
    return gpu[1] if gpu is not None else machine_memory()[1]


def weights_bytes(facts: ModelFacts, dtype: str) -> int:
    return sum(kind.elements * WIDTH[dtype] if kind.floating else _packed(kind) for kind in facts.stored)


def _packed(kind: Stored) -> int:
    """Codes below 16 take a nibble, others a byte. Scales: a bit or two a weight where the file packs tighter."""
    bits = 8 * kind.bytes / kind.elements if kind.elements else 0.0
    room = 6.0 if bits < 4 else 9.0 if 5.05 < bits < 8 else 0.0
    return max(kind.bytes, int(kind.elements * room / 8))


def token_bytes(facts: ModelFacts, kv_type: str) -> int:
    """Bytes of one token over all layers; int8 adds a float32 scale and offset for key and value of each head."""
    extra = 16 if kv_type == "int8" else 0
    return sum(layer.heads * ((layer.key_width + layer.value_width) * WIDTH[kv_type] + extra) for layer in facts.layers)


def workspace_bytes(facts: ModelFacts, options: LocalOptions, dtype: str) -> int:
    attention = facts.head_dim * (facts.heads + 2 * facts.kv_heads)
    row = 4 * (6 * facts.hidden + 3 * facts.inner + 2 * attention)
    return BASE + CHUNK * row + 3 * options.streams * facts.vocab * 4


def _whole_pages(tokens: float, page: int = 16) -> int:
    return int(tokens) // page * page


def _notes(facts: ModelFacts, options: LocalOptions, trained: int) -> tuple[str, ...]:
    notes = []
    if not facts.layers:
        notes.append("the files do not say how many layers and heads there are: the cache is not counted")
    if not facts.trained_context:
        notes.append(f"the files do not say which context the model was trained for: {UNKNOWN_CONTEXT} is assumed")
    if options.context > trained:
        notes.append(f"context {options.context} is beyond the {trained} tokens that the model was trained for")
    return tuple(notes)
