"""Which target runs a model: the one asked for, or the best there is, with a reason for each one passed over.

Threads are decided here, once: torch has one thread pool a process, and the native kernels are given the same number.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import torch

from backends.errors import InvalidRequest, MissingRequirement
from backends.kernels import Ops

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose(name: str, device: str, dtype: str, threads: int, activations: str = "auto") -> tuple[Ops, tuple[str, ...]]:
    """The target and notes. "auto" tries the native kernels of the device, then aten, then ref, which is always there.

    Raises MissingRequirement where the target asked for by name is not available, InvalidRequest for a device or a type
    that it cannot do.
    """
    place = pick_device(device)
    count = set_threads(threads)
    if name != "auto":
        return _make(name, place, dtype, count, activations), ()
    passed = []
    for candidate in candidates(place, dtype):
        try:
            return _make(candidate, place, dtype, count, activations), tuple(passed)
        except (MissingRequirement, InvalidRequest) as error:
            passed.append(f"kernels {candidate} not used: {error.cause}")
    raise MissingRequirement(f"No kernels for device {place} and type {dtype}.", tried="; ".join(passed))


def candidates(device: torch.device, dtype: str) -> tuple[str, ...]:
    """Best first. In float32 the specification itself is the fallback: whoever asks for float32 wants its numbers."""
    fallback = ("ref", "aten") if dtype == "float32" else ("aten", "ref")
    return ("cpu", *fallback) if device.type == "cpu" else ("triton", *fallback) if device.type == "cuda" else fallback


def _make(name: str, device: torch.device, dtype: str, threads: int, activations: str) -> Ops:
    if activations == "int8" and name != "cpu":
        raise InvalidRequest(f"The {name} kernels do not compute with activations in 8 bits.", field="activations",
                             remedy="Choose activations auto or float32, or the kernels cpu.")
    if name in ("ref", "aten"):
        module = importlib.import_module(f"backends.kernels.{name}")
        default = torch.float32 if name == "ref" else torch.bfloat16
        return module.make(DTYPES.get(dtype, default), device)
    if name not in ("cpu", "triton"):
        raise InvalidRequest(f"There are no kernels named {name!r}.",
                             field="kernels", remedy="Use auto, ref, aten, cpu or triton.")
    wanted = "cpu" if name == "cpu" else "cuda"
    if device.type != wanted:
        raise InvalidRequest(f"The {name} kernels run on {wanted}, not on {device.type}.", field="kernels")
    try:
        module = importlib.import_module(f"backends.kernels.{name}")
    except ModuleNotFoundError as error:
        needed = "a newer Gainz" if error.name == f"backends.kernels.{name}" else error.name
        raise MissingRequirement(f"it needs {needed}", kernels=name) from error
    return module.make(dtype, threads, activations=activations) if name == "cpu" else module.make(dtype, threads)


# ---------------------------------------------------------------------------------------------- device and threads
def pick_device(name: str) -> torch.device:
    """"auto" is the first accelerator that answers, else the CPU. Raises MissingRequirement for one that does not."""
    there = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available,
             "xpu": torch.xpu.is_available, "cpu": lambda: True}
    if name == "auto":
        return torch.device(next(kind for kind, answers in there.items() if answers()))
    if name not in there:
        raise InvalidRequest(f"There is no device {name!r}.", field="device")
    if not there[name]():
        raise MissingRequirement(f"This machine, or this build of torch, has no {name} device.", device=name,
                                 remedy="Use device auto or cpu.")
    return torch.device(name)


def set_threads(threads: int) -> int:
    """Fix torch's thread count; 0 = physical cores that this process may use. Returns the number."""
    count = threads or default_threads()
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    return count


def default_threads() -> int:
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_core(cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota()))


def _core(cpu: int) -> str:
    """What names the physical core of a logical processor: its siblings, where the system tells."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> int:
    """Whole processors that a container's quota leaves this process."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return 1 << 16
    return 1 << 16 if limit == "max" else max(1, int(limit) // int(period))
