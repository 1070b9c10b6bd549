"""Texts of people and of models for a widget that renders Markdown: HTML in them is shown as it was written, pictures are not loaded.

A sign without width (U+2060) behind the sign that would begin a tag, a picture or a link takes its meaning away and leaves what is
seen as it was. Code, which the widget shows literally anyway, is left alone. Pure; knows no widget.
"""

from __future__ import annotations

import re
from collections.abc import Collection

JOINER = "\u2060"
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,}).*?(?:^ {0,3}\1[`~]*[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<![\\`])(`+)(?!`)[^\n]*?(?<!`)\1(?!`)")
TAG = re.compile(r"<(?=[A-Za-z/!?])")
PICTURE = re.compile(r"!(?=\[)")
LINK = re.compile(r"\](?=\()")


def question(text: str) -> str:
    """What a person typed: neither tags nor pictures nor links."""
    return _outside_code(text, lambda part: LINK.sub("]" + JOINER, PICTURE.sub("!" + JOINER, TAG.sub("<" + JOINER, part))))


def answer(text: str, kept: Collection[str] = ()) -> str:
    """What a model wrote: links stay; so do the tags of ``kept``, which the widget has a meaning for ("<think>")."""
    tag = re.compile("|".join((*map(re.escape, kept), TAG.pattern)))

    def tame(part: str) -> str:
        part = tag.sub(lambda found: found[0] if found[0] in kept else "<" + JOINER, part)
        return PICTURE.sub("!" + JOINER, part)

    return _outside_code(text, tame)


def bare(text: str) -> str:
    """The text as it was before."""
    return re.sub(rf"(?<=[<!\]]){JOINER}", "", text)


def _outside_code(text: str, change) -> str:
    return _around(FENCE, text, lambda part: _around(SPAN, part, change))


def _around(code: re.Pattern[str], text: str, change) -> str:
    out, end = [], 0
    for found in code.finditer(text):
        out += [change(text[end:found.start()]), found[0]]
        end = found.end()
    return "".join((*out, change(text[end:])))
