"""Is the machine calm enough to measure? A short bandwidth probe, and what others did with the processors meanwhile.

Judges circumstances only, never a result: a pair that is measured again because of them is measured again blindly. What a
system does not tell (temperature, steal) is None, never 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import psutil

PROBE = 0.05                    # seconds of reading memory
BLOCK = 16 << 20                # bytes read at a time: more than a core's own caches hold
FOREIGN, STEAL, SLOW = 0.25, 0.02, 0.85     # cores busy with others; share of time stolen; of the usual bandwidth
USUAL = 5                       # probes that make a usual bandwidth


@dataclass(frozen=True)
class Weather:
    """``bandwidth``: bytes a second that one thread reads. ``foreign``: cores that others kept busy since the last look.
    ``steal``: share of the time that the hypervisor gave to others. ``swapped``: bytes moved to or from disk."""

    bandwidth: float
    foreign: float | None = None
    steal: float | None = None
    swapped: int | None = None
    temperature: float | None = None
    mhz: float | None = None


@dataclass(frozen=True)
class _Look:
    at: float
    busy: float
    stolen: float | None
    ours: float
    swapped: int | None


class Barometer:
    """``ours``: the process ids whose work is the measurement itself."""

    def __init__(self, ours: Callable[[], Sequence[int]]) -> None:
        self._ours = ours
        self._block = np.ones(BLOCK // 8)
        self._seen: list[float] = []
        self._known: dict[int, float] = {}      # processor seconds of our processes when they were last seen
        self._spent = 0.0
        self._last = self._look()

    def read(self) -> Weather:
        """Now, and since the last reading."""
        before, now = self._last, self._look()
        span = max(now.at - before.at, 1e-9)
        bandwidth = self._probe()
        self._seen.append(bandwidth)
        self._last = self._look()
        busy = max(now.busy - before.busy - (now.ours - before.ours), 0.0) / span
        steal = None if now.stolen is None else (now.stolen - before.stolen) / span / (psutil.cpu_count() or 1)
        swapped = None if now.swapped is None or before.swapped is None else now.swapped - before.swapped
        return Weather(bandwidth, busy, steal, swapped, _temperature(), _clock())

    def complaint(self, weather: Weather) -> str:
        """Why this is no weather to measure in; empty: it is."""
        usual = median(self._seen) if len(self._seen) >= USUAL else None
        if usual and weather.bandwidth < SLOW * usual:
            return f"memory reads at {weather.bandwidth / usual:.0%} of the usual speed"
        if weather.foreign is not None and weather.foreign > FOREIGN:
            return f"other programs keep {weather.foreign:.1f} cores busy"
        if weather.steal is not None and weather.steal > STEAL:
            return f"the hypervisor took {weather.steal:.0%} of the time"
        return f"{weather.swapped >> 20} MiB were swapped" if weather.swapped else ""

    def _probe(self) -> float:
        began, read = time.perf_counter(), 0
        while (spent := time.perf_counter() - began) < PROBE:
            self._block.max()
            read += BLOCK
        return read / spent

    def _look(self) -> _Look:
        times = psutil.cpu_times()
        stolen = getattr(times, "steal", None)
        busy = sum(times) - times.idle - getattr(times, "iowait", 0.0) - (stolen or 0.0) - _guests(times)
        return _Look(time.perf_counter(), busy, stolen, self._ours_spent(), _swapped())

    def _ours_spent(self) -> float:
        """Processor seconds of ours, which only grow: a process that ended, or could not be looked at once, takes nothing back."""
        for pid in {*self._ours(), *self._known}:
            now = _spent(pid)
            if now is None:
                continue
            self._spent += max(now - self._known.get(pid, now), 0.0)
            self._known[pid] = now
        return self._spent


def _guests(times: object) -> float:
    """Linux counts a guest's time twice: in user, and by itself."""
    return getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)


def _spent(pid: int) -> float | None:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:                    # it has ended
        return None
    return times.user + times.system


def _swapped() -> int | None:
    try:
        swap = psutil.swap_memory()
    except (OSError, RuntimeError):         # a container without /proc/vmstat
        return None
    return swap.sin + swap.sout


def _temperature() -> float | None:
    """The hottest sensor of a processor, in °C."""
    sensors = getattr(psutil, "sensors_temperatures", dict)()
    found = [row.current for name, rows in sensors.items() if name in ("coretemp", "k10temp", "zenpower", "cpu_thermal") for row in rows]
    return max(found, default=None)


def _clock() -> float | None:
    try:
        clock = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        return None
    return clock.current if clock and clock.current else None
