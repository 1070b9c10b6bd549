"""One prompt, two to four variants, the same seed: what runs at once and what in turn, the answers, and where they part.

Knows the studio and memory. Where memory does not hold all variants at once they are loaded, asked and unloaded one after
another, and the plan says so before anything happens. Refuses to know how a page shows it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from os.path import commonprefix
from typing import Any, Literal

from backends.base import Cancel, Event, GainzError, InvalidRequest, LocalOptions, ModelInfo, Progress, Request
from backends.estimate import free_memory, resolve
from backends.speculative import Pairing
from gainz_ui.services import draft_offers
from gainz_ui.services.answers import Answer, View
from gainz_ui.services.parting import Shot, State, parting

LEAST, MOST = 2, 4                      # variants side by side
CONTEXT = 4096                          # tokens that a variant is loaded with for this, where the prompt does not need more
SPARE = 0.95                            # of the free memory that loads may fill


@dataclass(frozen=True)
class Plan:
    """``in_turn``: one after another, and why: "asked" or "memory". ``load``: not in memory yet; ``unload``: those in
    memory that have to make way, each after its own answer. Bytes: ``need`` of all that is to be loaded, ``free``."""

    names: tuple[str, ...]
    in_turn: bool = False
    why: Literal["", "asked", "memory"] = ""
    load: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()
    need: int = 0
    free: int = 0
    context: int = CONTEXT


# ---------------------------------------------------------------------------------------------- choosing
def related(entries: Sequence[Any]) -> list[str]:
    """What is worth comparing before anybody has chosen, the reference first: a model and the variants made from it, or like
    it by name; those of a loaded model before others; no drafts. Without relatives one model alone. ``entries``: of the catalog."""
    entries = [entry for entry in entries if not entry.helper]
    if not entries:
        return []
    families: dict[str, list[Any]] = {}
    for entry in entries:
        families.setdefault(entry.parent or entry.name, []).append(entry)
    root, family = max(families.items(), key=lambda one: (any(e.loaded for e in one[1]), len(one[1]) > 1,
                                                          max(e.bits or 16 for e in one[1])))
    if len(family) == 1:
        family = family + [entry for entry in entries if entry is not family[0] and _alike(entry.name, family[0].name)]
    family.sort(key=lambda entry: (entry.name != root, -(entry.bits or 16), entry.name))
    return [entry.name for entry in family][:MOST]


def _alike(one: str, two: str) -> bool:
    """Two names of one model in different formats, as far as names can tell."""
    return len(commonprefix([one, two])) >= 0.6 * min(len(one), len(two))


# ---------------------------------------------------------------------------------------------- planning
def plan(studio: Any, names: Sequence[str], alone: bool = False, context: int = CONTEXT) -> Plan:
    """InvalidRequest for too few, too many or doubled names; what `Studio.entry` raises. ``alone``: in turn because
    it was asked."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InvalidRequest("models takes a list of names.", field="models")
    if not LEAST <= len(names) <= MOST or len(set(names)) != len(names):
        raise InvalidRequest(f"Choose {LEAST} to {MOST} different models.", field="models", chosen=len(names))
    loaded = studio.loaded()
    entries = [studio.entry(name) for name in names]
    missing = tuple(entry.name for entry in entries if entry.name not in loaded)
    sizes = {entry.name: _needed(studio, entry, context) for entry in entries if entry.name in missing}
    free = free_memory(resolve(LocalOptions())[0])
    fits = sum(sizes.values()) <= SPARE * free
    if fits:
        return Plan(tuple(names), alone, "asked" if alone else "", missing, (), sum(sizes.values()), free, context)
    crowded = max(sizes.values()) > SPARE * free
    return Plan(tuple(names), True, "memory", missing, tuple(n for n in names if n in loaded) if crowded else (),
                sum(sizes.values()), free,
                context)


def _needed(studio: Any, entry: Any, context: int) -> int:
    return studio.estimate(entry.name, load_options(studio, entry.name, context)).total if entry.local and entry.ready else 0


def load_options(studio: Any, name: str, context: int) -> dict[str, Any]:
    """One stream and as much context as this takes: variants side by side leave each other room. Nothing for another server's."""
    if not studio.entry(name).local:
        return {}
    trained = studio.details(name).trained_context
    return {"context": min(context, trained) if trained else context, "streams": 1}


