"""What the compare tab shows of answers side by side, pure: shots of a comparison in, HTML out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from backends.speculative import Pairing

from gainz_ui import html
from gainz_ui.i18n import said, tr
from gainz_ui.services.compare import Plan
from gainz_ui.services.parting import Parting, Shot, marked, parting
from gainz_ui.tabs import draft_view
from gainz_ui.tabs.chat_view import stage

STATES = {"waiting": "plain", "loading": "busy", "answering": "busy", "done": "good", "failed": "bad"}


def about(words: str, plan: Plan) -> str:
    """What will happen, before it does: at once or in turn, and why."""
    values = {"need": html.size(plan.need), "free": html.size(plan.free), "context": html.number(plan.context)}
    if plan.why == "memory":
        lines = [tr(words, "turn_memory_help")]
        lines += [tr(words, "turn_makes_way", names=", ".join(plan.unload))] if plan.unload else []
        return html.notice("warn", tr(words, "turn_memory", **values), lines)
    loads = [tr(words, "compare_loads", names=", ".join(plan.load), **values)] if plan.load else []
    if plan.in_turn:
        return html.notice("plain", tr(words, "turn_asked"), loads)
    return html.notice("plain", tr(words, "at_once", count=len(plan.names)), [*loads, tr(words, "at_once_help")])


def card(words: str, shots: Sequence[Shot], index: int, plan: Plan) -> str:
    """One variant: name, state, figures, text with its marks."""
    shot = shots[index]
    found, other = _mark(shots, index)
    state = tr(words, "state_unloaded") if shot.unloaded and shot.state == "done" else tr(words, f"side_{shot.state}")
    badge = html.chip(state, STATES[shot.state])
    lines = [f'<div class="gz-side-head"><h3 class="gz-h">{html.escape(shot.name)}</h3>{badge}</div>',
             _tags(words, shot, index)]
    lines += [_tiles(words, shot, plan)]
    if shot.state == "loading":
        lines.append(_loading(words, shot))
    if shot.view.text:
        lines.append(_text(words, shot, found, other))
    lines.append(_drafting(words, shot))
    if shot.error is not None:
        lines.append(html.refusal(words, shot.error))
    lines.append(_verdict(words, shots, index, found))
    return f'<section class="gz-side" aria-label="{html.escape(shot.name)}">{"".join(lines)}</section>'


def _mark(shots: Sequence[Shot], index: int) -> tuple[Parting | None, str]:
    """Where this answer parts, and the whole text of the other one if that is finished. The reference is marked where the
    first of the others leaves it."""
    if index:
        whole = shots[0].view.done and shots[index].view.done
        return parting(shots[0], shots[index]), shots[0].view.text if whole else ""
    leaving = [(seen.token, seen.at, shot) for shot in shots[1:] if shot.view.text and (seen := parting(shot, shots[0]))]
    if not leaving:
        return None, ""
    token, at, shot = min(leaving, key=lambda item: item[1])
    return Parting(token, at), shot.view.text if shot.view.done and shots[0].view.done else ""


def _tags(words: str, shot: Shot, index: int) -> str:
    info = shot.info
    parts = [tr(words, "the_reference")] if index == 0 else []
    parts += [part for part in (said(words, info.format), said(words, info.kernels), info.dtype) if part] if info else []
    return '<p class="gz-served">' + "".join(html.tag(part) for part in parts) + "</p>"


def _tiles(words: str, shot: Shot, plan: Plan) -> str:
    view, info = shot.view, shot.info
    tokens = view.usage.completion_tokens if view.usage else view.tokens
    ttft = f"{view.ttft * 1000:.0f}" if view.ttft is not None else "–"
    peak = html.size(info.peak_bytes).split(" ") if info and info.peak_bytes else ["–", ""]
    disk = html.size(shot.size).split(" ") if info is None or info.path != "remote" else ["–", ""]
    return html.tiles([(tr(words, "stat_ttft"), ttft, "ms"), (tr(words, "stat_speed"),
                                                              f"{view.speed:.1f}" if view.speed else "–", "tok/s"),
                       (tr(words, "stat_tokens"), "–" if tokens is None else html.number(tokens), ""), (tr(words, "fact_peak"), *peak),
                       (tr(words, "fact_size"), *disk)])


def _loading(words: str, shot: Shot) -> str:
    if shot.progress is None:
        return html.bar(None, shot.name)
    share = shot.progress.done / shot.progress.total if shot.progress.total else None
    text = html.escape(stage(words, shot.progress))
    return f'<div class="gz-work"><b></b><span>{text}</span>{html.bar(share, shot.name)}</div>'


def _text(words: str, shot: Shot, found: Parting | None, other: str) -> str:
    title = html.escape(tr(words, "parts_here"))
    out = []
    for kind, piece in marked(shot.view.text, found.at if found else None, other):
        text = html.escape(piece)
        if kind == "first":
            out.append(f'<mark class="gz-first" title="{title}">{text}</mark>')
        else:
            out.append(f'<span class="gz-other">{text}</span>' if kind == "other" else text)
    return f'<div class="gz-answer" tabindex="0">{"".join(out)}</div>'


def _drafting(words: str, shot: Shot) -> str:
    """What its draft brought, or why it has none."""
    if shot.undrafted is not None:
        reason = _reason(words, shot.undrafted)
        return f'<p class="gz-served">{html.escape(tr(words, "compare_undrafted", name=_draft(words, shot.undrafted.name), reason=reason))}</p>'
    told = shot.view.usage.speculation if shot.view.usage else None
    return draft_view.line(words, asdict(told), tinted=False) if told else ""


def _reason(words: str, pair: Pairing) -> str:
    """As a part of a sentence."""
    return draft_view.why(words, pair).rstrip(".。")


def _draft(words: str, name: str) -> str:
    return tr(words, "draft_lookup") if name == draft_view.LOOKUP else name


def drafting_note(words: str, chosen: str, pairs: Sequence[Pairing], unfit: Mapping[str, Pairing], inexact: Sequence[str]) -> str:
    """Below the choice of a draft: what it is, which of the variants answer without it, and whose kernels promise less."""
    if not chosen:
        return ""
    pair = next((pair for pair in pairs if pair.name == chosen.removeprefix(draft_view.STACKED)), None)
    lines = [draft_view.why(words, pair)] if pair is not None and pair.fits else []
    lines += [tr(words, "compare_without", model=model, reason=_reason(words, reason)) for model, reason in unfit.items()]
    lines += [tr(words, "compare_not_exact", models=", ".join(inexact))] if inexact else []
    return "".join(f'<p class="gz-served">{html.escape(line)}</p>' for line in lines)


def _verdict(words: str, shots: Sequence[Shot], index: int, found: Parting | None) -> str:
    shot = shots[index]
    if index == 0 or not shot.view.text:
        return ""
    if found is not None:
        text = tr(words, "parts_at", token=found.token + 1, model=shots[0].name)
    elif shot.view.done and shots[0].view.done:
        text = tr(words, "same_answer", model=shots[0].name)
    else:
        return ""
    return f'<p class="gz-served">{html.escape(text)}</p>'


def names(words: str, entries: Sequence[Any]) -> list[tuple[str, str]]:
    """Choices: what can be loaded, with format and size."""
    return [(f"{entry.name} · {said(words, entry.format or entry.title)} · {html.size(entry.size)}", entry.name) for entry in entries
            if entry.ready]
