"""What a clock says about one answer: from the arrivals of its pieces to TTFT, TPOT and the like.

A piece counts by its tokens, never by its arrival: a pass of speculation brings several at once. What a stream says before the
first content (a role, an empty text) is no token. All times in seconds from the moment the request was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """``at``: arrival. ``tokens``: how many it brought; None where the sender does not say. ``text``: what it added."""

    at: float
    tokens: int | None
    text: str = ""

    @property
    def content(self) -> bool:
        return bool(self.text) if self.tokens is None else self.tokens > 0


@dataclass(frozen=True)
class Figures:
    """``ttft``: first real content. ``tpot``: seconds a token after those of the first piece: (t_last − t_first)/(N − 1) where
    that brought one token. ``rate``: its inverse, tokens a second. ``peak``: the fastest gap's rate. ``gaps``: (seconds, tokens)
    of every piece after the first: the inter-token latencies with the tokens that came at once. None: cannot be known."""

    ttft: float | None
    tpot: float | None
    rate: float | None
    peak: float | None
    total: float
    tokens: int
    gaps: tuple[tuple[float, int], ...]


def figures(pieces: Iterable[Piece], end: float, tokens: int | None = None) -> Figures:
    """``tokens``: the sender's own count, which is right where pieces do not say theirs: these are then taken for equally large,
    and no peak is given."""
    told = [piece for piece in pieces if piece.content]
    if not told:
        return Figures(None, None, None, None, end, 0, ())
    known = all(piece.tokens is not None for piece in told)
    count = sum(piece.tokens or 0 for piece in told) if known else tokens or 0
    sizes = [piece.tokens for piece in told] if known else _shares(count, len(told))
    gaps = tuple((after.at - before.at, size) for before, after, size in zip(told, told[1:], sizes[1:]))
    span, later = told[-1].at - told[0].at, sum(sizes[1:])
    measurable = span > 0 and later > 0
    peak = max((size / gap for gap, size in gaps if gap > 0), default=None) if known else None
    return Figures(told[0].at, span / later if measurable else None, later / span if measurable else None, peak, end, count, gaps)


def _shares(count: int, pieces: int) -> list[int]:
    """Whole numbers as equal as can be, that add up to ``count``."""
    return [count * (index + 1) // pieces - count * index // pieces for index in range(pieces)]


def prefill_rate(prompts: Sequence[int], cached: int, seconds: float) -> float | None:
    """Prompt tokens a second over one or several prompts read together: tokens that were computed, not those found in a cache."""
    return (sum(prompts) - cached) / seconds if seconds > 0 else None


def split(prefill: float, whole: float, tokens: int) -> tuple[float, float, float | None]:
    """(TTFT, decode seconds, seconds a token) from a prefill timed alone and a generation timed whole, which did its own prefill
    again. The first of ``tokens`` comes out of the prefill."""
    decode = whole - prefill
    return prefill, decode, decode / (tokens - 1) if tokens > 1 else None
