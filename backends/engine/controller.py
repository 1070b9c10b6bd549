"""What a verifier and its drafters are known to cost and to bring, over all sequences; `course.py` decides by it for one.

Knows numbers: no decoder, no ids, and no clock but the one it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backends.base import DraftSpec
from backends.engine.costs import Acceptance, DraftCosts, Gain, PassCosts, Trials
from backends.engine.course import Course
from backends.engine.drafters import MODEL
from backends.engine.sureness import Calibration

BELIEF = {MODEL: 0.7, "text": 0.5, "lookup 9+": 0.85, "lookup 5-8": 0.7, "lookup 3-4": 0.55, "lookup 2": 0.4}


class Controller:
    """One verifier's: its costs, and for each drafter the luck and cost of its drafts. ``clock``: seconds, rising."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.costs = PassCosts()
        self.reading: float | None = None                   # seconds of a prompt's token
        self.wanted = False                                 # has anybody asked for a length by measurement?
        self.version = 0                                    # grows with every verified draft
        self.last = (0, 0, 0)                               # of the last decoding pass: streams, rows, tokens
        self._luck: dict[tuple[str, str], Acceptance] = {}
        self._drafts: dict[tuple[str, bool], DraftCosts] = {}
        self._trials: dict[str, Trials] = {}
        self._gains: dict[tuple[str, bool], Gain] = {}
        self._calibrations: dict[tuple[str, bool], Calibration] = {}
        self.passes = 0                                     # that were asked for a draft of measured length, of all answers

    def course(self, spec: DraftSpec, prompt: int, room: int, ratio: float = 1.0, greedy: bool = True) -> Course:
        """For one sequence: of ``prompt`` tokens, with ``room`` for so many more. ``ratio``: size of the draft beside the target."""
        if spec.length is None and not self.wanted:         # the first since all was measured that was to be
            self.wanted = True
            self.costs.outdated()
            for costs in self._drafts.values():
                costs.outdated()
        return Course(self, spec, prompt, room, ratio, greedy)

    def luck(self, draft: str, source: str) -> Acceptance:
        """Of all sequences together; what a new one believes at first."""
        found = self._luck.get((draft, source))
        if found is None:
            found = self._luck[draft, source] = Acceptance(BELIEF.get(source, 0.6), 2.0, 0.98)
        return found

    def draft_costs(self, draft: str, source: str, ratio: float) -> DraftCosts:
        key = draft, not source.startswith("lookup")
        found = self._drafts.get(key)
        if found is None:
            found = self._drafts[key] = DraftCosts(ratio if key[1] else 0.0)
        return found

    def gain(self, draft: str, modelled: bool, before: tuple[float, float] = (0.0, 0.0)) -> Gain:
        """``before``: what is believed at first."""
        found = self._gains.get((draft, modelled))
        if found is None:
            found = self._gains[draft, modelled] = Gain(before, 8.0, 0.996)
        return found

    def proven(self, draft: str) -> bool:
        return any(gain.proven for (name, _), gain in self._gains.items() if name == draft)

    def calibration(self, draft: str, greedy: bool) -> Calibration:
        return self._calibrations.setdefault((draft, greedy), Calibration())

    def trials(self, draft: str) -> Trials:
        return self._trials.setdefault(draft, Trials())

    def unknown(self) -> list[tuple[str, DraftCosts]]:
        """Drafts by models that were asked for and whose ids' cost is not known, or not of late."""
        return [(name, costs) for (name, modelled), costs in self._drafts.items() if modelled and costs.vague]

    # --------------------------------------------------------------------------------------- what it is told
    def drafted(self, courses: list[Course], drafts: list[Any], seconds: float) -> None:
        """One call of a drafter for some sequences took so long."""
        for course in courses:
            course.proposed(seconds / len(courses))
        made = [len(draft) + getattr(draft, "dropped", 0) for draft in drafts]
        for course, draft, size in zip(courses, drafts, made):
            course.spent = size > 0 and getattr(draft, "source", "") == MODEL
        if not any(made) and not any(course.read for course in courses):
            return                                          # nothing was found, and what looking took is noted
        modelled = [(c, size) for c, d, size in zip(courses, drafts, made) if not getattr(d, "source", "").startswith("lookup")]
        behind = sum(course.read for course, _ in modelled)
        ids = sum(size for _, size in modelled)
        first = courses[0]
        source = MODEL if modelled and (ids or behind) else "lookup"
        counted = ids if source == MODEL else sum(made)
        self.draft_costs(first.spec.name, source, first.ratio).saw(seconds, counted, behind)

    def passed(self, courses: list[Course], streams: int, rows: int, tokens: int, seconds: float) -> None:
        """A pass of decoding sequences alone, drafting excluded."""
        self.costs.saw(rows, seconds, rows == streams)
        self.last = streams, rows, tokens
        for course in courses:
            course.settle(streams, rows, seconds)

    def prompted(self, tokens: int, seconds: float) -> None:
        """A pass of prompt tokens alone."""
        if tokens >= 16:
            new = seconds / tokens
            self.reading = new if self.reading is None else self.reading * min(max(new / self.reading, 0.5), 2.0) ** 0.3
