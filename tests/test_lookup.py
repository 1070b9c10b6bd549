"""Lookup: the longest match wins, of equals the latest; a text that repeats itself goes on repeating; cheap on long texts."""

from __future__ import annotations

import random
import time

import pytest

from backends.base import DraftJob, Sampling
from backends.engine.lookup import CANDIDATES, LONGEST, LookupDrafter, TokenIndex, kind


def propose(drafter, tokens, k=8, **more):
    draft, = drafter.propose([DraftJob(list(tokens), k, Sampling(), 0, 1, **more)])
    return draft


def slow(tokens: list[int], k: int) -> list[int]:
    """By trying every place."""
    best, at = 1, None
    for place in range(2, len(tokens)):
        length = 0
        while length < min(place, LONGEST) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= best and length >= 2:
            best, at = length, place
    out: list[int] = []
    while at is not None and len(out) < k:
        out.append((tokens + out)[at + len(out)])
    return out


def test_it_proposes_what_followed_the_longest_match():
    tokens = [1, 2, 3, 4, 50, 9, 3, 4, 60, 9, 2, 3, 4]
    assert propose(LookupDrafter(), tokens, 3) == [50, 9, 3], "three tokens match there, two at the later place"
    assert propose(LookupDrafter(), [7, 8, 1, 7, 8, 2, 7, 8], 2) == [2, 7], "of equal matches the latest"
    assert propose(LookupDrafter(), [5, 6, 7, 8]) == [] and propose(LookupDrafter(), [5]) == []


def test_a_period_is_drawn_on():
    draft = propose(LookupDrafter(), [9, 1, 2, 3, 1, 2, 3], 8)
    assert draft == [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("letters", [2, 4, 30])
def test_a_growing_text_equals_trying_every_place(letters):
    rng = random.Random(letters)
    text, drafter, compared = [rng.randrange(letters) for _ in range(12)], LookupDrafter(), 0
    for _ in range(150):
        index = TokenIndex()
        index.follow(text)
        place, candidates = index._last.get(text[-2] << 32 | text[-1], 0), 0
        while place:
            place, candidates = index._before[place], candidates + 1
        draft = propose(drafter, text, 5)
        if candidates <= CANDIDATES:
            assert draft == slow(text, 5)
            compared += 1
        text += [rng.randrange(letters) for _ in range(rng.randrange(1, 4))]
    assert compared > 10


def test_each_length_of_match_is_a_kind_of_its_own_with_its_own_limit():
    assert [kind(n) for n in (2, 3, 4, 5, 8, 9, 24)] == ["lookup 2", "lookup 3-4", "lookup 3-4", "lookup 5-8", "lookup 5-8",
                                                         "lookup 9+", "lookup 9+"]
    asked = []
    draft = propose(LookupDrafter(), [1, 2, 3, 4, 5, 1, 2, 3], 8, limit=lambda source: asked.append(source) or 2)
    assert draft == [4, 5] and draft.source == "lookup 3-4" and asked == ["lookup 3-4"]
    assert propose(LookupDrafter(), [1, 2, 3, 4, 5, 1, 2, 3], 8, limit=lambda source: 0) == []


def test_eight_thousand_tokens_cost_little_a_token():
    """Also of one letter only, where every place is a candidate."""
    rng = random.Random(1)
    for letters in (1, 50, 5000):
        text, drafter = [rng.randrange(letters) for _ in range(8000)], LookupDrafter()
        propose(drafter, text)
        best = float("inf")
        for _ in range(200):
            text.append(rng.randrange(letters))
            began = time.perf_counter()
            propose(drafter, text)
            best = min(best, time.perf_counter() - began)
        assert best < 2e-4, letters
    assert len(drafter._known[1]._before) <= len(text)
    drafter.forget(1)
    assert not drafter._known
