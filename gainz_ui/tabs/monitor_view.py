"""What the monitor tab shows, pure: figures in, HTML out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean

from gainz_ui import html
from gainz_ui.i18n import has, tr
from gainz_ui.services.meter import Ended, Moment
from gainz_ui.services.monitor import Figures, ModelUse, Spread, rates
from gainz_ui.sparks import Line, chart, nice, thinned

SPAN = 300.0                            # seconds that the charts show
STEP = 5.0                              # and that one point of a line stands for
PARTS = ("tiles", "charts", "times", "models", "recent", "errors")


def parts(words: str, now: Figures) -> tuple[str, ...]:
    """Everything that is shown, as `PARTS` names it. Equal figures make equal texts, whatever the clock says."""
    return (tiles(words, now), charts(words, now.moments), times(words, now), models(words, now), recent(words, now.recent), errors(words, now))


def places(*names: str) -> str:
    """Where page.js puts these of `PARTS`."""
    return '<div class="gz-stacked">' + "".join(f'<div id="gz-monitor-{name}" data-part="{name}"></div>' for name in names) + "</div>"


def tiles(words: str, now: Figures) -> str:
    say = lambda key: tr(words, key)  # noqa: E731
    rows = [(say("mon_speed"), f"{now.tokens_per_second:,.0f}", "tok/s"), (say("mon_prompt_speed"), f"{now.prompt_tokens_per_second:,.0f}", "tok/s"),
            (say("mon_running"), html.number(now.running), ""), (say("mon_waiting"), html.number(now.waiting), f"/ {now.queue_limit}"),
            (say("mon_acceptance"), _percent(now.acceptance), ""), (say("mon_cache"), _percent(now.cache_hits), ""),
            (say("mon_errors"), html.number(sum(count for _, count in now.errors)), "")]
    rows += [(f"GPU {place}", _percent(gpu.busy), f"{html.size(gpu.used)} / {html.size(gpu.total)}") for place, gpu in enumerate(now.gpus)]
    return html.tiles(rows)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


# ---------------------------------------------------------------------------------------------- charts
def charts(words: str, moments: Sequence[Moment]) -> str:
    if len(moments) < 2:
        return f'<p class="gz-soft">{html.escape(tr(words, "mon_nothing_yet"))}</p>'
    axis = tr(words, "mon_ago", minutes=round(SPAN / 60)), tr(words, "mon_now")
    say = lambda key: tr(words, key)  # noqa: E731
    steps = round(SPAN / STEP)
    shown = [one for one in moments if one.at >= moments[-1].at - SPAN]
    line = lambda points, pick=max: thinned(points, shown[-1].at, STEP, steps, pick)  # noqa: E731
    at = lambda name: line([(one.at, float(getattr(one, name))) for one in shown])  # noqa: E731
    speed, last = line(rates(tuple(shown), "tokens"), fmean), shown[-1]
    pages = line([(one.at, one.pages_used / one.pages_total if one.pages_total else 0.0) for one in shown])
    fast, many = nice(max((value for _, value in speed), default=0.0)), nice(max(max(one.running, one.waiting) for one in shown))
    large = nice(max(one.engine + one.front for one in shown) / 1e9) * 1e9
    made = [
        chart(say("mon_chart_speed"), f"{speed[-1][1] if speed else 0:,.0f} tok/s", f"{fast:,.0f}", [Line("", speed)], steps, fast, axis),
        chart(say("mon_chart_requests"), tr(words, "mon_run_wait", running=last.running, waiting=last.waiting), f"{many:,.0f}",
              [Line(say("mon_running"), at("running")), Line(say("mon_waiting"), at("waiting"), "b")], steps, many, axis),
        chart(say("mon_chart_pages"), f"{last.pages_used:,} / {last.pages_total:,}", "100 %", [Line("", pages, "c")], steps, 1.0, axis),
        chart(say("mon_chart_memory"), html.size(last.engine + last.front), html.size(large),
              [Line(say("mon_engine"), at("engine")), Line(say("mon_front"), at("front"), "b")], steps, large, axis)]
    return f'<div class="gz-charts">{"".join(made)}</div>'


# ---------------------------------------------------------------------------------------------- tables
def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """The first columns are text, the last ``numbers`` figures."""
    side = lambda place: ' class="gz-figure"' if place >= len(head) - numbers else ""  # noqa: E731
    top = "".join(f'<th scope="col"{side(place)}>{html.escape(name)}</th>' for place, name in enumerate(head))
    body = "".join("<tr>" + "".join(f"<td{side(place)}>{html.escape(cell)}</td>" for place, cell in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="gz-scroll" tabindex="0"><table class="gz-log"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def times(words: str, now: Figures) -> str:
    """Percentiles of the last minutes."""
    def row(name: str, one: Spread) -> list[str]:
        return [tr(words, name), *(_milliseconds(value) for value in (one.p50, one.p90, one.p99)), html.number(one.count)]

    head = [tr(words, "mon_times", minutes=round(now.window / 60)), "p50", "p90", "p99", tr(words, "mon_of")]
    return table(head, [row("mon_ttft", now.ttft), row("mon_tpot", now.tpot)], 4)


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{1000 * value:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def models(words: str, now: Figures) -> str:
    """What is in memory, and what the two processes take."""
    say = lambda key: tr(words, key)  # noqa: E731
    memory = html.facts([(say("mon_engine_memory"), html.size(now.memory.engine)), (say("mon_front_memory"), html.size(now.memory.front)),
                         (say("mon_free_memory"), f"{html.size(now.memory.available)} / {html.size(now.memory.total)}"),
                         (say("mon_uptime"), html.duration(now.uptime) if now.uptime < 7200 else f"{now.uptime / 3600:.1f} h")])
    if not now.models:
        return memory
    head = [say("mon_model"), say("fact_weights"), say("mon_kv_used"), say("mon_kv_cached"), say("mon_kv_free"), say("mon_tokens")]
    return table(head, [_model(words, one) for one in now.models], 5) + memory


def _model(words: str, one: ModelUse) -> list[str]:
    if one.resting:
        return [one.name, tr(words, "mon_resting"), "–", "–", "–", html.number(one.tokens)]
    pages = [f"{count:,} ({html.size(count * one.page_bytes)})" if one.page_bytes else html.number(count)
             for count in (one.pages_used, one.pages_cached, one.pages_free)] if one.pages_total else ["–"] * 3
    return [one.name, html.size(one.weights) if one.weights else "–", *pages, html.number(one.tokens)]


def recent(words: str, seen: Sequence[Ended]) -> str:
    """The last requests, without a word of what they said."""
    if not seen:
        return f'<p class="gz-soft">{html.escape(tr(words, "mon_no_requests"))}</p>'
    head = [tr(words, key) for key in ("mon_at", "mon_model", "mon_key", "mon_end", "mon_prompt", "mon_cached", "mon_answer", "mon_ttft", "mon_speed",
                                       "mon_total")]
    return table(head, [_request(words, one) for one in seen], 6)


def _request(words: str, one: Ended) -> list[str]:
    count = lambda value: "–" if value is None else html.number(value)  # noqa: E731
    name = f"{one.model} + {one.draft}" if one.draft else one.model
    return [time.strftime("%H:%M:%S", time.localtime(one.at)), name or "–", one.key or "–", _end(words, one), count(one.prompt_tokens),
            count(one.cached_tokens), count(one.completion_tokens), _milliseconds(one.ttft),
            f"{one.tokens_per_second:,.0f}" if one.tokens_per_second else "–", html.duration(one.total)]


def _end(words: str, one: Ended) -> str:
    if one.error:
        return tr(words, f"error_{one.error}") if has(f"error_{one.error}") else one.error
    return tr(words, "mon_embedded") if one.kind == "embed" else \
        " / ".join(tr(words, f"finish_{finish}") if has(f"finish_{finish}") else finish for finish in one.finish.split("/"))


def errors(words: str, now: Figures) -> str:
    """By class, most frequent first; "" = none."""
    if not now.errors:
        return ""
    return table([tr(words, "mon_errors_by"), tr(words, "mon_code"), tr(words, "mon_count")],
                 [[tr(words, f"error_{code}") if has(f"error_{code}") else code, code, html.number(count)] for code, count in now.errors], 1)
