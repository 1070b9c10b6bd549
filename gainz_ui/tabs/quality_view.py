"""What the compare tab shows of a quality report, pure: the report (plain JSON) in; HTML and a plot's points out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gainz_ui import html
from gainz_ui.i18n import tr
from gainz_ui.services.quality import FLIP_FLOOR, KL_FLOOR

Row = Mapping[str, Any]
KINDS = {"same": "good", "differs": "warn", "undecided": "plain"}


def report(words: str, found: Mapping[str, Any]) -> str:
    """Table, what it means, and how it was measured."""
    say = lambda key, **values: tr(words, key, **values)  # noqa: E731
    rows = found["rows"]
    parts = [_table(words, found)] if rows else []
    parts += [html.notice("bad", say("quality_refused", model=item["model"]), [item["reason"]], live=False)
              for item in found["refused"]]
    if rows:
        first = rows[0]
        text = say("bundled_text") if first["text"] == "bundled" else first["text"]
        parts.append(html.notice("plain", say("how_measured"), [
            say("how_text", text=text, windows=first["windows"], window_tokens=first["window_tokens"],
                tokens=html.number(first["tokens"]),
                digest=first["text_sha256"][:12]),
            say("how_intervals"), say("how_same", kl=f"{KL_FLOOR:g}", flips=_percent(FLIP_FLOOR)), say("how_pace")],
                                 live=False))
    return '<div class="gz-stacked">' + "".join(parts) + "</div>"


def _table(words: str, found: Mapping[str, Any]) -> str:
    rows, say = found["rows"], lambda key, **values: tr(words, key, **values)  # noqa: E731
    head = "".join(f'<th scope="col">{html.escape(name)}<small>{html.escape(note)}</small></th>' for name, note in (
        (found["reference"], say("the_reference")), *((row["model"], row.get("format", "")) for row in rows)))
    lines = [_line(say(key), base(words, found), [cell(words, row) for row in rows]) for key, base, cell in LINES
             if any(cell(words, row) for row in rows) and (len(rows) > 1 or key != "row_place")]
    label = html.escape(say("quality_title"))
    return (f'<div class="gz-scroll" tabindex="0" role="region" aria-label="{label}"><table class="gz-table">'
            f'<thead><tr><th></th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>')


def _line(name: str, base: str, cells: Sequence[str]) -> str:
    return f'<tr><th scope="row">{html.escape(name)}</th>' + "".join(f"<td>{cell}</td>" for cell in (base, *cells)) + "</tr>"


# ---------------------------------------------------------------------------------------------- cells
def _value(main: str, note: str = "") -> str:
    return f"{html.escape(main)}<small>{html.escape(note)}</small>" if note else html.escape(main)


def _verdict(words: str, row: Row) -> str:
    kind = row["verdict"]
    return html.chip(tr(words, f"verdict_{kind}"), KINDS[kind], tr(words, f"verdict_{kind}_help"))


def _perplexity(value: float, se: float | None) -> str:
    return _value(f"{value:.2f}", "± " + (f"{se:.2f}" if se is not None else "?"))


def _text_likelihood(words: str, row: Row) -> str:
    seen = row["likelihood"]
    if seen["low"] is None:
        return _value(f"× {seen['factor']:.3f}", tr(words, "no_interval"))
    return _value(f"× {seen['factor']:.3f}", f"{seen['low']:.3f} – {seen['high']:.3f}")


def _kl(words: str, row: Row) -> str:
    return _value(_small(row["kl_mean"]), _interval(words, row["kl_low"], row["kl_high"], _small))


def _spread(words: str, row: Row) -> str:
    return _value(" / ".join(_small(row[key]) for key in ("kl_median", "kl_p99", "kl_max")))


def _top1(words: str, row: Row) -> str:
    return _value(_percent(row["top1"]), _interval(words, row["top1_low"], row["top1_high"], _percent))


def _accuracy(words: str, row: Row) -> str:
    task = row.get("questions")
    return _value(_percent(task["accuracy"]), _interval(words, task["accuracy_low"], task["accuracy_high"],
                                                        _percent)) if task else ""


def _difference(words: str, row: Row) -> str:
    task = row.get("questions")
    if not task:
        return ""
    return _value(tr(words, "points", value=_signed(task["difference"])),
                  f"{_signed(task['difference_low'])} – {_signed(task['difference_high'])}")


def _flips(words: str, row: Row) -> str:
    task = row.get("questions")
    if not task:
        return ""
    return _value(_percent(task["flips"]), tr(words, "flips_note", lost=task["lost"], won=task["won"],
                                              low=_percent(task["flips_low"]), high=_percent(task["flips_high"])))


def _pace(pace: Mapping[str, float] | None) -> str:
    return _value(f"{pace['speed']:.1f} tok/s", f"{pace['low']:.1f} – {pace['high']:.1f}") if pace else ""


def _place(words: str, row: Row) -> str:
    low, high = row["rank"]
    return _value(str(low)) if low == high else _value(f"{low} – {high}", tr(words, "rank_open"))


def _interval(words: str, low: float | None, high: float | None, show: Callable[[float], str]) -> str:
    return tr(words, "no_interval") if low is None or high is None else f"{show(low)} – {show(high)}"


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _small(value: float) -> str:
    return f"{value:.3f}" if value >= 0.01 else f"{value:.1e}" if value else "0"


def _of_first(key: str) -> Callable[[str, Mapping[str, Any]], str]:
    """A figure of the reference that the first row brings along: all rows measure it alike."""
    def cell(words: str, found: Mapping[str, Any]) -> str:
        row = found["rows"][0]
        if key == "perplexity":
            return _perplexity(row["reference_perplexity"], row["reference_perplexity_se"])
        if key == "accuracy":
            return _value(_percent(row["questions"]["reference_accuracy"])) if row.get("questions") else ""
        return _pace(row.get("reference_pace"))
    return cell


def _nothing(words: str, found: Mapping[str, Any]) -> str:
    return '<span class="gz-soft">–</span>'


LINES: tuple[tuple[str, Callable[..., str], Callable[[str, Row], str]], ...] = (
    ("row_verdict", _nothing, _verdict),
    ("row_kl", _nothing, _kl),
    ("row_place", _nothing, _place),
    ("row_spread", _nothing, _spread),
    ("row_top1", _nothing, _top1),
    ("row_perplexity", _of_first("perplexity"), lambda words, row: _perplexity(row["perplexity"], row["perplexity_se"])),
    ("row_likelihood", _nothing, _text_likelihood),
    ("row_accuracy", _of_first("accuracy"), _accuracy),
    ("row_difference", _nothing, _difference),
    ("row_flips", _nothing, _flips),
    ("row_pace", _of_first("pace"), lambda words, row: _pace(row.get("pace"))),
    ("fact_size", lambda words, found: _value(html.size(found["reference_size"])), lambda words,
     row: _value(html.size(row["size"]))),
    ("fact_kernels", lambda words, found: _value(found["rows"][0]["reference_kernels"], found["rows"][0]["reference_dtype"]),
     lambda words, row: _value(row["model_kernels"], row["model_dtype"])),
)


def points(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For `plots.trade_off`; the reference's speed is the mean of what each row measured beside it."""
    rows = [row for row in found["rows"] if row.get("pace")]
    if not rows:
        return []
    theirs = {key: sum(row["reference_pace"][key] for row in rows) / len(rows) for key in ("speed", "low", "high")}
    out = [{"name": found["reference"], "size": found["reference_size"], "kl": None, **theirs}]
    for row in rows:
        out.append({"name": row["model"], "size": row["size"], "kl": row["kl_mean"],
                    **{key: row["pace"][key] for key in ("speed", "low", "high")}})
    return out
