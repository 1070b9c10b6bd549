"""How much memory there is: of this machine, of the control group it is bound to, of a GPU. Light: no torch.

Knows where each system tells it. Refuses to guess: where nothing can be read, what the machine as a whole has is the answer.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")


def machine_memory() -> tuple[int, int]:
    """(total, available) bytes, without swapping, bounded by the control group's limit."""
    machine = psutil.virtual_memory()
    bound = group_memory()
    if bound is None:
        return machine.total, machine.available
    return min(machine.total, bound[0]), min(machine.available, bound[1])


def group_memory(root: Path = GROUPS) -> tuple[int, int] | None:
    """(limit, what of it is left) of this process's control group, version 2 or 1; None where there is no limit. Pages of
    files that the kernel can drop count as left."""
    for limit, used, stat, droppable in (("memory.max", "memory.current", "memory.stat", "inactive_file"),
                                         ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes",
                                          "memory/memory.stat", "total_inactive_file")):
        most, now = _number(root / limit), _number(root / used)
        if most is not None and now is not None and most < psutil.virtual_memory().total:
            return most, max(0, most - max(0, now - _entry(root / stat, droppable)))
    return None


def resident() -> int:
    """Bytes of this process in memory."""
    return psutil.Process().memory_info().rss


def gpu_memory() -> tuple[int, int] | None:
    """(total, free) bytes of the first CUDA device that this process may use, through the driver's library; None: there is none."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if find_spec("pynvml") is None or first in ("", "-1"):
        return None
    import pynvml
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:                                # no driver
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(first)) if first.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(first)
        seen = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return int(seen.total), int(seen.free)
    except pynvml.NVMLError:                                # no such device
        return None
    finally:
        pynvml.nvmlShutdown()


def torch_is_for(kind: str) -> bool:
    """Is the installed torch built for "cuda" ("hip", "xpu")? Read from its version file: torch itself is not imported."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    found = re.search(rf"^{kind}\b[^=\n]*=\s*(.+)$", text, re.MULTILINE)
    return found is not None and found[1].strip() != "None"


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _entry(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key + " ")), 0)
