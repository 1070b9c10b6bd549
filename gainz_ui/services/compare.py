"""One prompt, two to four variants, the same seed: what runs at once and what in turn, the answers, and where they part.

Knows the studio and memory. Where memory does not hold all variants at once they are loaded, asked and unloaded one after another,
and the plan says so before anything happens. Refuses to know how a page shows it.
"""

from __future__ import annotations

import difflib
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from backends.base import Cancel, Event, GainzError, InvalidRequest, LocalOptions, ModelInfo, Progress, Request
from backends.estimate import free_memory, resolve
from gainz_ui.services.answers import Answer, View

LEAST, MOST = 2, 4                      # variants side by side
CONTEXT = 4096                          # tokens that a variant is loaded with for this, where the prompt does not need more
SPARE = 0.95                            # of the free memory that loads may fill
WORDS = 4000                            # words up to which two answers are compared word by word
State = Literal["waiting", "loading", "answering", "done", "failed"]


@dataclass(frozen=True)
class Plan:
    """``in_turn``: one after another, and why: "asked" or "memory". ``load``: not in memory yet; ``unload``: those in memory that
    have to make way, each after its own answer. Bytes: ``need`` of all that is to be loaded, ``free``."""

    names: tuple[str, ...]
    in_turn: bool = False
    why: Literal["", "asked", "memory"] = ""
    load: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()
    need: int = 0
    free: int = 0
    context: int = CONTEXT


@dataclass(frozen=True)
class Shot:
    """One variant at one moment."""

    name: str
    state: State
    view: View
    info: ModelInfo | None
    size: int
    progress: Progress | None
    error: GainzError | None
    unloaded: bool
    pieces: tuple[tuple[tuple[int, ...], str], ...]     # (ids, text) as they came

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for ids, _ in self.pieces for token in ids)


@dataclass(frozen=True)
class Parting:
    """Where an answer leaves the reference's: ``token`` counts from 0 in this answer, ``at`` in characters of it."""

    token: int
    at: int


# ---------------------------------------------------------------------------------------------- planning
def plan(studio: Any, names: Sequence[str], alone: bool = False, context: int = CONTEXT) -> Plan:
    """InvalidRequest for too few, too many or doubled names; what `Studio.entry` raises. ``alone``: in turn because it was asked."""
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
    return Plan(tuple(names), True, "memory", missing, tuple(n for n in names if n in loaded) if crowded else (), sum(sizes.values()), free,
                context)


def _needed(studio: Any, entry: Any, context: int) -> int:
    return studio.estimate(entry.name, load_options(studio, entry.name, context)).total if entry.local and entry.ready else 0


def load_options(studio: Any, name: str, context: int) -> dict[str, Any]:
    """One stream and as much context as this takes: variants side by side leave each other room."""
    trained = studio.details(name).trained_context
    return {"context": min(context, trained) if trained else context, "streams": 1}


def room(request: Request) -> int:
    """Tokens of context to load with: the usual number, or what this prompt and answer take (a token has rarely under 2 bytes)."""
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

    def shot(self) -> Shot:
        pieces, answer = tuple(self.pieces), self.answer
        view = answer.view() if answer is not None else View()
        state = "answering" if self.state == "done" and not view.done else self.state
        if answer is not None and view.done:
            state = "failed" if view.error is not None else "done"
        return Shot(self.name, state, view, self.info, self.size, self.progress, self.error or view.error, self.unloaded, pieces)


class Comparison:
    """Under way as soon as it is made; watch `version` and `shots`. ``request``: the same for all, its seed fixed."""

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

        def start(cancel: Cancel) -> Iterator[Event]:
            self.cancel.on_set(cancel.set)
            for event in self.studio.submit(self.request, side.name, cancel):
                if event.ids or event.text:
                    side.pieces.append((event.ids, event.text))
                yield event

        side.answer = Answer(start)
        self._tick()

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


