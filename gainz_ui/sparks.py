"""Small charts over the last minutes as SVG text, pure: points in, one line of markup out. A live chart must cost next to nothing, in
the server and in the browser, where a plotting library redraws for a third of a core: so there is nothing here but lines of few points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gainz_ui.html import escape

WIDTH, HEIGHT = 300.0, 72.0             # of the drawing; the page stretches it
Points = Sequence[tuple[float, float]]  # (place, value), in order


@dataclass(frozen=True)
class Line:
    """``css``: a class that gives the colour."""

    name: str
    points: Points
    css: str = "a"


def thinned(points: Points, end: float, step: float, count: int, pick: Callable[[Iterable[float]], float]) -> list[tuple[int, float]]:
    """One point for each step of the clock, of which ``pick`` makes one value: (place, value) at places up to ``count``, the last step's.
    Values that stand still make the same points a step later."""
    steps: dict[int, list[float]] = {}
    for when, value in points:
        steps.setdefault(int(when // step), []).append(value)
    last = int(end // step)
    return [(count + at - last, pick(values)) for at, values in steps.items() if at > last - count]


def chart(title: str, now: str, top: str, lines: Sequence[Line], count: int, ceiling: float, axis: tuple[str, str]) -> str:
    """One chart. ``now``, ``top``: the newest value and ``ceiling`` in words; ``count``: the place of the right end; ``axis``: how both
    ends are called."""
    drawn = "".join(_line(line, count, ceiling, fill=len(lines) == 1) for line in lines)
    grid = "".join(f'<line x1="0" x2="{WIDTH:.0f}" y1="{y:.1f}" y2="{y:.1f}" class="gz-grid"/>' for y in (0.5, HEIGHT / 2, HEIGHT - 0.5))
    legend = "" if len(lines) == 1 else "".join(f'<span><i class="gz-line-{line.css}"></i>{escape(line.name)}</span>' for line in lines)
    return (f'<figure class="gz-chart" role="img" aria-label="{escape(f"{title}: {now}")}"><figcaption><b>{escape(title)}</b>'
            f'<span>{escape(now)}</span></figcaption><div class="gz-plotbox"><em>{escape(top)}</em>'
            f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" aria-hidden="true">{grid}{drawn}</svg></div>'
            f'<div class="gz-axis"><span>{escape(axis[0])}</span>{legend}<span>{escape(axis[1])}</span></div></figure>')


def _line(line: Line, count: int, ceiling: float, fill: bool) -> str:
    """Half a unit is as exact as anybody sees: less would be another text at every breath of the memory."""
    out = []
    for run in _runs(line.points):
        at = [(WIDTH * place / count, round(2 * HEIGHT * (1 - min(max(value / ceiling, 0.0), 1.0))) / 2) for place, value in run]
        path = " ".join(f"{x:g},{y:g}" for x, y in at)
        if fill:
            out.append(f'<polygon points="{at[0][0]:g},{HEIGHT:g} {path} {at[-1][0]:g},{HEIGHT:g}" class="gz-fill-{line.css}"/>')
        out.append(f'<polyline points="{path}" class="gz-line-{line.css}"/>')
    return "".join(out)


def _runs(points: Points) -> list[list[tuple[float, float]]]:
    """Pieces without a place left out."""
    runs: list[list[tuple[float, float]]] = []
    for point in points:
        if not runs or point[0] - runs[-1][-1][0] > 1:
            runs.append([])
        runs[-1].append(point)
    return runs


def nice(value: float) -> float:
    """The next number of 1, 2 or 5 times a power of ten that is not below; 1 for nothing."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 5, 10) if value <= power * step * (1 + 1e-9))
