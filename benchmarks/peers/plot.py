"""The ratios as one SVG: a dot with its interval for each promise, on a logarithmic axis, the target as a tick."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from benchmarks.peers.report import Line

ROW, LEFT, WIDTH, RIGHT, TOP = 22, 470, 460, 90, 34
COLOURS = {"met": "#1a7f37", "missed": "#b3261e"}


def svg(rows: Sequence[Line]) -> str:
    shown = [row for row in rows if row.ratio is not None]
    values = [v for row in shown for v in (row.ratio.value, row.ratio.low, row.ratio.high, row.target) if v] or [1.0]
    low, high = math.log(min(0.5, *values)) - 0.1, math.log(max(2.0, *values)) + 0.1

    def x(value: float) -> float:
        return round(LEFT + WIDTH * (math.log(value) - low) / (high - low), 1)

    height = TOP + ROW * len(shown) + 12
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" '
             'font-family="system-ui, sans-serif" font-size="12">', f'<rect width="100%" height="{height}" fill="white"/>']
    for tick in (0.25, 0.5, 1, 2, 4, 8):
        if low < math.log(tick) < high:
            parts.append(f'<line x1="{x(tick)}" x2="{x(tick)}" y1="{TOP - 8}" y2="{height - 8}" stroke="#ddd"/>'
                         f'<text x="{x(tick)}" y="{TOP - 14}" text-anchor="middle" fill="#555">{tick:g} ×</text>')
    for i, row in enumerate(shown):
        parts += one(row, x, TOP + ROW * i + ROW // 2)
    return "\n".join([*parts, "</svg>"]) + "\n"


def one(row: Line, x, y: int) -> list[str]:
    colour, found = COLOURS.get(row.verdict, "#8a6d00"), row.ratio
    words = f"{row.work}: {row.what}"
    out = [f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(words if len(words) < 84 else words[:82] + "…")}</text>']
    if found.low is not None:
        out.append(f'<line x1="{x(found.low)}" x2="{x(found.high)}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>')
    sign = "≤" if row.most else "≥"
    out += [f'<circle cx="{x(found.value)}" cy="{y}" r="4" fill="{colour}"/>',
            f'<path d="M{x(row.target)} {y - 8}v16" stroke="black" stroke-width="1.5"/>',
            f'<text x="{LEFT + WIDTH + 8}" y="{y + 4}" fill="{colour}">{found.value:.2f} ({sign} {row.target:g})</text>']
    return out
