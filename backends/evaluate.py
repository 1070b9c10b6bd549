"""How far a model is from a reference, token by token: perplexity, KL divergence, agreement. Streamed: no logits stored.

Knows decoders and transformers modules through one small protocol. Says numbers with their uncertainty; what to conclude
from them is for the services.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from backends.base import (
    Cancel, ContextTooLong, Decoder, InvalidRequest, NotSupported, Progress, ProgressFn, Step, StepFailed, Vocab)

CHUNK = 128             # rows of logits at a time: 25 MB for a vocabulary of 49,152
Z95 = 1.959964          # of the normal distribution


class Scorer(Protocol):
    """A model that gives logits for a given text."""

    vocab: Vocab

    def logits(self, tokens: Sequence[int]) -> Iterator[Tensor]:
        """float32 [rows, vocab.size] pieces, of all positions in order, at most `CHUNK` rows each."""


class DecoderScorer:
    """A `Decoder`; its prefix cache is not used, so that every logit is computed."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.vocab = decoder, decoder.vocab

    def logits(self, tokens: Sequence[int]) -> Iterator[Tensor]:
        if len(tokens) > self.decoder.context:
            raise ContextTooLong("A window is longer than the model's context.", field="window", tokens=len(tokens),
                                 context=self.decoder.context)
        slot = self.decoder.open(tokens, reuse=False)
        try:
            if not self.decoder.reserve(slot, len(tokens)):
                raise StepFailed("There is no room in the cache for one window.", tokens=len(tokens))
            for start in range(0, len(tokens), CHUNK):
                part = tokens[start:start + CHUNK]
                yield self.decoder.extend([Step(slot, part, len(part))])[0].float()
        finally:
            self.decoder.release(slot)


class ModuleScorer:
    """A causal LM of transformers. The window runs in one pass; the head's logits of a window are then in memory."""

    def __init__(self, model: nn.Module, vocab: Vocab) -> None:
        self.model, self.vocab = model, vocab

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Iterator[Tensor]:
        ids = torch.tensor([list(tokens)], device=next(self.model.parameters()).device)
        for part in self.model(ids, use_cache=False).logits[0].split(CHUNK):
            yield part[:, :self.vocab.size].float()


# ---------------------------------------------------------------------------------------------- results
@dataclass(frozen=True)
class Perplexity:
    """``value`` = exp of the mean negative log-likelihood; ``se``: its standard error, windows taken as the independent
    units; ``tokens``: those predicted."""

    value: float
    se: float
    nll: float
    nll_se: float
    tokens: int
    windows: int


@dataclass(frozen=True)
class Quality:
    """A model against a reference on the same windows. KL in nats, of the reference's distribution to the model's.
    Intervals are 95 %, clustered by window."""

    perplexity: Perplexity
    reference: Perplexity
    kl_mean: float
    kl_se: float
    kl_low: float
    kl_high: float
    kl_median: float
    kl_p99: float
    kl_max: float
    top1: float
    top1_low: float
    top1_high: float
    nll_difference: float
    nll_difference_se: float
    tokens: int
    windows: int
    window_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Flat where people look first: perplexity, reference_perplexity, kl_mean …"""
        rest = {key: value for key, value in asdict(self).items() if key not in ("perplexity", "reference")}
        return {"perplexity": self.perplexity.value, "perplexity_se": self.perplexity.se,
                "reference_perplexity": self.reference.value, "reference_perplexity_se": self.reference.se, **rest}


def windows(ids: Sequence[int], length: int, count: int | None = None) -> list[tuple[int, ...]]:
    """Consecutive windows of ``length`` tokens, not overlapping; the tail is left out. InvalidRequest where the text has
    fewer than ``count``, or none."""
    most = len(ids) // length
    if not most or count is not None and count > most:
        raise InvalidRequest(f"The text has room for {most} windows of {length} tokens.", field="windows", tokens=len(ids),
                             windows=count)
    return [tuple(ids[i * length:(i + 1) * length]) for i in range(most if count is None else count)]


def perplexity(model: Scorer, texts: Sequence[Sequence[int]], progress: ProgressFn = lambda _: None,
               cancel: Cancel | None = None) -> Perplexity:
    """Every token of a window but its first is predicted from those before it."""
    losses = []
    for number, tokens in enumerate(texts):
        _step(number, len(texts), progress, cancel)
        losses.append(torch.cat([_nll(part.log_softmax(-1), targets) for part, targets in _aligned(model, tokens)]).double())
    return _perplexity(losses)


def compare(reference: Scorer, model: Scorer, texts: Sequence[Sequence[int]], progress: ProgressFn = lambda _: None,
            cancel: Cancel | None = None) -> Quality:
    """Both models over the same windows, side by side in chunks. NotSupported where their vocabularies differ."""
    check_vocab(reference.vocab, model.vocab)
    theirs, ours, divergences, agreements = [], [], [], []
    for number, tokens in enumerate(texts):
        _step(number, len(texts), progress, cancel)
        rows = [_compare_rows(one, two, targets) for (one, targets), (two, _) in zip(_aligned(reference, tokens),
            _aligned(model, tokens), strict=True)]
        nll_a, nll_b, kl, same = (torch.cat(part) for part in zip(*rows))
        theirs.append(nll_a)
        ours.append(nll_b)
        divergences.append(kl)
        agreements.append(same)
    return _quality(theirs, ours, divergences, agreements, len(texts[0]))


def check_vocab(one: Vocab, two: Vocab) -> None:
    """NotSupported unless every id means the same to both: probabilities of different tokens cannot be compared."""
    if one.size != two.size:
        raise NotSupported("The two models have different vocabularies, so their probabilities cannot be compared.",
                           reference=f"{one.size} tokens", model=f"{two.size} tokens",
                           remedy="Compare variants of one model.")
    if one.fingerprint != two.fingerprint:
        raise NotSupported("The two models' tokenizers give different tokens the same ids, so their probabilities cannot be "
                           "compared.", reference=one.fingerprint, model=two.fingerprint,
                           remedy="Compare variants of one model.")


# ---------------------------------------------------------------------------------------------- arithmetic
def _aligned(model: Scorer, tokens: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits [rows, V], the token that came next [rows]); the last position predicts nothing that is known."""
    done = 0
    for part in model.logits(tokens):
        keep = min(len(part), len(tokens) - 1 - done)
        if keep > 0:
            yield part[:keep], torch.tensor(tokens[done + 1:done + 1 + keep], device=part.device)
        done += len(part)
    if done != len(tokens):
        raise StepFailed("A model gave logits for another number of tokens than it was given.", given=len(tokens), got=done)


