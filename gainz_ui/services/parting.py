"""Where two answers part, and which of their words differ: pure. Knows an answer at one moment, a `Shot`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from backends.base import GainzError, ModelInfo, Progress
from backends.speculative import Pairing
from gainz_ui.services.answers import View

WORDS = 4000                            # words up to which two answers are compared word by word
State = Literal["waiting", "loading", "answering", "done", "failed"]


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
    undrafted: Pairing | None = None    # a draft was asked for and does not fit: why it answered without

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for ids, _ in self.pieces for token in ids)


@dataclass(frozen=True)
class Parting:
    """Where an answer leaves the reference's: ``token`` counts from 0 in this answer, ``at`` in characters of it."""

    token: int
    at: int


def parting(reference: Shot, other: Shot) -> Parting | None:
    """None while they agree as far as both have come, and where they agree to the end. By token ids where both have the same
    tokens, else by characters."""
    if reference.info and other.info and reference.info.vocab_fingerprint == other.info.vocab_fingerprint:
        here, there = other.ids, reference.ids
        shared = _shared(here, there)
        if shared == min(len(here), len(there)) and (len(here) == len(there)
                                                     or not _complete(reference, other, len(here), len(there))):
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
    return _reached([(len(ids), len(text)) for ids, text in shot.pieces], tokens)


def _token_at(shot: Shot, characters: int) -> int:
    """Tokens of the pieces that end within the first ``characters`` characters."""
    return _reached([(len(text), len(ids)) for ids, text in shot.pieces], characters)


def _reached(pieces: Sequence[tuple[int, int]], limit: int) -> int:
    """Each piece costs and brings something: what those bring that ``limit`` pays for, in their order."""
    brought = 0
    for cost, gain in pieces:
        limit -= cost
        if limit < 0:
            break
        brought += gain
    return brought


def marked(text: str, at: int | None, reference: str = "") -> list[tuple[str, str]]:
    """The text in parts: "same" up to where it parts, "first" the word there, then "same" and "other" words. ``reference``:
    the other answer, "" while it is not whole: then all that follows is "other"."""
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
