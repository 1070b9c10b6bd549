"""What the page says about drafting: choices with reasons, and a verdict that never claims what was not measured."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from html import unescape

import pytest

from backends.base import ModelInfo, Speculation
from backends.speculative import Pairing
from gainz_ui.i18n import tr
from gainz_ui.tabs import draft_view as show

MODEL = ModelInfo("m", "gguf", "gguf", kernels="aten", capabilities=("draft",))
PAIRS = [Pairing("lookup", "lookup", "lookup"), Pairing("small", "tokens", "same"),
         Pairing("other", "text", "text", {"id": 5, "mine": "'a'", "theirs": "'b'"}),
         Pairing("giant", "", "no_room", {"need": 9 * 10**9, "free": 10**9})]


def told(speedup, *, resting=False, lengths=((0, 3), (4, 20)), accepted=40, drafted=80, length=None):
    return asdict(Speculation("lookup", length, accepted / drafted, 2.0, ((20, 15), (15, 10)), lengths, (("lookup 2", drafted, accepted),), 0.1,
                              speedup, resting))


def test_fitting_drafts_come_first_and_the_others_with_their_reasons():
    offered = show.choices("en", PAIRS)
    assert [value for _, value in offered] == ["", "lookup", "small", "other", "lookup+small", "lookup+other", "giant"]
    assert offered[-1][0].startswith("✕ giant: not loaded; with 9.0 GB for 1.0 GB free")
    assert show.spec("", 4) is None and show.spec("small", 0).length is None and show.spec("lookup", 4).length == 4


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_reason_has_words(language):
    from backends.speculative import REASONS
    values = {"target": "t", "need": 1, "free": 1, "id": 1, "mine": "a", "theirs": "b", "width": 64}
    for code in REASONS:
        assert show.why(language, Pairing("x", "", code, values))


@pytest.mark.parametrize(("speculation", "key"), [
    (told(1.62), "verdict_draft_faster"), (told(1.0), "verdict_draft_same"), (told(1.0, resting=True), "verdict_draft_rested"),
    (told(.48), "verdict_draft_slower_auto"), (told(None), "verdict_draft_short"),
    (told(None, lengths=((0, 30),), resting=True), "verdict_draft_rested"), (told(None, lengths=((0, 30),)), "verdict_draft_nothing"),
    (told(None, lengths=((0, 3),)), "verdict_draft_short"), (told(3.0, lengths=((4, 2),)), "verdict_draft_short"),
    (told(.48, drafted=4, accepted=0), "verdict_draft_short"), (told(.48, length=4), "verdict_draft_slower")])
def test_the_verdict_claims_no_more_than_was_measured(speculation, key):
    assert show.verdict(speculation)[0] == key
    assert tr("en", key, factor="1").split()[0] in show.line("en", speculation)


def test_a_slow_draft_is_called_slower_and_told_what_to_do():  # SP-11
    text = unescape(show.line("en", told(.475, accepted=24, length=8)))
    assert "0.47 × the speed" in text or "0.48 × the speed" in text
    assert "Choose fewer tokens a draft, auto, or no draft" in text and "as fast" not in text.replace("0.48", "")
    auto = unescape(show.line("en", told(.475, accepted=24)))
    assert "another draft, or none" in auto and "auto" not in auto and "换一种草稿" in show.line("zh", told(.475))


def test_the_choice_is_explained_and_inexact_kernels_are_named():
    assert show.about("en", "", PAIRS, MODEL) == ""
    assert "'b' there" in unescape(show.about("en", "lookup+other", PAIRS, MODEL))
    inexact = show.about("en", "small", PAIRS, ModelInfo("m", "fp16", "x", kernels="aten", lossless=False))
    assert "may round a row differently" in inexact and "aten" in inexact


def test_marks_carry_the_runs_and_cannot_break_out():
    html = show.marks([("a <b>\"'\n", True), ("c", False)], "before ")
    data = unescape(re.search(r'data-drafted="([^"]*)"', html)[1])
    assert json.loads(data) == [["before ", 0], ["a <b>\"'\n", 1], ["c", 0]] and "\n" not in html and "<b>" not in html
    assert show.marks([]) == ""
