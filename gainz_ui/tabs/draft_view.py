"""Drafting on the page, pure: what can be chosen and why not, how it went and whether it paid, which words were drafted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from backends.base import DraftSpec, ModelInfo
from backends.speculative import LOOKUP, STACKED, Pairing
from gainz_ui import html
from gainz_ui.i18n import tr
from gainz_ui.units import size

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
FEWEST = 32                             # drafted tokens that it takes to judge by
PAYS, COSTS = 1.03, 0.97                # speed beside plain passes: above it pays, below it costs


def spec(name: str | None, length: int | None = None) -> DraftSpec | None:
    """What the two widgets ask for; the second, in which 0 is "auto", is hidden where the first asks for no draft."""
    return DraftSpec.asked(name, name and int(length or 0) or None)


def choices(language: str, pairs: Sequence[Pairing]) -> list[tuple[str, str]]:
    """For the dropdown: no draft, what fits, lookup before each model, and what does not fit with its reason."""
    say = lambda key, **values: tr(language, key, **values)  # noqa: E731
    out = [(say("draft_off"), "")]
    fit = [pair for pair in pairs if pair.fits]
    models = [pair for pair in fit if pair.name != LOOKUP]
    out += [(say("draft_lookup"), LOOKUP) for pair in fit if pair.name == LOOKUP]
    out += [(say("draft_through_text", name=pair.name) if pair.how == "text" else pair.name, pair.name) for pair in models]
    out += [(say("draft_stacked", name=pair.name), STACKED + pair.name) for pair in models]
    return out + [(say("draft_unfit", name=say("draft_lookup") if pair.name == LOOKUP else pair.name, reason=why(language, pair)),
                   pair.name) for pair in pairs if not pair.fits]


def why(language: str, pair: Pairing) -> str:
    values = {key: size(value) if key in ("need", "free") else value for key, value in pair.values.items()}
    return tr(language, f"pair_{pair.code}", **values)


def about(language: str, chosen: str | None, pairs: Sequence[Pairing], target: ModelInfo) -> str:
    """Below the choice: what there is to know of it, or why it cannot be; and what the target's kernels do not promise."""
    if not chosen:
        return ""
    name = chosen.removeprefix(STACKED)
    pair = next((pair for pair in pairs if pair.name == name), None)
    parts = []
    if pair is not None:
        parts.append(html.notice("plain" if pair.fits else "bad", "", [why(language, pair)], live=False) if not pair.fits
                     else f'<p class="gz-served">{html.escape(why(language, pair))}</p>')
    if not target.lossless:
        words = tr(language, "draft_not_exact", model=target.name, kernels=target.kernels or target.path)
        parts.append(html.notice("warn", "", [words], live=False))
    return "".join(parts)


# ---------------------------------------------------------------------------------------------- how it went
def verdict(told: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Key and values of the sentence that says whether drafting paid. ``told``: a `Speculation` as a mapping."""
    factor = told["speedup"]
    values = {"factor": f"{factor:.2f}"} if factor else {}
    passes = sum(count for _, count in told["lengths"])
    if not any(length for length, _ in told["lengths"]):
        return ("verdict_draft_rested" if told["resting"] else "verdict_draft_nothing" if passes > 8 else "verdict_draft_short"), {}
    if factor is None or passes < 4 or sum(drafted for _, drafted, _ in told["sources"]) < FEWEST:
        return ("verdict_draft_rested" if told["resting"] else "verdict_draft_short"), {}
    if factor >= PAYS:
        return "verdict_draft_faster", values
    if factor < COSTS:
        return "verdict_draft_slower" if told["length"] else "verdict_draft_slower_auto", values
    return ("verdict_draft_rested" if told["resting"] else "verdict_draft_same"), {}


def line(language: str, told: Mapping[str, Any] | None, *, tinted: bool = True) -> str:
    """Acceptance, tokens a pass, measured speed and the verdict; places and lengths folded below. ``tinted``: the answer's
    accepted tokens are."""
    if not told:
        return ""
    say = lambda key, **values: tr(language, key, **values)  # noqa: E731
    drafted = sum(count for _, count, _ in told["sources"])
    name = say("draft_lookup") if told["draft"] == LOOKUP else told["draft"]
    if drafted:
        facts = [say("draft_line", draft=name, rate=f"{told['acceptance']:.0%}", drafted=html.number(drafted),
                     tokens=f"{told['tokens_per_pass']:.2f}")]
        if told["speedup"]:
            facts.append(say("draft_speed", factor=f"{told['speedup']:.2f}"))
    else:
        facts = [say("draft_line_none", draft=name)]
    key, values = verdict(told)
    kind = {"verdict_draft_faster": "good", "verdict_draft_slower": "warn", "verdict_draft_slower_auto": "warn"}.get(key, "plain")
    extra = [say("draft_tinted")] if tinted and told["acceptance"] else []
    return (f'<div class="gz-drafting gz-{kind}"><p><strong>{html.escape(say(key, **values))}</strong> '
            f'{html.escape(say("draft_facts_line", facts=" · ".join(facts)))}{html.escape(" ".join(extra))}</p>{_details(say, told)}</div>')


def _details(say: Any, told: Mapping[str, Any]) -> str:
    if not told["positions"]:
        return ""
    rates = " · ".join(f"{right / tried:.0%}" for tried, right in told["positions"])
    lengths = " · ".join(f"{length} ({passes})" for length, passes in told["lengths"])
    return f'<p class="gz-served">{html.escape(say("draft_positions", rates=rates))}<br>{html.escape(say("draft_lengths", lengths=lengths))}</p>'


def marks(runs: Sequence[tuple[str, bool]], before: str = "") -> str:
    """A hidden element from which page.js tints the accepted draft tokens of the last answer. ``before``: text in front of
    the first run."""
    if not runs:
        return ""
    data = json.dumps([[before, 0], *([text, int(drafted)] for text, drafted in runs)], ensure_ascii=False, separators=(",", ":"))
    return f'<div hidden data-drafted="{html.escape(data)}"></div>'
