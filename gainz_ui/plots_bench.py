"""The figures of a benchmark, pure: a report (plain JSON) and words in, plotly figures out. None where a report has nothing to show.

Everywhere A and B have the same two colours, and right or up is faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import plotly.graph_objects as go

from gainz_ui.plots import COLORS, GREY, GRID, frame

A, B, BAD = COLORS[0], COLORS[3], "#dc2626"
COLOR = {"a": A, "b": B}
TIMES = ("ttft", "end_to_end")          # measures of which less is better
SHOWN = ("throughput", "decode", "prefill", "ttft", "end_to_end")
BURST = 4                               # median gap over the shortest that is drawn
WIDE = 1.5                              # longest over shortest context from which on its influence is drawn
PANELS = (("tokens_per_second", 1, "together", [0.58, 1]), ("goodput", 1, "goodput", [0.29, 0.49]), ("queue_p50", 1000, "queue", [0, 0.2]))
Report, Words = Mapping[str, Any], Mapping[str, str]


def ratio(report: Report, words: Words) -> go.Figure | None:
    """Every measure as a speed-up of B over A with its interval, beside 1 and the margin that counts as the same."""
    rows = [(name, found) for name in reversed(SHOWN) if (found := report["measures"].get(name)) and found["ratio"]]
    if not rows:
        return None
    points = [(words[name], *_speedup(name, found)) for name, found in rows]
    figure = frame(words["speedup"], "", height=110 + 46 * len(points))
    same = 1 + report["same"]
    figure.add_vrect(x0=1 / same, x1=same, fillcolor=GREY, opacity=0.18, line_width=0)
    figure.add_vline(x=1, line={"color": GREY, "width": 1.5, "dash": "dot"})
    main = words[report["main"]]
    figure.add_scatter(
        x=[middle for _, middle, _, _ in points], y=[name for name, *_ in points], mode="markers", cliponaxis=False,
        marker={"size": [13 if name == main else 9 for name, *_ in points], "color": [B if name == main else GREY for name, *_ in points]},
        error_x={"type": "data", "symmetric": False, "array": [high - middle for _, middle, _, high in points],
                 "arrayminus": [middle - low for _, middle, low, _ in points], "color": GREY, "thickness": 2, "width": 5},
        customdata=[(low, high) for *_, low, high in points],
        hovertemplate="%{y}: %{x:.3f} (%{customdata[0]:.3f} – %{customdata[1]:.3f})<extra></extra>")
    right = [high >= 1 for *_, high in points]
    figure.add_scatter(x=[high if after else low for after, (_, _, low, high) in zip(right, points)], y=[name for name, *_ in points], mode="text",
                       text=[f"  {middle:.2f}×  " for _, middle, _, _ in points], hoverinfo="skip", cliponaxis=False,
                       textposition=["middle right" if after else "middle left" for after in right])              # off the line at 1
    low, high = min(1 / same, *(low for _, _, low, _ in points)), max(same, *(high for *_, high in points))
    room = 0.2 if all(right) else 0.6                       # a number left of its line must not run into the names
    figure.update_xaxes(rangemode="normal", range=[_around(low, high, room)[0], _around(low, high, 0.2)[1]], tickformat=".3~g")
    figure.update_yaxes(rangemode="normal", gridcolor="rgba(0,0,0,0)", range=[-0.6, len(points) - 0.3])
    figure.update_layout(margin={"l": 96, "r": 44})
    return figure


def slopes(report: Report, words: Words) -> go.Figure | None:
    """Each pair as a line from A to B."""
    pairs = [(pair, one, other) for pair in report["pairs"] if (one := _speed(report, pair["a"])) and (other := _speed(report, pair["b"]))]
    if not pairs:
        return None
    figure = frame("", words["together" if report["main"] == "throughput" else "speed"], height=320)
    for number, (pair, one, other) in enumerate(pairs, 1):
        figure.add_scatter(x=["A", "B"], y=[one, other], mode="lines+markers", opacity=0.6,
                           line={"color": BAD if pair["noise"] else GREY, "width": 1.2}, marker={"size": 8, "color": [A, B]},
                           hovertemplate=f"{words['pair']} {number}: %{{x}} %{{y:.1f}}<extra></extra>")
    figure.update_xaxes(rangemode="normal", range=[-0.3, 1.3], gridcolor="rgba(0,0,0,0)")
    return figure


def over_time(report: Report, words: Words) -> go.Figure | None:
    """The ratio of each pair in the order in which they were measured, over what the probe read from memory just then."""
    found = [(number, _speed(report, pair["b"]) / _speed(report, pair["a"]), pair) for number, pair in enumerate(report["pairs"], 1)
             if _speed(report, pair["a"]) and _speed(report, pair["b"])]
    if not found:
        return None
    figure = frame(words["pair"], words["ratio"], height=320)
    numbers = [number for number, _, _ in found]
    if report["interval"]:
        figure.add_hrect(y0=report["interval"][0], y1=report["interval"][1], fillcolor=B, opacity=0.15, line_width=0)
    figure.add_hline(y=1, line={"color": GREY, "width": 1.5, "dash": "dot"})
    figure.add_scatter(x=numbers, y=[value for _, value, _ in found], mode="markers", name=words["ratio"],
                       marker={"size": 9, "color": [BAD if pair["noise"] else B for *_, pair in found],
                               "symbol": ["x" if pair["noise"] else "circle" for *_, pair in found]},
                       hovertemplate="%{x}: %{y:.3f}<extra></extra>")
    weather = [pair["weather"]["bandwidth"] / 1e9 if pair["weather"] else None for *_, pair in found]
    figure.add_bar(x=numbers, y=weather, yaxis="y2", marker={"color": GREY, "opacity": 0.55}, name=words["probe"],
                   hovertemplate="%{y:.1f} GB/s<extra></extra>")
    values = [value for _, value, _ in found] + list(report["interval"] or ()) + [1.0]
    figure.update_layout(yaxis={"domain": [0.34, 1], "rangemode": "normal", "range": _around(min(values), max(values))},
                         yaxis2={"domain": [0, 0.22], "title": {"text": words["probe"], "standoff": 8}, "gridcolor": GRID, "zerolinecolor": GRID, "nticks": 3,
                                 "fixedrange": True, "anchor": "x"})
    figure.update_xaxes(rangemode="normal", range=[0.4, len(report["pairs"]) + 0.6], anchor="y2", tickformat="d")
    return figure


def gaps(report: Report, words: Words) -> go.Figure | None:
    """Inter-token latencies as their distribution function: how many of the gaps were at most so long. Gaps of nothing, within a burst
    that came at once, are in the shares, and left of what is drawn."""
    figure, shortest, longest = frame(words["gap"], words["share"], height=320), [], []
    for arm in "ab":
        values = sorted(1000 * gap for pair in report["pairs"] for gap, _ in pair[arm]["seen"]["gaps"] if gap > 0)
        if values:
            shortest.append(median(values) / BURST)
            longest.append(values[-1])
            shown = _thinned(values)
            figure.add_scatter(x=[value for value, _ in shown], y=[100 * share for _, share in shown], mode="lines", name=arm.upper(),
                               line={"color": COLOR[arm], "width": 2, "shape": "hv"},
                               hovertemplate="%{x:.2f} ms: %{y:.1f} %<extra>" + arm.upper() + "</extra>")
    if not longest:
        return None
    figure.update_xaxes(type="log", rangemode="normal", range=[math.log10(min(shortest)), math.log10(1.1 * max(longest))], dtick="D2",
                        tickformat=".3~g", exponentformat="none")
    figure.update_yaxes(range=[0, 102])
    return _with_legend(figure)


def roofline(report: Report, words: Words) -> go.Figure | None:
    """What the memory's bandwidth would allow at most, and what was reached of it."""
    sides = [(arm.upper(), report[arm]["roofline"], report[arm]["decode"]) for arm in "ab" if report[arm]["roofline"]]
    if not sides:
        return None
    figure = frame(words["each" if report["streams"] > 1 else "speed"], "", height=250)
    names, widest = [name for name, _, _ in sides][::-1], max(max(roof["ceiling"], speed) for _, roof, speed in sides)
    figure.add_bar(y=names, x=[roof["ceiling"] for _, roof, _ in sides][::-1], orientation="h", name=words["ceiling"],
                   marker={"color": "rgba(128,128,128,.25)", "line": {"color": GREY, "width": 1.5}}, width=0.62,
                   hovertemplate="%{x:.1f} tok/s<extra></extra>")
    figure.add_bar(y=names, x=[speed for *_, speed in sides][::-1], orientation="h", name=words["reached"], width=0.36,
                   marker={"color": [COLOR[name.lower()] for name in names]}, hovertemplate="%{x:.1f} tok/s<extra></extra>")
    figure.add_scatter(x=[max(roof["ceiling"], speed) for _, roof, speed in sides][::-1], y=names, mode="text", hoverinfo="skip",
                       text=["<br>".join(f"  {part}" for part in (f"{100 * roof['share']:.0f} %", words.get(roof["bound"])) if part) for _, roof, _ in sides][::-1],
                       textposition="middle right", cliponaxis=False)
    figure.update_xaxes(range=[0, 1.42 * widest])
    figure.update_layout(barmode="overlay", margin={"l": 30, "r": 48})
    figure.update_yaxes(rangemode="normal", gridcolor="rgba(0,0,0,0)", ticksuffix="  ")
    return figure


