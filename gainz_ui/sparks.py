"""Small charts over the last minutes as SVG text, pure: points in, one line of markup out. A live chart must cost next to nothing, in
the server and in the browser, where a plotting library redraws for a third of a core: so there is nothing here but lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gainz_ui.html import escape

WIDTH, HEIGHT = 300.0, 72.0             # of the drawing; the page stretches it
GAP = 4.0                               # seconds without a point in which no line is drawn
Points = Sequence[tuple[float, float]]  # (seconds, value), in order of time


@dataclass(frozen=True)
class Line:
    """``css``: a class that gives the colour."""

    name: str
    points: Points
    css: str = "a"


def chart(title: str, now: str, top: str, lines: Sequence[Line], span: tuple[float, float], ceiling: float, axis: tuple[str, str]) -> str:
    """One chart. ``now``, ``top``: the newest value and ``ceiling`` in words; ``span``: seconds from left to right; ``axis``: how both
    ends are called."""
    drawn = "".join(_line(line, span, ceiling, fill=len(lines) == 1) for line in lines)
    grid = "".join(f'<line x1="0" x2="{WIDTH:.0f}" y1="{y:.1f}" y2="{y:.1f}" class="gz-grid"/>' for y in (0.5, HEIGHT / 2, HEIGHT - 0.5))
    legend = "" if len(lines) == 1 else "".join(f'<span><i class="gz-line-{line.css}"></i>{escape(line.name)}</span>' for line in lines)
    return (f'<figure class="gz-chart" role="img" aria-label="{escape(f"{title}: {now}")}"><figcaption><b>{escape(title)}</b>'
            f'<span>{escape(now)}</span></figcaption><div class="gz-plotbox"><em>{escape(top)}</em>'
            f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" aria-hidden="true">{grid}{drawn}</svg></div>'
            f'<div class="gz-axis"><span>{escape(axis[0])}</span>{legend}<span>{escape(axis[1])}</span></div></figure>')


def _line(line: Line, span: tuple[float, float], ceiling: float, fill: bool) -> str:
    begin, end = span
    out = []
    for run in _runs(line.points):
        at = [(WIDTH * (when - begin) / (end - begin), HEIGHT - HEIGHT * min(max(value / ceiling, 0.0), 1.0)) for when, value in run if when >= begin]
        if not at:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        if fill:
            out.append(f'<polygon points="{at[0][0]:.1f},{HEIGHT:.0f} {path} {at[-1][0]:.1f},{HEIGHT:.0f}" class="gz-fill-{line.css}"/>')
        out.append(f'<polyline points="{path}" class="gz-line-{line.css}"/>')
    return "".join(out)


def _runs(points: Points) -> list[list[tuple[float, float]]]:
    """Pieces without a gap."""
    runs: list[list[tuple[float, float]]] = []
    for point in points:
        if not runs or point[0] - runs[-1][-1][0] > GAP:
            runs.append([])
        runs[-1].append(point)
    return runs


def nice(value: float) -> float:
    """The next number of 1, 2 or 5 times a power of ten that is not below; 1 for nothing."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 5, 10) if value <= power * step * (1 + 1e-9))
