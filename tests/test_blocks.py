"""The page pool against a plain model of what is held, and the prefix rules of the engine."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.engine.blocks import PagePool

SIZE = 4


def hold(pool: PagePool, tokens: list[int]) -> list[int]:
    """A sequence computed from nothing or from its cached prefix, all its full pages published."""
    pages = pool.match(tokens)
    done = len(pages)
    fresh = pool.take(-(-len(tokens) // pool.size) - done)
    if fresh is None:
        pool.drop(pages)
        return []
    pages += fresh
    for place in range(done, len(tokens) // pool.size):
        content = tokens[place * pool.size:(place + 1) * pool.size]
        pages[place] = pool.publish(pages[place - 1] if place else None, pages[place], content)
    pool.check()
    return pages


def test_take_is_all_or_nothing() -> None:
    pool = PagePool(3, SIZE)
    assert pool.take(4) is None and pool.free == 3
    assert sorted(pool.take(3)) == [0, 1, 2] and pool.used == 3
    assert pool.take(1) is None and pool.take(0) == []


@pytest.mark.parametrize(("length", "reused"), [
    (1, 0), (SIZE - 1, 0), (SIZE, 0), (SIZE + 1, 1), (2 * SIZE, 1), (2 * SIZE + 1, 2)])
def test_a_full_hit_leaves_a_token_to_run(length: int, reused: int) -> None:
    """KV-02: the reused prefix is whole pages, and shorter than the prompt."""
    pool = PagePool(16, SIZE)
    tokens = list(range(length))
    pool.drop(hold(pool, tokens))
    again = pool.match(tokens)
    assert len(again) == reused and len(again) * SIZE < length
    pool.check()


def test_same_page_content_after_another_beginning_is_not_a_match() -> None:
    pool = PagePool(16, SIZE)
    pool.drop(hold(pool, [1] * SIZE + [7] * SIZE + [0]))
    assert len(pool.match([2] * SIZE + [7] * SIZE + [0])) == 0
    assert len(pool.match([7] * SIZE + [0])) == 0


def test_equal_hashes_are_told_apart_by_their_tokens() -> None:
    """hash(-1) == hash(-2) in CPython: an index that trusted the hash would take one for the other."""
    assert hash((-1,) * SIZE) == hash((-2,) * SIZE)
    pool = PagePool(16, SIZE)
    pool.drop(hold(pool, [-1] * SIZE + [0]))
    assert pool.match([-2] * SIZE + [0]) == [] and len(pool.match([-1] * SIZE + [0])) == 1


def test_two_that_computed_the_same_end_up_on_one_page() -> None:
    pool = PagePool(16, SIZE)
    first, second = pool.take(1), pool.take(1)
    assert pool.publish(None, first[0], range(SIZE)) == first[0]
    assert pool.publish(None, second[0], range(SIZE)) == first[0]
    assert pool.references[first[0]] == 2 and pool.used == 1
    pool.check()


def test_eviction_takes_the_least_recent_and_the_deepest_first() -> None:
    pool = PagePool(4, SIZE)
    old = [1] * SIZE + [2] * SIZE + [0]
    pool.drop(hold(pool, old)[:2])                        # two cached pages; the third stays held
    pool.take(2)                                          # one free page and one cached page go
    assert pool.evictions == 1 and len(pool.match(old)) == 1
    pool.check()


def test_forgetting_a_page_forgets_what_follows_it() -> None:
    pool = PagePool(8, SIZE)
    tokens = list(range(3 * SIZE + 1))
    pages = hold(pool, tokens)
    pool.drop(pages)
    pool.forget(pages[1])
    assert len(pool.match(tokens)) == 1
    pool.check()


def test_a_chain_longer_than_the_recursion_limit_can_be_forgotten() -> None:
    pool = PagePool(3000, 1)
    tokens = list(range(2999))
    pages = hold(pool, tokens)
    pool.drop(pages)
    pool.clear()
    assert pool.free == 3000
    pool.check()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_books_balance_under_random_use(seed: int) -> None:
    """KV-09 in integers: after everything is given back, free + cached is all there is."""
    rng = random.Random(seed)
    pool = PagePool(rng.randrange(4, 24), SIZE)
    live: list[list[int]] = []
    for _ in range(60):
        if live and rng.random() < .5:
            pool.drop(live.pop(rng.randrange(len(live))))
        else:
            pages = hold(pool, [rng.randrange(2) for _ in range(rng.randrange(1, 5 * SIZE))])
            live += [pages] if pages else []
        pool.check()
        assert pool.used == len({page for pages in live for page in pages})
    for pages in live:
        pool.drop(pages)
    pool.check()
    assert pool.used == 0 and pool.free + pool.cached == pool.total
    pool.clear()
    assert pool.free == pool.total
