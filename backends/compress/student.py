"""The draft while it learns: a transformers module of few layers whose embeddings and head are its teacher's and stay as they are.

Only layers and final norms are trained, in float32; products run in bfloat16 where that is faster. One that reads states learns
J, too, and leaves the final norm as it is: whoever runs it norms the teacher's states with it. Knows modules and the distance to
the teacher over the draft's ids; nothing of data, schedules or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from backends.base import NotSupported
from backends.compress.join import JOIN, joined, shifted
from backends.compress.skeleton import Skeleton, matrix_of
from backends.engine.draft_weights import four_bits
from backends.engine.weights import WeightSource

ROWS = 512              # rows whose logits are in memory at once


class Student:
    """``source``: the pruned model. ``trained``: name → parameter. ``join``: J of a student that reads states, float32 [H, H],
    zeros at first, for states whose numbers have been levelled; else None. Raises NotSupported where the output
    head is more than a matrix and a softcap."""

    def __init__(self, source: WeightSource, device: torch.device, precision: str, reads_states: bool = False) -> None:
        self.skeleton, self.device, self.precision = Skeleton(source, device), device, precision
        self.skeleton.fill()
        for index in range(len(self.skeleton.layers)):
            self.skeleton.load(index)
        self.model = self.skeleton.model
        inside, head = self.skeleton.prefix + ".", self.skeleton.head
        outside = self.skeleton.path(head) + "." if head is not None else "\0"
        self.trained: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in self.model.named_parameters()
            if name.startswith(inside) or parameter.ndim == 1 and not name.startswith(outside) and not reads_states}
        width = self.model.get_input_embeddings().weight.shape[1]
        self.join = nn.Parameter(torch.zeros(width, width, device=device)) if reads_states else None
        self.sizes = torch.ones(width, device=device)       # of the numbers of a state, as `join` meets them
        if self.join is not None:
            self.trained[JOIN] = self.join
        for parameter in self.trained.values():
            parameter.requires_grad_(True)
        self.cap = getattr(self.skeleton.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        self._check_head()

    def autocast(self):
        return nullcontext() if self.precision == "float32" else torch.autocast(self.device.type, torch.bfloat16)

    def hidden(self, windows: Tensor, before: Tensor | None = None) -> Tensor:
        """float32 [B, T, H], as the head reads them, of ids [B, T]. ``before``: float [B, T, H], at every place the state of the
        one before it, for a student that reads states; None: as if all were 0."""
        given = None if before is None else before.to(self.device, torch.float32) * self.sizes
        with self.autocast(), joined(self.skeleton.layers[0], self.join, given):
            return self.model.base_model(input_ids=windows, use_cache=False).last_hidden_state.float()

    @torch.no_grad()
    def level(self, states: Tensor) -> None:
        """From here on J meets every number of a state at the size of the embeddings', by powers of two, so that nothing is rounded:
        J learns at the pace of the layers then, and a few large numbers do not drown the token. ``states``: some, [n, H]."""
        theirs = states.to(self.device, torch.float32).square().mean(0).sqrt()
        own = self.model.get_input_embeddings().weight.float().square().mean().sqrt()
        self.sizes = torch.exp2(torch.log2(own / theirs.clamp_min(1e-6)).round())

    def chained(self, windows: Tensor, hidden: Tensor) -> Tensor:
        """`hidden` on the student's own states of an earlier pass, [B, T, H], as for a guess behind a guess. No slope goes back
        into that pass (Zhang et al. 2024, "HASS")."""
        return self.hidden(windows, shifted(hidden.detach()))

    def head(self, ids: Sequence[int] | None = None) -> Tensor:
        """Rows of the head in the type of the products, [n, H]; None: all of them."""
        matrix = matrix_of(self.skeleton.head).detach()
        rows = matrix if ids is None else matrix[torch.tensor(ids, device=matrix.device)]
        return rows.to(torch.float32 if self.precision == "float32" else torch.bfloat16).contiguous()

    def own_head(self, ids: Sequence[int] | None = None) -> Tensor:
        """The rows that the draft itself reads: some are borrowed in 4 bits, all of them as they are."""
        rows = self.head(ids)
        return rows if ids is None else four_bits(rows.float().cpu()).dequantize(rows.dtype).to(rows.device)

    def values(self) -> dict[str, Tensor]:
        """As files have them: J for states as they are."""
        found = {name: parameter.detach() for name, parameter in self.trained.items()}
        return found if self.join is None else found | {JOIN: found[JOIN] * self.sizes}

    @torch.no_grad()
    def set(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.trained.items():
            parameter.copy_(values[name].to(self.device) / self.sizes if name == JOIN else values[name])

    @torch.no_grad()
    def _check_head(self) -> None:
        head = self.skeleton.head
        plain = head is not None and matrix_of(head) is not None and getattr(head, "bias", None) is None
        ids = torch.arange(1, 9, device=self.device)[None] % self.skeleton.config.get_text_config(decoder=True).vocab_size
        if plain:
            given = self.model(input_ids=ids, use_cache=False).logits[0].float()
            found = capped(self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0] @ matrix_of(head).T, self.cap)
            plain = torch.allclose(given, found, rtol=1e-3, atol=1e-3 * float(given.abs().max()))
        if not plain:
            raise NotSupported(f"The output head of {type(self.model).__name__} is more than a matrix: no draft can share it.",
                               remedy="Leave layers out without training (minutes 0), or choose another model.")


class Borrowed:
    """A `WeightSource`: trained values where there are some, else what ``source`` has."""

    def __init__(self, source: WeightSource, values: Mapping[str, Tensor]) -> None:
        self.source, self.values, self.config = source, dict(values), source.config

    def names(self) -> Any:
        return self.source.names()

    def tensor(self, name: str) -> Tensor:
        return self.values[name] if name in self.values else self.source.tensor(name)

    def linear(self, module: str) -> Any:
        weight, bias = f"{module}.weight", f"{module}.bias"
        if weight in self.values:
            return self.values[weight], self.values.get(bias)
        return self.source.linear(module)

    def close(self) -> None:
        """The other source is its owner's to close."""


def capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


# ---------------------------------------------------------------------------------------------- the distance
class _Divergence(torch.autograd.Function):
    """Mean forward KL over rows, nats: sum p (log p - log q) with p, q over the same ids. The gradient is made in the
    same sweep, piece by piece, so that no whole matrix of logits is ever kept."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, own: Tensor, head: Tensor, cap: float | None) -> Tensor:
        gradient, total = torch.empty_like(student), student.new_zeros(())
        for at in range(0, len(student), ROWS):
            rows = slice(at, at + ROWS)
            logits = capped((student[rows].to(own.dtype) @ own.T).float(), cap)
            log_p = log_softmax(capped((teacher[rows].to(head.dtype) @ head.T).float(), cap), -1)
            log_q, p = log_softmax(logits, -1), log_p.exp()
            total += (p * log_p.sub_(log_q)).sum()
            slope = log_q.exp_().sub_(p)
            if cap is not None:
                slope *= 1 - (logits / cap).square()
            gradient[rows] = (slope.to(own.dtype) @ own).float()
        ctx.save_for_backward(gradient / len(student))
        return total / len(student)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.saved_tensors[0] * outer, None, None, None, None


def divergence(student: Tensor, teacher: Tensor, own: Tensor, head: Tensor, cap: float | None = None) -> Tensor:
    """Mean over rows of KL(teacher ‖ student), nats. student float32 [n, H], teacher [n, H], their heads [V, H] each."""
    return _Divergence.apply(student, teacher, own, head, cap)
