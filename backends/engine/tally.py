"""What became of the drafts of one answer, counted for people: acceptance by place and source, lengths used, measured gain."""

from __future__ import annotations

from collections import Counter

from backends.base import DraftSpec, Speculation


class Counts:
    """``lengths``: passes by draft length, 0 included."""

    def __init__(self) -> None:
        self.draft_seconds = self.plain_seconds = self.vain_seconds = 0.0
        self.drafted_seconds = self.instead_seconds = 0.0   # of passes with a draft, and of as many plain tokens at that time
        self.tokens = 0
        self.lengths: Counter[int] = Counter()
        self.tried: Counter[int] = Counter()
        self.right: Counter[int] = Counter()
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()

    def add(self, source: str, length: int, right: int, made: int) -> None:
        self.tokens += made
        self.lengths[length] += 1
        reached = min(length, right + (made > right))       # an answer that ended inside the draft tells nothing of the rest
        self.tried.update(range(1, reached + 1))
        self.right.update(range(1, right + 1))
        self.drafted[source] += length
        self.accepted[source] += right

    def pace(self, tokens: int, seconds: float, plain: float | None) -> None:
        """A measured pass with a draft, drafting included; one without is as fast as it would have been anyway. ``plain``: seconds of
        a plain pass of the same sequences, where one has been seen by then."""
        if plain is not None:
            self.drafted_seconds += seconds
            self.instead_seconds += tokens * plain

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
        self.drafted_seconds += other.drafted_seconds
        self.instead_seconds += other.instead_seconds
        self.tokens += other.tokens
        for name in ("lengths", "tried", "right", "drafted", "accepted"):
            getattr(self, name).update(getattr(other, name))

    def report(self, spec: DraftSpec, resting: bool) -> Speculation:
        drafted, accepted, passes = sum(self.drafted.values()), sum(self.accepted.values()), sum(self.lengths.values())
        took, plain = self.plain_seconds + self.vain_seconds + self.drafted_seconds, self.plain_seconds + self.instead_seconds
        if not self.instead_seconds and any(self.lengths[length] for length in self.lengths if length):
            plain = 0.0                                     # no plain pass was ever seen beside the drafted ones
        return Speculation(
            spec.name, spec.length, accepted / drafted if drafted else None, self.tokens / passes if passes else None,
            tuple((self.tried[place], self.right[place]) for place in sorted(self.tried)),
            tuple(sorted(self.lengths.items())), tuple((s, self.drafted[s], self.accepted[s]) for s in sorted(self.drafted)),
            self.draft_seconds, plain / took if took > 0 and plain > 0 else None, resting)
