"""What became of the drafts of one answer, counted for people: acceptance by place and source, lengths used, measured gain."""

from __future__ import annotations

from collections import Counter

from backends.base import DraftSpec, Speculation
from backends.engine.costs import PassCosts


class Counts:
    """``made``: tokens of passes; ``lengths``: passes by draft length, 0 included; ``paces``: of measured passes."""

    def __init__(self) -> None:
        self.draft_seconds = self.plain_seconds = self.vain_seconds = 0.0
        self.tokens = 0
        self.lengths: Counter[int] = Counter()
        self.tried: Counter[int] = Counter()
        self.right: Counter[int] = Counter()
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.paces: Counter[tuple[int, str]] = Counter()    # (streams, "tokens" or "seconds")

    def add(self, source: str, length: int, right: int, made: int) -> None:
        self.tokens += made
        self.lengths[length] += 1
        reached = min(length, right + (made > right))       # an answer that ended inside the draft tells nothing of the rest
        self.tried.update(range(1, reached + 1))
        self.right.update(range(1, right + 1))
        self.drafted[source] += length
        self.accepted[source] += right

    def pace(self, streams: int, tokens: int, seconds: float) -> None:
        """A measured pass with a draft, drafting included; one without is as fast as it would have been anyway."""
        self.paces[streams, "tokens"] += tokens
        self.paces[streams, "seconds"] += seconds

    def rested(self, passes: int, tokens: int, plain: float, draft: float) -> None:
        """Passes without a draft; the seconds of the measured ones, and what looking for drafts took."""
        self.tokens += tokens
        self.lengths[0] += passes
        self.plain_seconds += plain
        self.vain_seconds += draft

    def merge(self, other: Counts) -> None:
        self.draft_seconds += other.draft_seconds
        self.plain_seconds += other.plain_seconds
        self.vain_seconds += other.vain_seconds
        self.tokens += other.tokens
        for name in ("lengths", "tried", "right", "drafted", "accepted", "paces"):
            getattr(self, name).update(getattr(other, name))

    def report(self, spec: DraftSpec, costs: PassCosts, resting: bool) -> Speculation:
        drafted, accepted, passes = sum(self.drafted.values()), sum(self.accepted.values()), sum(self.lengths.values())
        known = [streams for streams, what in self.paces if what == "tokens" and costs.seen(streams)]
        plain = self.plain_seconds + sum(self.paces[streams, "tokens"] * costs.expected(streams) for streams in known)
        took = self.plain_seconds + self.vain_seconds + sum(self.paces[streams, "seconds"] for streams in known)
        if not known and any(self.lengths[length] for length in self.lengths if length):
            plain = 0.0                                     # no plain pass was ever seen beside the drafted ones
        return Speculation(
            spec.name, spec.length, accepted / drafted if drafted else None, self.tokens / passes if passes else None,
            tuple((self.tried[place], self.right[place]) for place in sorted(self.tried)),
            tuple(sorted(self.lengths.items())), tuple((s, self.drafted[s], self.accepted[s]) for s in sorted(self.drafted)),
            self.draft_seconds, plain / took if took > 0 and plain > 0 else None, resting)
