"""Amounts in words for people, the same on the page and in the terminal."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes, decimal units: 98 MB, 1.2 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            value = count / scale
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{count:.0f} B"
