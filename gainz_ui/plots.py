"""Values → plotly figures, pure. Every figure reads in both schemes: nothing is filled, text and lines are middle grey.

Knows how a figure looks; refuses to know where the numbers come from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

GREY, GRID = "#7c8798", "rgba(128,128,128,.2)"
COLORS = ("#6366f1", "#0891b2", "#16a34a", "#d97706", "#db2777", "#7c3aed")
FONT = "system-ui, -apple-system, Segoe UI, Noto Sans CJK SC, PingFang SC, Microsoft YaHei, sans-serif"
SCALE = ((0.0, "#16a34a"), (0.5, "#d97706"), (1.0, "#dc2626"))      # close to the reference … far from it


def frame(x: str, y: str, height: int = 340) -> go.Figure:
    """An empty figure with both axes named."""
    figure = go.Figure()
    figure.update_layout(
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"color": GREY, "size": 12, "family": FONT},
        height=height,
        margin={"l": 56, "r": 12, "t": 28, "b": 48}, colorway=COLORS, showlegend=False, uirevision="kept", dragmode=False,
        xaxis={"title": x, "gridcolor": GRID, "zerolinecolor": GRID, "rangemode": "tozero", "fixedrange": True},
        yaxis={"title": y, "gridcolor": GRID, "zerolinecolor": GRID, "rangemode": "tozero", "fixedrange": True})
    return figure


def trade_off(points: Sequence[Mapping[str, Any]], words: Mapping[str, str]) -> go.Figure:
    """Size against speed, coloured by KL to the reference. A point: name, size (bytes), speed, low, high (tokens a second),
    kl (nats, None: the reference). ``words``: size, speed, kl, reference."""
    figure = frame(words["size"], words["speed"], height=400)
    far = max((point["kl"] or 0.0 for point in points), default=0.0) or 1.0
    sizes = [point["size"] / 1e6 for point in points]
    figure.add_scatter(
        x=sizes, y=[point["speed"] for point in points], mode="markers+text",
        text=[_label(point, words) for point in points],
        textposition=_sides(sizes), textfont={"size": 11}, cliponaxis=False,
        error_y={"type": "data", "symmetric": False, "array": [point["high"] - point["speed"] for point in points],
                 "arrayminus": [point["speed"] - point["low"] for point in points], "color": GREY, "thickness": 1.2},
        marker={"size": 15, "color": [point["kl"] or 0.0 for point in points], "colorscale": SCALE, "cmin": 0.0, "cmax": far,
                "symbol": ["diamond" if point["kl"] is None else "circle" for point in points],
                "line": {"width": 1, "color": GREY},
                "colorbar": {"title": {"text": words["kl"], "side": "top"}, "orientation": "h", "y": 1.02,
                             "yanchor": "bottom", "len": 0.9,
                             "thickness": 9, "outlinewidth": 0, "nticks": 5}},
        hovertemplate="%{text}<br>%{x:.1f} MB · %{y:.1f} tok/s<extra></extra>")
    if sizes:
        figure.update_xaxes(range=[0, 1.12 * max(sizes)])
        figure.update_yaxes(range=[0, 1.45 * max(point["high"] for point in points)])       # room for the names
    return figure


def _sides(sizes: Sequence[float]) -> list[str]:
    """Where each text stands: towards the middle, and by turns above and below, since variants are often of like size and
    speed."""
    order = {place: number for number, place in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__))}
    return [f"{('top', 'bottom')[order[i] % 2]} {'left' if size > 0.55 * max(sizes) else 'right'}" for i,
            size in enumerate(sizes)]


def _label(point: Mapping[str, Any], words: Mapping[str, str]) -> str:
    tail = words["reference"] if point["kl"] is None else f"KL {point['kl']:.3g}"
    return f"{_breakable(point['name'])}<br>{tail}"


def _breakable(name: str, width: int = 16) -> str:
    """Long names on several lines, broken after a dash where there is one, so that they stay inside a narrow figure. No
    name is markup."""
    lines = [""]
    for piece in re.findall(rf"[^-]{{1,{width}}}-?|-", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "<br>".join(line.replace("&", "&amp;").replace("<", "&lt;") for line in lines)


def learning(points: Sequence[Mapping[str, Any]], words: Mapping[str, str]) -> go.Figure:
    """Loss and the share of right guesses over a draft's training. A point: step, loss (None before the first step), agreement
    (0 … 1). ``words``: step, right, loss."""
    figure = frame(words["step"], words["right"], height=260)
    steps = [point["step"] for point in points]
    figure.add_scatter(x=steps, y=[100 * point["agreement"] for point in points], mode="lines+markers", name=words["right"],
                       hovertemplate="%{y:.1f} %<extra></extra>")
    figure.add_scatter(x=steps, y=[point["loss"] for point in points], mode="lines", name=words["loss"], yaxis="y2",
                       line={"dash": "dot"}, hovertemplate="%{y:.3f}<extra></extra>")
    figure.update_layout(showlegend=True, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"}, margin={"r": 52},
                         yaxis2={"title": words["loss"], "overlaying": "y", "side": "right", "rangemode": "tozero",
                                 "showgrid": False, "zeroline": False, "fixedrange": True})
    return figure