def room(request: Request) -> int:
    """Tokens of context to load with: the usual number, or what this prompt and answer take (a token has rarely under 2
    bytes)."""
    text = request.prompt if isinstance(request.prompt, str) else "".join(turn.content for turn in request.prompt)
    need = (request.sampling.max_tokens or 0) + len(text.encode()) // 2 + 256
    return max(CONTEXT, -(-need // 1024) * 1024)


# ---------------------------------------------------------------------------------------------- running
class Side:
    """One variant's part. Fields are written by the comparison's thread and read by any."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.state: State = "waiting"
        self.info: ModelInfo | None = None
        self.progress: Progress | None = None
        self.error: GainzError | None = None
        self.unloaded = False
        self.answer: Answer | None = None
        self.pieces: list[tuple[tuple[int, ...], str]] = []
        self.undrafted: Pairing | None = None

    def shot(self) -> Shot:
        pieces, answer = tuple(self.pieces), self.answer
        view = answer.view() if answer is not None else View()
        state = "answering" if self.state == "done" and not view.done else self.state
        if answer is not None and view.done:
            state = "failed" if view.error is not None else "done"
        return Shot(self.name, state, view, self.info, self.size, self.progress, self.error or view.error, self.unloaded,
                    pieces, self.undrafted)


class Comparison:
    """Under way as soon as it is made; watch `version` and `shots`. ``request``: the same for all, its seed fixed. A variant that
    its draft does not fit answers without one, and its side says why."""

    def __init__(self, studio: Any, plan: Plan, request: Request) -> None:
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(32)
        self.studio, self.plan = studio, plan
        self.request = replace(request, sampling=replace(request.sampling, seed=seed))
        self.sides = [Side(name, studio.entry(name).size) for name in plan.names]
        self.cancel = Cancel()
        self._ticks = 0
        self._done = threading.Event()
        threading.Thread(target=self._run, name="compare", daemon=True).start()

    @property
    def seed(self) -> int:
        return self.request.sampling.seed

    @property
    def running(self) -> bool:
        return not self._done.is_set()

    @property
    def version(self) -> int:
        """Grows with whatever happens to any side."""
        return self._ticks + sum(side.answer.version for side in self.sides if side.answer is not None)

    def shots(self) -> list[Shot]:
        return [side.shot() for side in self.sides]

    def stop(self) -> None:
        self.cancel.set()

    def wait(self, seconds: float | None = None) -> bool:
        return self._done.wait(seconds)

    # ---- the thread
    def _run(self) -> None:
        try:
            if self.plan.in_turn:
                for side in self._order():
                    self._one(side)
            else:
                ready = [side for side in self.sides if self._have(side)]
                for side in ready:
                    self._ask(side)
                for side in ready:
                    self._end(side)
        finally:
            self._done.set()

    def _order(self) -> list[Side]:
        """Those in memory first: they may have to make way."""
        return sorted(self.sides, key=lambda side: side.name in self.plan.load)

    def _one(self, side: Side) -> None:
        if self._have(side):
            self._ask(side)
            self._end(side)
        passing = side.name in self.plan.load and self.plan.why == "memory"
        if (passing or side.name in self.plan.unload) and side.info is not None:
            self._guarded(side, lambda: self.studio.unload(side.name))
            side.unloaded = True
            self._tick()

    def _have(self, side: Side) -> bool:
        """Loaded now. What goes wrong is this side's alone."""
        loaded = self.studio.loaded()
        if side.name in loaded:
            side.info = loaded[side.name]
            return True
        side.state = "loading"
        self._tick()

        def report(seen: Progress) -> None:
            side.progress = seen
            self._tick()

        def load() -> None:
            options = load_options(self.studio, side.name, self.plan.context)
            side.info = self.studio.load(side.name, options, report, self.cancel)

        self._guarded(side, load)
        return side.info is not None

    def _ask(self, side: Side) -> None:
        side.state = "answering"
        request = self._request(side)

        def start(cancel: Cancel) -> Iterator[Event]:
            self.cancel.on_set(cancel.set)
            for event in self.studio.submit(request, side.name, cancel):
                if event.ids or event.text:
                    side.pieces.append((event.ids, event.text))
                yield event

        side.answer = Answer(start)
        self._tick()

    def _request(self, side: Side) -> Request:
        if self.request.draft is not None:
            side.undrafted = draft_offers.unfit(self.studio, [side.name], self.request.draft).get(side.name)
        return self.request if side.undrafted is None else replace(self.request, draft=None)

    def _end(self, side: Side) -> None:
        seen = 0
        while side.answer.running:
            seen = side.answer.wait(seen, 1.0)
        self._tick()

    def _guarded(self, side: Side, work: Callable[[], None]) -> None:
        try:
            work()
        except GainzError as error:
            side.state, side.error = "failed", error
            self._tick()

    def _tick(self) -> None:
        self._ticks += 1


# ---------------------------------------------------------------------------------------------- for a file or a program
def to_dict(comparison: Comparison, shots: Sequence[Shot]) -> dict[str, Any]:
    """Plain JSON. Seconds, bytes, tokens a second."""
    plan = comparison.plan
    return {"mode": "in turn" if plan.in_turn else "at once", "why": plan.why, "seed": comparison.seed,
            "reference": plan.names[0], "draft": asdict(comparison.request.draft) if comparison.request.draft else None,
            "answers": [{**figures(shot), **_parts(shots[0], shot)} for shot in shots]}


def figures(shot: Shot) -> dict[str, Any]:
    view, info = shot.view, shot.info
    return {"model": shot.name, "state": shot.state, "text": view.text,
            "tokens": view.usage.completion_tokens if view.usage else view.tokens,
            "finish_reason": view.finish, "ttft_seconds": view.ttft, "tokens_per_second": view.speed,
            "disk_bytes": shot.size,
            "peak_bytes": info.peak_bytes if info else None, "backend": info.backend if info else None,
            "revision": info.revision if info else None,
            "format": info.format if info else None, "kernels": info.kernels if info else None, "unloaded": shot.unloaded,
            "error": str(shot.error) if shot.error else None,
            "speculation": asdict(view.usage.speculation) if view.usage and view.usage.speculation else None,
            "undrafted": shot.undrafted.reason if shot.undrafted else None}


def _parts(reference: Shot, shot: Shot) -> dict[str, Any]:
    found = parting(reference, shot) if shot is not reference else None
    return {"parts_at_token": found.token if found else None, "parts_at_character": found.at if found else None}
