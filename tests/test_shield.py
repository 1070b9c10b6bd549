"""Texts in a Markdown widget: seen as written, without tags, pictures or links of a stranger's making."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from gainz_ui import shield

J = shield.JOINER


@pytest.mark.parametrize("text", ["<img src=x onerror=alert(1)>", "</div>", "<!-- a -->", "<?php ?>", "![t](http://evil.example/x.png)",
                                  "[a](javascript:alert(3))", "\\`<b>\\`", "a ` b\n<i> ` c"])
def test_what_a_person_typed_has_no_meaning_and_looks_the_same(text):
    shown = shield.question(text)
    assert J in shown and shown.replace(J, "") == text and shield.bare(shown) == text
    for mark in ("<i", "<b", "</", "<!", "<?", "![", "]("):
        assert mark not in shown


@pytest.mark.parametrize("text", ["`<div>` is a tag", "``a ` <b>``", "```html\n<div>\n![x](y)\n```", "~~~\n<b>\n~~~", "```\n<b>", "1 < 2 and a<=b"])
def test_code_and_comparisons_are_left_alone(text):
    assert shield.question(text) == shield.answer(text) == text


def test_code_ends_where_it_ends():
    assert shield.answer("```\n<a>\n```\n<b>") == f"```\n<a>\n```\n<{J}b>"
    assert shield.answer("`<a>` <b> `<c>`") == f"`<a>` <{J}b> `<c>`"


def test_an_answer_keeps_links_and_the_tags_that_mean_something():
    text = "<think>so</think> see [docs](https://example.org) <b>"
    assert shield.answer(text, ("<think>", "</think>")) == f"<think>so</think> see [docs](https://example.org) <{J}b>"
    assert shield.answer("![t](u)") == f"!{J}[t](u)"


@settings(deadline=None)
@given(st.text(alphabet="<>![]()`~\\ab/ \n", max_size=60))
def test_nothing_is_ever_lost(text):
    assert shield.bare(shield.question(text)) == text == shield.bare(shield.answer(text))
