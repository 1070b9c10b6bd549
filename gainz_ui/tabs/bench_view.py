"""What the benchmark tab shows, pure: reports (plain JSON) in, HTML and words out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gainz_ui import html
from gainz_ui.i18n import option_label, said, tr
from gainz_ui.services.bench import calibration
from gainz_ui.services.bench.history import Change, Entry
from gainz_ui.services.bench.report import caused, coarseness, more_pairs
from gainz_ui.services.stats import ALIKE, FASTER, SLOWER, UNKNOWN
from gainz_ui.tabs.chat_view import stage

Report = Mapping[str, Any]
KINDS = {FASTER: "good", SLOWER: "warn", ALIKE: "plain"}
OWN = {"model": "bench_model", "draft": "bench_draft", "draft_length": "bench_draft_length", "workload": "bench_workload",
       "tokens": "bench_tokens", "mode": "bench_mode", "streams": "bench_streams", "planted": "bench_held_back"}      # named by this tab's form
VERDICTS = {FASTER: "bench_word_faster", SLOWER: "bench_word_slower", ALIKE: "bench_word_same", UNKNOWN: "bench_word_unknown"}
WORDS = {FASTER: "bench_faster", SLOWER: "bench_slower", ALIKE: "bench_same"}
TOLD = ("probe", "calibrate", "measure")        # stages of whose notes, in English, the page says all by itself
AXES = ("speedup", "speed", "ratio", "pair", "probe", "gap", "share", "ceiling", "reached", "bandwidth", "compute", "overhead", "context",
        "streams", "together", "each", "goodput", "queue", "decode", "prefill", "ttft", "end_to_end", "throughput")


def axes(words: str) -> dict[str, str]:
    """The words of the figures."""
    return {name: tr(words, f"axis_{name}") for name in AXES}


# ---------------------------------------------------------------------------------------------- the verdict
def verdict(words: str, report: Report) -> str:
    """One sentence, what it rests on, and what would have to be said against it."""
    say = lambda key, **values: tr(words, key, **values)  # noqa: E731
    word = report["verdict"]
    lines = [_rests_on(words, report), _cause(words, report)]
    lines += [say("bench_planted", percent=f"{100 * report['planted']:g}")] if report["planted"] else []
    lines += [say("bench_stopped_early")] if report["cancelled"] else []
    lines += [say("bench_noisy", count=report["noisy"])] if report["noisy"] else []
    lines += [say("bench_in_blocks", count=report["block"])] if report["block"] > 1 else []
    return html.notice(KINDS.get(word, "plain"), sentence(words, report), lines)


def sentence(words: str, report: Report) -> str:
    """The verdict in one sentence."""
    say = lambda key, **values: tr(words, key, **values)  # noqa: E731
    if report["ratio"] is None:
        return say("bench_nothing")
    if report["withheld"] == "coarse":
        return say("bench_coarse", reach=coarseness(report), a=report["a"]["asked"], b=report["b"]["asked"])
    if report["withheld"]:
        return say("bench_withheld")
    kind = WORDS.get(report["verdict"])
    measured = say("bench_speed_of_all", streams=report["streams"]) if report["main"] == "throughput" else say("bench_speed_of_one")
    if kind is None:
        more = more_pairs(report)
        key = "bench_unknown" if more is None else "bench_unknown_more" if more else "bench_unknown_noise"
        return say(key, more=more, b=report["b"]["asked"], a=report["a"]["asked"])
    values = {"a": report["a"]["asked"], "b": report["b"]["asked"], "measure": measured, "margin": f"{100 * report['same']:g}",
              "factor": _times(report["ratio"])}
    return say(kind, **values)


def _rests_on(words: str, report: Report) -> str:
    if report["ratio"] is None:
        return ""
    if not report["interval"]:
        return tr(words, "bench_no_interval", ratio=f"{report['ratio']:.3f}", units=report["units"])
    low, high = report["interval"]
    return tr(words, "bench_interval", ratio=f"{report['ratio']:.3f}", low=f"{low:.3f}", high=f"{high:.3f}",
              level=f"{100 * (1 - report['level']):.4g}", units=report["units"])


def _cause(words: str, report: Report) -> str:
    differs = report["differs"]
    if not differs:
        return tr(words, "bench_differs_none")
    if report["cause"]:
        old, new = differs[report["cause"]]
        key = "bench_differs_cause" if caused(report) else "bench_differs_one"
        return tr(words, key, setting=_setting(words, report["cause"]), old=_text(old), new=_text(new))
    each = "; ".join(f"{_setting(words, key)}: {_text(old)} → {_text(new)}" for key, (old, new) in differs.items())
    return tr(words, "bench_differs_many", count=len(differs), each=each)


def _setting(words: str, key: str) -> str:
    """What a form calls it, else its name in settings files."""
    return tr(words, OWN[key]) if key in OWN else option_label(words, key, key)


# ---------------------------------------------------------------------------------------------- figures
def table(words: str, report: Report) -> str:
    """Medians of both sides, and B over A with its interval."""
    say = lambda key, **values: tr(words, key, **values)  # noqa: E731
    head = "".join(f'<th scope="col">{html.escape(name)}<small>{html.escape(note)}</small></th>' for name, note in (
        ("A", report["a"]["asked"]), ("B", report["b"]["asked"]), ("B / A", say("bench_paired"))))
    rows = [_row(words, report, label, key, unit, scale) for label, key, unit, scale in ROWS
            if any(report[arm].get(key) is not None for arm in "ab")]
    return _framed(say("bench_figures"), "gz-table gz-tight", f"<th></th>{head}", "".join(rows)) + _read(words, report)


def _framed(label: str, css: str, head: str, rows: str) -> str:
    """A table that scrolls in its frame; ``head``, ``rows``: its HTML."""
    return (f'<div class="gz-scroll" tabindex="0" role="region" aria-label="{html.escape(label)}"><table class="{css}">'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>")


def _titled(title: str, css: str, head: str, rows: str) -> str:
    return f'<h3 class="gz-h">{html.escape(title)}</h3>{_framed(title, css, head, rows)}'


def _read(words: str, report: Report) -> str:
    """How the table is to be read."""
    if report["ratio"] is None:
        return ""
    lines = [tr(words, "bench_read_ratio"),
             tr(words, "bench_read_interval", measure=tr(words, f"axis_{report['main']}"), level=f"{100 * (1 - report['level']):.4g}")]
    return f'<p class="gz-served">{html.escape(" ".join(lines) if words == "en" else "".join(lines))}</p>'


ROWS = (("axis_throughput", "throughput", "tok/s", 1), ("axis_decode", "decode", "tok/s", 1), ("axis_prefill", "prefill", "tok/s", 1),
        ("axis_ttft", "ttft", "ms", 1000), ("bench_itl", "itl_p50", "ms", 1000), ("bench_itl99", "itl_p99", "ms", 1000),
        ("axis_end_to_end", "end_to_end", "s", 1), ("bench_goodput", "goodput", "/s", 1), ("bench_queue", "queue_p50", "ms", 1000),
        ("bench_acceptance", "acceptance", "%", 100), ("bench_per_pass", "tokens_per_pass", "", 1),
        ("bench_joules", "joules_per_token", "J", 1), ("fact_load_time", "load_seconds", "s", 1))


def _row(words: str, report: Report, label: str, key: str, unit: str, scale: float) -> str:
    cells = [_figure(report[arm].get(key), unit, scale) for arm in "ab"]
    found = report["measures"].get(key)
    return f'<tr><th scope="row">{html.escape(tr(words, label))}</th>' + "".join(f"<td>{cell}</td>" for cell in (*cells, _ratio(found))) + "</tr>"


def _ratio(found: Mapping[str, Any] | None) -> str:
    if not found or found["ratio"] is None:
        return '<span class="gz-soft">–</span>'
    spread = f"<small>{found['interval'][0]:.3f} – {found['interval'][1]:.3f}</small>" if found["interval"] else ""
    return f"{found['ratio']:.3f}{spread}"


def _figure(value: float | None, unit: str, scale: float) -> str:
    if value is None:
        return '<span class="gz-soft">–</span>'
    shown = value * scale
    text = f"{shown:,.0f}" if abs(shown) >= 1000 else f"{shown:.3g}" if abs(shown) < 10 else f"{shown:.1f}"
    return html.escape(f"{text} {unit}".strip())


def about(words: str, report: Report) -> str:
    """Under which circumstances, and what could not be measured."""
    say = lambda key, **values: tr(words, key, **values)  # noqa: E731
    where = report["environment"]
    rows = [(say("bench_workload"), report["workload"]), (say("bench_pairs"), str(len(report["pairs"]))),
            (say("bench_repeated"), str(report["repeated"])), (say("bench_mode"), say(f"bench_{report['mode']}")),
            (say("bench_streams"), str(report["streams"])), (say("bench_bandwidth"), f"{where['bandwidth'] / 1e9:.1f} GB/s"),
            (say("bench_calibration"), _calibration(words, report)),
            (say("bench_energy"), report["energy"]["source"] or say("bench_unmeasurable", reason=said(words, report["energy"]["reason"]))),
            (say("bench_machine"), " · ".join((where["processor"], said(words, f"{where['threads']} threads"), where["system"]))),
            (say("bench_versions"), f"Gainz {where['gainz']} · torch {where['torch']} · Python {where['python']}"),
            (say("bench_when"), report["made"].replace("T", " ").replace("+00:00", " UTC")), (say("bench_name"), report.get("name", ""))]
    return '<div class="gz-stacked">' + "".join(_memory(words, report, arm) for arm in "ab") + html.facts(rows) + "</div>"


def _calibration(words: str, report: Report) -> str:
    found = report["calibration"]
    if found is None:
        return "–"
    if not found["passed"]:
        return tr(words, "bench_calibration_failed")
    key = "bench_calibration_passed" if calibration.sound(found) else "bench_calibration_coarse"
    return tr(words, key, reach=coarseness(report), pairs=found["pairs"])


def _memory(words: str, report: Report, arm: str) -> str:
    held = report[arm]["memory"]
    parts = [(tr(words, key), held[name], css) for key, name, css in (("fact_weights", "weights", "weights"), ("part_kv", "kv", "kv"),
                                                                      ("part_work", "workspace", "work")) if held.get(name)]
    if not parts:
        return ""
    whole = max(sum(report[one]["memory"].get(name) or 0 for name in ("weights", "kv", "workspace")) for one in "ab")
    peak = tr(words, "bench_peak", size=html.size(held["peak"])) if held["peak"] else ""
    label = tr(words, "bench_memory", side=arm.upper(), peak=peak)
    return f'<div><p class="gz-served">{html.escape(label)}</p>{html.stacked(parts, whole, label)}</div>'


def candidates(words: str, reports: Sequence[Report]) -> str:
    """Several against the same A, a line each."""
    say = lambda key: tr(words, key)  # noqa: E731
    head = "".join(f'<th scope="col">{html.escape(say(key))}</th>' for key in ("bench_candidate", "bench_verdict", "axis_speedup"))
    rows = "".join(f'<tr><th scope="row">{html.escape(report["b"]["asked"])}</th><td>{html.escape(tr(words, VERDICTS[report["verdict"]]))}</td>'
                   f"<td>{_ratio(report)}</td></tr>" for report in reports)
    return _titled(say("bench_candidates"), "gz-table gz-tight", head, rows)


def levels(words: str, report: Report) -> str:
    """Each number of answers at once, a line each; "": there was only one."""
    if not report.get("levels"):
        return ""
    say = lambda key: tr(words, key)  # noqa: E731
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in ("A", "B", "B / A", say("bench_verdict")))
    rows = "".join(f'<tr><th scope="row">{level["streams"]}</th>' + "".join(f"<td>{_served(words, level[arm])}</td>" for arm in "ab") +
                   f'<td>{_ratio(level)}</td><td>{html.escape(say(VERDICTS[level["verdict"]]))}</td></tr>' for level in report["levels"])
    return _titled(say("plot_streams"), "gz-table", f'<th scope="col">{html.escape(say("axis_streams"))}</th>{head}', rows)


def _served(words: str, side: Mapping[str, Any]) -> str:
    """Tokens a second of all; below, how many answers kept the limits, and their wait."""
    kept = "–" if side["kept_limits"] is None else f"{100 * side['kept_limits']:.0f} %"
    waited = "–" if side["queue_p50"] is None else html.duration(side["queue_p50"])
    more = tr(words, "bench_served", kept=kept, wait=waited)
    return f"{_figure(side['tokens_per_second'], 'tok/s', 1)}<small>{html.escape(more)}</small>"


# ---------------------------------------------------------------------------------------------- under way
def work(words: str, task: Any, left: float | None, repeated: int) -> str:
    """Where a benchmark stands. No ratio is shown before its time: whoever sees one stops when it pleases."""
    progress = task.progress if task.progress.stage not in TOLD else replace(task.progress, note="")
    share = progress.done / progress.total if progress.total else None
    name = tr(words, "chip_bench", name=task.subject)
    notes = [stage(words, progress)]
    notes += [tr(words, "bench_left", time=html.duration(left))] if left is not None else []
    notes += [tr(words, "bench_repeated_so_far", count=repeated)] if repeated else []
    return (f'<div class="gz-work"><b>{html.escape(name)}</b><span>{html.escape(" · ".join(notes))}</span>{html.bar(share, name)}</div>'
            f'<p class="gz-served">{html.escape(tr(words, "bench_held"))}</p>')


# ---------------------------------------------------------------------------------------------- history
def label(words: str, entry: Entry) -> str:
    """Two lines: the sides; verdict, ratio, workload and date."""
    parts = [tr(words, VERDICTS[entry.verdict]), f"{entry.ratio:.3f}" if entry.ratio else "", entry.workload, tr(words, "bench_count", count=entry.pairs),
             entry.made[:16].replace("T", " ")]
    return f"{entry.a} → {entry.b}\n" + " · ".join(part for part in parts if part)


def searched(words: str, text: str) -> str:
    """What is typed into the filter, verdicts as they are kept."""
    for verdict, key in VERDICTS.items():
        text = text.replace(tr(words, key), verdict)
    return text


def changes(words: str, found: Sequence[Change], speeds: Mapping[str, tuple[float | None, float | None, float | None]]) -> str:
    """What is not as it was at the baseline, and both speeds then and now."""
    say = lambda key, **values: tr(words, key, **values)  # noqa: E731
    of = lambda part, name: say("bench_of", part=say(f"part_{part}"), name=name)  # noqa: E731
    rows = [(of(arm, say("bench_speed")), then, now, f"{ratio:.3f}" if ratio else "") for arm, (then, now, ratio) in speeds.items()]
    rows += [(of(change.part, _setting(words, change.key)), change.before, change.after, "") for change in found]
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in (say("bench_before"), say("bench_now"), say("bench_now_over")))
    lines = "".join(f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(_text(old))}</td><td>{html.escape(_text(new))}</td>'
                    f"<td>{html.escape(more)}</td></tr>" for name, old, new, more in rows)
    title = html.escape(say("bench_changed"))
    none = "" if found else html.notice("plain", say("bench_unchanged"), live=False)
    return (f'<div class="gz-stacked"><h3 class="gz-h">{title}</h3><div class="gz-scroll" tabindex="0" role="region" aria-label="{title}">'
            f'<table class="gz-table gz-tight"><thead><tr><th></th>{head}</tr></thead><tbody>{lines}</tbody></table></div>{none}'
            f'<p class="gz-served">{html.escape(say("bench_unpaired"))}</p></div>')


def _times(ratio: float) -> str:
    return f"{ratio:.2f}"


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
