"""The check at load: are the rows of interleaved, chunked steps what the model gives for each sequence alone?

Knows: random prompts, the model's own plain pass, and how far apart two ways to the same row may be. Small on purpose: some
thirty tokens, so that it costs little even on a large model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from backends.base import Decoder, NotSupported, Step, Vocab

LENGTHS = (21, 6, 8)                        # tokens of each prompt; the first crosses a page
CUTS = ((14, 18), (1, 4), (2, 3))           # where each is cut into three steps: none, one or more tokens go on from a cache
TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
QUANTIZED = 5e-2                            # a rounding of activations may fall the other way
SHARE = {True: 1.0, False: 0.8}             # rows that must agree: all in float32; else a router or a rounding may tip over


def prompts(vocab: Vocab, context: int) -> list[list[int]]:
    """The same few random prompts each time, drawn without touching torch's generator."""
    draw = torch.Generator().manual_seed(20240229)
    return [torch.randint(0, vocab.size, (min(n, context - 2),), generator=draw).tolist() for n in LENGTHS]


@torch.inference_mode()
def plain_rows(module: nn.Module, ids: Sequence[int]) -> Tensor:
    """float32 [n, V]: the model alone, by its own attention, without any cache."""
    rows = torch.tensor([list(ids)], device=next(module.parameters()).device)
    return module(input_ids=rows, use_cache=False).logits[0].to(torch.float32)


def served_rows(decoder: Decoder, asked: Sequence[Sequence[int]]) -> list[Tensor]:
    """float32 [n, V] of each prompt, through slots open together: three steps, before the last one taken back."""
    slots = [decoder.open(ids, reuse=False) for ids in asked]
    rows: list[list[Tensor]] = [[] for _ in asked]
    for turn in range(3):
        spans = [ids[slot.length:(*cuts, None)[turn]] for slot, ids, cuts in zip(slots, asked, CUTS)]
        if turn == 2:
            _take_back(decoder, slots, spans)
        for s, part in zip(_going(spans), _step(decoder, slots, spans)):
            rows[s].append(part)
    for slot in slots:
        decoder.release(slot)
    return [torch.cat(found) for found in rows]


def _take_back(decoder: Decoder, slots: Sequence, spans: Sequence[Sequence[int]]) -> None:
    lengths = [slot.length for slot in slots]
    _step(decoder, slots, [span[:1] * 2 for span in spans])
    for slot, length in zip(slots, lengths):
        decoder.truncate(slot, length)


def _going(spans: Sequence[Sequence[int]]) -> list[int]:
    return [s for s, span in enumerate(spans) if span]


def _step(decoder: Decoder, slots: Sequence, spans: Sequence[Sequence[int]]) -> list[Tensor]:
    steps = [Step(slots[s], spans[s], len(spans[s])) for s in _going(spans)]
    for step in steps:
        if not decoder.reserve(step.slot, len(step.tokens)):
            raise RuntimeError("the check at load was given too little room")
    return decoder.extend(steps) if steps else []


def agree(expected: Sequence[Tensor], got: Sequence[Tensor], dtype: torch.dtype, exact: bool, what: str) -> None:
    """Raises NotSupported with the distance where too many rows are further apart than rounding explains."""
    apart = torch.cat([distance(a[:, :b.shape[1]], b) for a, b in zip(expected, got)])
    limit = TOLERANCE[dtype] if exact else max(TOLERANCE[dtype], QUANTIZED)
    strict = exact and dtype == torch.float32
    if not torch.isfinite(apart).all() or (apart <= limit).float().mean() < SHARE[strict]:
        raise NotSupported(f"in the check at load {what}", largest_relative_difference=f"{float(apart.max()):.1e}",
                           allowed=f"{limit:.0e}", remedy="")


def distance(a: Tensor, b: Tensor) -> Tensor:
    """[n]: of each row the largest difference, relative to the largest deviation of a logit from the row's mean."""
    scale = (a - a.mean(-1, keepdim=True)).abs().amax(-1).clamp_min(1e-6)
    return (a - b).abs().amax(-1) / scale