# ---------------------------------------------------------------------------------------------- where answers part
def parting(reference: Shot, other: Shot) -> Parting | None:
    """None while they agree as far as both have come, and where they agree to the end. By token ids where both have the same
    tokens, else by characters."""
    if reference.info and other.info and reference.info.vocab_fingerprint == other.info.vocab_fingerprint:
        here, there = other.ids, reference.ids
        shared = _shared(here, there)
        if shared == min(len(here), len(there)) and (len(here) == len(there) or not _complete(reference, other, len(here), len(there))):
            return None
        return Parting(shared, min(_characters(other, shared), _shared(other.view.text, reference.view.text)))
    shared = _shared(other.view.text, reference.view.text)
    lengths = len(other.view.text), len(reference.view.text)
    if shared == min(lengths) and (lengths[0] == lengths[1] or not _complete(reference, other, *lengths)):
        return None
    return Parting(_token_at(other, shared), shared)


def _complete(reference: Shot, other: Shot, here: int, there: int) -> bool:
    """One is a beginning of the other: that is a difference only once the shorter one has ended by itself."""
    shorter = other if here < there else reference
    return shorter.view.done and shorter.view.finish == "stop"


def _shared(one: Sequence[Any], two: Sequence[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))


def _characters(shot: Shot, tokens: int) -> int:
    """Characters that the first ``tokens`` tokens have made certain."""
    count = 0
    for ids, text in shot.pieces:
        tokens -= len(ids)
        if tokens < 0:
            break
        count += len(text)
    return count


def _token_at(shot: Shot, characters: int) -> int:
    tokens = 0
    for ids, text in shot.pieces:
        characters -= len(text)
        if characters < 0:
            break
        tokens += len(ids)
    return tokens


def marked(text: str, at: int | None, reference: str = "") -> list[tuple[str, str]]:
    """The text in parts: "same" up to where it parts, "first" the word there, then "same" and "other" words. ``reference``: the
    other answer, "" while it is not whole: then all that follows is "other"."""
    if at is None:
        return [("same", text)]
    head, tail = text[:at], text[at:]
    first = re.match(r"(\s*)(\S+)", tail)
    if first is None:
        return [("same", head), ("first", tail)]
    rest = tail[first.end():]
    parts = [("same", head + first[1]), ("first", first[2]), *_words(rest, reference[at:] if reference else "")]
    return [part for part in parts if part[1]]


def _words(text: str, reference: str) -> list[tuple[str, str]]:
    ours, theirs = re.findall(r"\s*\S+|\s+", text), re.findall(r"\s*\S+|\s+", reference)
    if not theirs or len(ours) + len(theirs) > WORDS:
        return [("other", text)]
    matcher = difflib.SequenceMatcher(None, [w.strip() for w in theirs], [w.strip() for w in ours], autojunk=False)
    return [("same" if kind == "equal" else "other", "".join(ours[low:high]))
            for kind, _, _, low, high in matcher.get_opcodes() if high > low]


# ---------------------------------------------------------------------------------------------- values for a file or a program
def to_dict(comparison: Comparison, shots: Sequence[Shot]) -> dict[str, Any]:
    """Plain JSON. Seconds, bytes, tokens a second."""
    plan = comparison.plan
    return {"mode": "in turn" if plan.in_turn else "at once", "why": plan.why, "seed": comparison.seed, "reference": plan.names[0],
            "answers": [{**figures(shot), **_parts(shots[0], shot)} for shot in shots]}


def figures(shot: Shot) -> dict[str, Any]:
    view, info = shot.view, shot.info
    return {"model": shot.name, "state": shot.state, "text": view.text, "tokens": view.usage.completion_tokens if view.usage else view.tokens,
            "finish_reason": view.finish, "ttft_seconds": view.ttft, "tokens_per_second": view.speed, "disk_bytes": shot.size,
            "peak_bytes": info.peak_bytes if info else None, "backend": info.backend if info else None,
            "format": info.format if info else None, "kernels": info.kernels if info else None, "unloaded": shot.unloaded,
            "error": str(shot.error) if shot.error else None}


def _parts(reference: Shot, shot: Shot) -> dict[str, Any]:
    found = parting(reference, shot) if shot is not reference else None
    return {"parts_at_token": found.token if found else None, "parts_at_character": found.at if found else None}
