"""How a draft that reads states takes them in: x_t = embed(id_t) + J · s_{t-1}, before its first layer.

s_{t-1} [H] is what the head reads one place earlier: the teacher's last hidden state behind the final norm, or for a guess behind
another guess the draft's own; s_{-1} = 0. The state of the place before tells what its token alone does not: what the teacher
has made of all the text up to there (Li et al. 2024, "EAGLE", which multiplies both by one matrix [H, 2H]; here the embedding
stays as the layers know it, so that a draft begins as what leaving layers out has made of it). Knows tensors and layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from backends.compress.stream import Stream
from backends.engine.arch import decoder

JOIN = f"{decoder.JOIN}.weight"     # J's name in the draft's file, float16 [H, H]


def shifted(states: Tensor) -> Tensor:
    """[…, T, H] → the same shape: every place has the state of the one before it, the first one zeros."""
    return pad(states[..., :-1, :], (0, 0, 1, 0))


@contextmanager
def joined(layer: nn.Module, weight: Tensor, before: Tensor | None) -> Iterator[None]:
    """Inside, the input of ``layer`` [B, T, H] has J · ``before`` added: weight [H, H], before [B, T, H], shifted already; None:
    nothing is added. At the layer and not at the embedding, since some families scale that on the way."""
    if before is None:
        yield
        return

    def add(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        extra = linear(before, weight)
        if args:
            return (args[0] + extra, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + extra}
    hook = layer.register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def join_stream(stream: Stream, weight: Tensor, states: Sequence[Tensor]) -> None:
    """The same for calibration windows that are at their first layer. ``states``: one [T, H] a window, not shifted."""
    matrix = weight.to(stream.device, torch.float32)
    for number, found in enumerate(states):
        before = shifted(found.to(stream.device, torch.float32))
        stream.hidden[number] = stream.hidden[number] + linear(before, matrix)