def by_context(report: Report, words: Words) -> go.Figure | None:
    """Speed over the length of the context, where the workload has different ones."""
    points = {arm: [(run["prompt_tokens"] + run["tokens"] / 2, run["decode"]) for pair in report["pairs"] if (run := pair[arm])["decode"]]
              for arm in "ab"}
    lengths = [length for found in points.values() for length, _ in found]
    if report["streams"] > 1 or not lengths or max(lengths) < WIDE * min(lengths):
        return None
    figure = frame(words["context"], words["speed"], height=320)
    for arm, found in points.items():
        figure.add_scatter(x=[x for x, _ in found], y=[y for _, y in found], mode="markers", name=arm.upper(),
                           marker={"color": COLOR[arm], "size": 8}, hovertemplate="%{x:.0f}: %{y:.1f}<extra>" + arm.upper() + "</extra>")
    return _with_legend(figure)


def by_streams(report: Report, words: Words) -> go.Figure | None:
    """What each number of answers at once gave: tokens a second of all, answers a second within the limits, and the wait in the queue."""
    levels = report.get("levels") or []
    if not levels:
        return None
    figure = frame(words["streams"], "", height=440)
    numbers = [level["streams"] for level in levels]
    for place, (key, scale, word, domain) in enumerate(PANELS, 1):
        axis = "y" if place == 1 else f"y{place}"
        for arm in "ab":
            figure.add_scatter(x=numbers, y=[_scaled(level[arm][key], scale) for level in levels], mode="lines+markers", name=arm.upper(),
                               line={"color": COLOR[arm], "width": 2}, marker={"size": 8}, yaxis=axis, showlegend=place == 1,
                               hovertemplate="%{x}: %{y:.4~g}<extra>" + arm.upper() + "</extra>")
        figure.update_layout({axis.replace("y", "yaxis"): {"domain": domain, "rangemode": "tozero", "gridcolor": GRID, "nticks": 4,
                                                           "zerolinecolor": GRID, "fixedrange": True, "title": None}})
        figure.add_annotation(text=words[word], x=0, y=domain[1], xref="paper", yref="paper", xanchor="left", yanchor="bottom",
                              showarrow=False, font={"size": 12})
    figure.update_xaxes(type="log", tickvals=numbers, ticktext=[str(n) for n in numbers], rangemode="normal", anchor=f"y{len(PANELS)}",
                        range=[math.log10(0.9 * numbers[0]), math.log10(1.1 * numbers[-1])])
    figure.update_layout(showlegend=True, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"})
    return figure


# ---------------------------------------------------------------------------------------------- small things
def _speed(report: Report, run: Mapping[str, Any]) -> float | None:
    return run[report["main"]]


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else scale * value


def _speedup(name: str, found: Mapping[str, Any]) -> tuple[float, float, float]:
    """(middle, low, high), turned over where less is better. Without an interval both ends are the middle."""
    middle = found["ratio"]
    low, high = found["interval"] or (middle, middle)
    return (1 / middle, 1 / high, 1 / low) if name in TIMES else (middle, low, high)


def _around(low: float, high: float, share: float = 0.12) -> list[float]:
    room = max(share * (high - low), 0.02)
    return [low - room, high + room]


def _thinned(values: Sequence[float], most: int = 400) -> list[tuple[float, float]]:
    """(value, share of all at most so large), at most so many."""
    step = max(1, len(values) // most)
    chosen = [*range(0, len(values), step), len(values) - 1]
    return [(values[index], (index + 1) / len(values)) for index in dict.fromkeys(chosen)]


def _with_legend(figure: go.Figure) -> go.Figure:
    figure.update_layout(showlegend=True, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0})
    return figure
