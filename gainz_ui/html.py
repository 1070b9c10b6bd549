"""Small pieces of HTML for the page, pure: values in, escaped text out. Knows classes of the style sheet and the words of errors, no
services."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from html import escape as _escape

from backends.base import GainzError
from gainz_ui.i18n import explain
from gainz_ui.units import size

_serial = itertools.count(1)            # makes the same file twice two different elements


def escape(text: str) -> str:
    """Safe as content and as attribute, on one line."""
    return _escape(text).replace("\r", "").replace("\n", "&#10;")


def number(count: float) -> str:
    return f"{count:,.0f}"


def short_count(count: float) -> str:
    """134.5 M, 1.2 B."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def chip(text: str, kind: str = "plain", title: str = "") -> str:
    tip = f' title="{escape(title)}"' if title else ""
    return f'<span class="gz-chip gz-{kind}"{tip}><i class="gz-dot" aria-hidden="true"></i><b>{escape(text)}</b></span>'


def tag(text: str) -> str:
    return f'<span class="gz-tag">{escape(text)}</span>'


def bar(share: float | None, label: str) -> str:
    """A progress bar; None = how far it is is not known."""
    if share is None:
        return f'<div class="gz-bar gz-unknown" role="progressbar" aria-label="{escape(label)}"><i></i></div>'
    percent = max(0.0, min(100.0, share * 100))
    return (f'<div class="gz-bar" role="progressbar" aria-label="{escape(label)}" aria-valuemin="0" aria-valuemax="100" '
            f'aria-valuenow="{percent:.0f}"><i style="width:{percent:.1f}%"></i></div>')


def notice(kind: str, title: str, lines: Iterable[str] = (), live: bool = True) -> str:
    """A box that says something: an error, a warning, a hint."""
    body = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
    role = ("alert" if kind == "bad" else "status") if live else "note"
    return f'<div class="gz-notice gz-{kind}" role="{role}"><strong>{escape(title)}</strong>{body}</div>'


def refusal(words: str, error: GainzError) -> str:
    """What went wrong and what to do, in the language ``words``."""
    title, what, remedy = explain(words, error)
    return notice("bad", title, [what, remedy])


def empty(title: str, lines: Iterable[str] = (), extra: str = "") -> str:
    """What stands where nothing is yet. ``extra``: HTML of ours."""
    body = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
    return f'<div class="gz-empty"><h3>{escape(title)}</h3>{body}{extra}</div>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values; rows without a value are left out."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows if value)
    return f'<dl class="gz-facts">{items}</dl>' if items else ""


def tiles(rows: Sequence[tuple[str, str, str]]) -> str:
    """Figures: (label, value, unit)."""
    items = "".join(
        f'<div class="gz-tile"><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(unit)}</small></dd></div>'
        for label, value, unit in rows
    )
    return f'<dl class="gz-tiles">{items}</dl>'


def stacked(parts: Sequence[tuple[str, float, str]], whole: float, label: str) -> str:
    """A bar of parts of ``whole`` with a legend: (name, amount in bytes, class)."""
    scale = max(whole, sum(amount for _, amount, _ in parts), 1)
    pieces = "".join(f'<i class="gz-part-{css}" style="width:{100 * amount / scale:.2f}%"></i>' for _, amount, css in parts)
    mark = f'<b style="left:{min(100.0, 100 * whole / scale):.2f}%"></b>' if whole < scale else ""
    legend = "".join(
        f'<span><i class="gz-part-{css}"></i>{escape(name)} <b>{size(amount)}</b></span>' for name, amount, css in parts
    )
    whole_bar = f'<div class="gz-stack" role="img" aria-label="{escape(label)}">{pieces}{mark}</div>'
    return f'{whole_bar}<div class="gz-legend">{legend}</div>'


def file(name: str, text: str, kind: str) -> str:
    """A file in a hidden element, which page.js turns into a download."""
    return f'<pre data-name="{escape(name)}" data-kind="{escape(kind)}" data-serial="{next(_serial)}">{escape(text)}</pre>'
