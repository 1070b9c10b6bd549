"""Joules that processor packages (RAPL, Linux's powercap) or GPUs (NVML) have taken, where the system lets them be read.

They are of the whole machine: another program's are among them. Where nothing can be read there is a reason, never 0.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")


class Meter:
    """A counter that only grows. ``source``: "RAPL", "NVML"; "" = nothing can be read, and ``reason`` says why."""

    def __init__(self, source: str = "", reason: str = "", read: Callable[[], float | None] = lambda: None) -> None:
        self.source, self.reason, self.joules = source, reason, read


def find(device: str = "cpu", root: Path = POWERCAP) -> Meter:
    """What counts for models on ``device``."""
    return _nvml() if device.startswith("cuda") else _rapl(root)


# ---------------------------------------------------------------------------------------------- processors
class _Package:
    """A counter of microjoules that begins again at its end."""

    def __init__(self, folder: Path) -> None:
        self._counter, self._end = folder / "energy_uj", int((folder / "max_energy_range_uj").read_text())
        self._last, self._whole = int(self._counter.read_text()), 0

    def joules(self) -> float:
        now = int(self._counter.read_text())
        self._whole += now - self._last if now >= self._last else now + self._end - self._last
        self._last = now
        return self._whole / 1e6


def _rapl(root: Path) -> Meter:
    folders = sorted(folder for folder in (root.glob("intel-rapl:*") if root.is_dir() else ()) if folder.name.count(":") == 1)
    if not folders:
        return Meter(reason="this system has no RAPL counters")
    try:
        packages = [_Package(folder) for folder in folders]
    except PermissionError:
        return Meter(reason=f"the RAPL counters may be read by root only ({folders[0]}/energy_uj)")
    except (OSError, ValueError) as error:
        return Meter(reason=f"the RAPL counters cannot be read ({error})")

    def read() -> float | None:
        try:
            return sum(package.joules() for package in packages)
        except (OSError, ValueError):           # taken away meanwhile
            return None

    return Meter("RAPL", read=read)


# ---------------------------------------------------------------------------------------------- GPUs
def _nvml() -> Meter:
    try:
        import pynvml
    except ImportError:
        return Meter(reason="nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        _millijoules(pynvml, handles)
    except pynvml.NVMLError as error:
        return Meter(reason=f"the driver counts no energy ({error})")

    def read() -> float | None:
        try:
            return _millijoules(pynvml, handles) / 1000
        except pynvml.NVMLError:
            return None

    return Meter("NVML", read=read)


def _millijoules(nvml: Any, handles: list[Any]) -> int:
    return sum(nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles)
