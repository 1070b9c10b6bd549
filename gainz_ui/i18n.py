"""Every sentence of the page in English and 中文: one table a language, keyed alike.

Static texts travel as keys and become words in the browser (`T`); texts that a listener makes are looked up here (`tr`)
in the language of the page that asked (`language`). A missing key is an error, never a blank. Knows no layout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from backends.base import GainzError
from gainz_ui.early import LANGUAGE_COOKIE

LANGUAGES = ("en", "zh")
HOLE = re.compile(r"\{(\w+)\}")
TAGS = {"en": "en", "zh": "zh-CN"}      # what the browser calls them


@cache
def texts(language: str) -> Mapping[str, str]:
    """The files of one language, xx.json and xx.*.json, together."""
    files = sorted((Path(__file__).parent / "locale").glob(f"{language}*.json"))
    return {key: text for file in files for key, text in json.loads(file.read_text(encoding="utf-8")).items()}


def tr(language: str, key: str, **values: Any) -> str:
    """The text in one language, ``{name}`` filled in. KeyError for a key that is not in the table: that is our bug."""
    return texts(language)[key].format(**values) if values else texts(language)[key]


def has(key: str) -> bool:
    return key in texts("en")


def bundle() -> Any:
    """What Gradio wants when it is mounted."""
    import gradio as gr
    return gr.I18n(**{TAGS[name]: dict(texts(name)) for name in LANGUAGES})


def T(key: str) -> Any:  # noqa: N802  short, as it stands in every line of the layout
    """A text that the browser puts in its own language. KeyError as `tr`."""
    from gradio.i18n import I18nData
    for name in LANGUAGES:
        texts(name)[key]
    return I18nData(key)


def language(request: Any) -> str:
    """"en" or "zh": the choice in the cookie, else what the browser prefers. ``request``: a gr.Request, or None."""
    cookies, headers = getattr(request, "cookies", None) or {}, getattr(request, "headers", None) or {}
    chosen = cookies.get(LANGUAGE_COOKIE)
    if chosen in LANGUAGES:
        return chosen
    return "zh" if str(headers.get("accept-language", "")).lower().startswith("zh") else "en"


def option_label(language: str | None, name: str, fallback: str) -> Any:
    """An option's label: the table's, else the text beside the option's definition. ``language`` None: for the browser."""
    key = f"option_{name}"
    if not has(key):
        return fallback
    return T(key) if language is None else tr(language, key)


@cache
def _sayings() -> tuple[tuple[re.Pattern[str], str], ...]:
    """English sentences of the program (`said_…` in the table) as patterns, with their keys; those that fix most first."""
    said = {key: text for key, text in texts("en").items() if key.startswith("said_")}
    keys = sorted(said, key=lambda key: -len(HOLE.sub("", said[key])))
    hole = lambda found: f"(?P<{found[1]}>{'[0-9.,]+' if found[1] == 'count' else '.+'})"  # noqa: E731
    return tuple((re.compile(HOLE.sub(hole, re.sub(r"[^\w{}]", lambda sign: re.escape(sign[0]), said[key])), re.DOTALL), key)
                 for key in keys)


def said(language: str, text: str) -> str:
    """A sentence that the program made in English, in the language of the page where the table knows it, else as it is. What stands for
    {what} and {rest} is a sentence again, for {count} a number; each part of a list is a sentence, too."""
    if language == "en":
        return text
    for pattern, key in _sayings():
        if found := pattern.fullmatch(text):
            return tr(language, key, **{name: said(language, part) if name in ("what", "rest") else part
                                        for name, part in found.groupdict().items()})
    head, sign, rest = text.partition(", ")
    return f"{said(language, head)}, {said(language, rest)}" if sign else text


def explain(language: str, error: GainzError) -> tuple[str, str, str]:
    """(title, what happened, what to do). Titles and general advice are translated by the error's code, what happened and a remedy of its
    own where the table knows the sentence; the facts stay as they stand in the log."""
    facts = ", ".join(f"{key} = {value}" for key, value in error.evidence.items())
    cause = said(language, error.cause)
    what = f"{cause} ({facts})" if facts else cause
    if language == "en" or f"error_{error.code}" not in texts(language):
        return error.title, what, error.remedy
    advice = texts(language).get(f"advice_{error.code}") if error.remedy == error.advice else None
    return tr(language, f"error_{error.code}"), what, advice or said(language, error.remedy)