def _nll(logprobs: Tensor, targets: Tensor) -> Tensor:
    return -logprobs.gather(1, targets[:, None])[:, 0]


def _compare_rows(one: Tensor, two: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """float64 [rows] each: losses of both, KL(one || two), and 1 where both find the same token most probable."""
    a, b = one.log_softmax(-1), two.to(one.device).log_softmax(-1)
    gap = (a - b).mul_(a.exp())
    kl = torch.where(torch.isneginf(a), torch.zeros_like(gap), gap).sum(-1, dtype=torch.float64)
    same = (a.argmax(-1) == b.argmax(-1)).double()
    return _nll(a, targets).double(), _nll(b, targets).double(), kl, same


def clustered(groups: Sequence[Tensor]) -> tuple[float, float]:
    """Mean over all values, and its standard error with each tensor as one cluster: tokens of a window are not independent.
    nan for the error where there is only one."""
    total = sum(len(group) for group in groups)
    mean = sum(float(group.sum()) for group in groups) / total
    if len(groups) < 2:
        return mean, math.nan
    spread = sum(float((group - mean).sum()) ** 2 for group in groups)
    return mean, math.sqrt(spread * len(groups) / (len(groups) - 1)) / total


def _perplexity(losses: Sequence[Tensor]) -> Perplexity:
    nll, se = clustered(losses)
    value = math.exp(nll) if nll < 700 else math.inf
    return Perplexity(value, value * se, nll, se, sum(map(len, losses)), len(losses))


def _quality(theirs: list[Tensor], ours: list[Tensor], divergences: list[Tensor], agreements: list[Tensor],
             length: int) -> Quality:
    every = torch.cat(divergences).clamp_min(0)             # what rounding makes negative is nothing
    kl, kl_se = clustered([part.clamp_min(0) for part in divergences])
    top1, top1_se = clustered(agreements)
    gap, gap_se = clustered([b - a for a, b in zip(theirs, ours)])
    median, p99 = (float(value) for value in torch.quantile(every, torch.tensor([0.5, 0.99], dtype=torch.float64)))
    return Quality(_perplexity(ours), _perplexity(theirs), kl, kl_se, max(kl - Z95 * kl_se, 0.0), kl + Z95 * kl_se, median,
                   p99, float(every.max()), top1, max(top1 - Z95 * top1_se, 0.0), min(top1 + Z95 * top1_se, 1.0), gap, gap_se,
                   len(every), len(ours), length)


def _step(done: int, total: int, progress: ProgressFn, cancel: Cancel | None) -> None:
    if cancel is not None:
        cancel.raise_if_set("The comparison")
    progress(Progress("compare", done, total, f"window {done + 1} of {total}"))
