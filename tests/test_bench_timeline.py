"""Streams with known times give exactly the right figures (BE-01, BE-03, BE-06, BE-10)."""

from __future__ import annotations

import pytest

from gainz_ui.services.bench.timeline import Piece, figures, prefill_rate, split


def test_what_comes_before_the_first_content_is_no_token():
    """BE-01: a role at 10 ms, an empty text at 50, the first text at 200, the end at 1,000."""
    for counted in (True, False):
        none, one = (0, 1) if counted else (None, None)
        found = figures([Piece(0.01, none), Piece(0.05, none, ""), Piece(0.2, one, "a"), Piece(0.9, one, "b")], 1.0, 2)
        assert found.ttft == 0.2 and found.total == 1.0 and found.tokens == 2
        assert found.tpot == pytest.approx(0.7)


def test_pieces_of_several_tokens_count_by_their_tokens():
    """BE-03: ten pieces of four tokens in two seconds are 20 tokens a second, not 5."""
    pieces = [Piece(0.2 * (i + 1), 4, "word") for i in range(10)]
    found = figures(pieces, 2.0, 40)
    assert found.tokens == 40 and found.rate == pytest.approx(20) and found.peak >= found.rate * (1 - 1e-9)
    assert [tokens for _, tokens in found.gaps] == [4] * 9
    untold = figures([Piece(piece.at, None, piece.text) for piece in pieces], 2.0, 40)
    assert untold.rate == pytest.approx(20) and untold.peak is None


def test_the_peak_is_never_below_the_mean():
    found = figures([Piece(0.1, 1, "a"), Piece(0.2, 3, "b"), Piece(1.2, 1, "c"), Piece(1.25, 2, "d")], 1.3)
    assert found.peak == pytest.approx(40) and found.rate == pytest.approx(6 / 1.15)


def test_tpot_of_single_tokens_is_the_textbook_one():
    times = [0.5, 0.61, 0.7, 0.83, 0.9]
    found = figures([Piece(at, 1, "x") for at in times], 0.95)
    assert found.tpot == pytest.approx((0.9 - 0.5) / (5 - 1))


def test_nothing_and_one_token_give_no_rate():
    assert figures([], 0.3) == figures([Piece(0.1, 0)], 0.3)
    found = figures([Piece(0.1, 1, "x")], 0.3)
    assert (found.ttft, found.tpot, found.rate, found.tokens) == (0.1, None, None, 1)


def test_prefill_is_counted_in_tokens():
    """BE-06: four prompts of 512 tokens in half a second; and cached tokens were not computed."""
    assert prefill_rate([512] * 4, 0, 0.5) == 4096
    assert prefill_rate([512], 256, 0.5) == 512
    assert prefill_rate([512], 0, 0.0) is None


def test_a_prefill_timed_alone_is_not_counted_twice():
    """BE-10."""
    ttft, decode, step = split(0.5, 0.9, 16)
    assert (ttft, decode) == (0.5, pytest.approx(0.4)) and step == pytest.approx(0.4 / 15)
