"""What this machine has, what it lacks and what to do: data for command line, page and bug reports.

Looks and measures; changes nothing. Torch is asked in a child process, so that the front never imports it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from backends.registry import Registry
from gainz_ui.services import gpu
from gainz_ui.services.ports import port_state
from gainz_ui.settings import Settings
from gainz_ui.units import size

TORCH = "2.13.0"
STARTER_ROOM = 1 << 30      # bytes below which the disk is called short
PROBE_SECONDS = 180         # importing torch from a cold disk, building the kernels
FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "sve")
PACKAGES = ("transformers", "gradio", "tokenizers", "safetensors", "gguf", "numpy", "huggingface_hub", "optimum")
Status = Literal["ok", "info", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding. ``value`` is for people; ``remedy`` says what to do where ``status`` is warn or fail."""

    section: str
    name: str
    status: Status
    value: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Nothing failed; warnings are no failure."""
        return all(check.status != "fail" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "checks": [asdict(check) for check in self.checks]}


def examine(settings: Settings, registry: Registry | None = None, *, deep: bool = True) -> Report:
    """Every check. ``deep`` False leaves out the child process (torch, kernels, bandwidth): under a second."""
    probed = probe() if deep else None
    parts = (_system(), _packages(), _memory(), _disk(settings), _port(settings), _compiler(), _backends(registry or Registry.scan()),
             _probed(probed) if probed else (), gpu.checks((probed or {}).get("torch")))
    return Report(tuple(check for part in parts for check in part))


# ---------------------------------------------------------------------------------------------- light
def _system() -> Iterator[Check]:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    yield Check("system", "Python", "ok" if good else "fail", f"{version} ({sys.executable})",
                "" if good else "Gainz needs Python 3.11 or newer.")
    yield Check("system", "System", "info", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Check("system", "Processor", "info", f"{cpu_name()}: {psutil.cpu_count(logical=False) or '?'} cores, "
                                               f"{psutil.cpu_count() or '?'} threads, {_allowed()} usable here")
    found = [name for name in FEATURES if name in cpu_flags()]
    yield Check("system", "Processor features", "info", ", ".join(found) or "not told by this system")


def _allowed() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _field(text: str, *names: str) -> str:
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in names:
            return value.strip()
    return ""


def cpu_field(*names: str) -> str:
    """The first line of /proc/cpuinfo under one of these names; empty where there is none."""
    return _field(_cpuinfo(), *names)


def cpu_name() -> str:
    """As the system calls the processor."""
    return cpu_field("model name", "Model", "Hardware") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Instruction sets as the system names them; empty where it does not tell without help."""
    if text := _cpuinfo():
        return frozenset(_field(text, "flags", "Features").split())
    if sys.platform == "darwin":
        told = subprocess.run(["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"], capture_output=True, text=True)
        return frozenset(told.stdout.lower().replace(".", "_").split())
    return frozenset()


def _packages() -> Iterator[Check]:
    found = package_version("torch")
    remedy = "Install it: python -m pip install -r requirements.txt"
    if found is None:
        yield Check("packages", "torch", "fail", "not installed", remedy)
    else:
        same = found.split("+")[0] == TORCH
        yield Check("packages", "torch", "ok" if same else "warn", found, "" if same else f"Gainz is tested with {TORCH}. {remedy}")
    for name in PACKAGES:
        version = package_version(name)
        yield Check("packages", name, "ok" if version else "fail", version or "not installed", "" if version else remedy)


def package_version(name: str) -> str | None:
    """None: not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> Iterator[Check]:
    now = psutil.virtual_memory()
    short = now.available < 1 << 30
    yield Check("memory", "Memory", "warn" if short else "ok", f"{size(now.available)} free of {size(now.total)}",
                "Close other programs, or load smaller models." if short else "")


def _disk(settings: Settings) -> Iterator[Check]:
    for name, folder in (("Disk for models", settings.models), ("Disk for results", settings.outputs)):
        there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
        usage, writable = shutil.disk_usage(there), os.access(there, os.W_OK)
        status: Status = "fail" if not writable else "warn" if usage.free < STARTER_ROOM else "ok"
        remedy = {"fail": "Give this user the right to write there, or choose another folder.",
                  "warn": "Free some room, or choose another folder with --models.", "ok": ""}[status]
        yield Check("disk", name, status, f"{size(usage.free)} free at {folder.resolve()}" + ("" if writable else ", not writable"), remedy)


def _port(settings: Settings) -> Iterator[Check]:
    state = port_state(settings.host, settings.port)
    status: Status = "info" if state == "Gainz answers there" else "ok" if state == "free" else "warn"
    yield Check("network", f"Port {settings.port}", status, state,
                "Stop the other program, or start with --port and another number." if status == "warn" else "")


def _compiler() -> Iterator[Check]:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++", "cl"]
    for name in names:
        if path := shutil.which(name):
            told = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace")
            yield Check("compiler", "C++ compiler", "ok", f"{path}: {(told.stdout or told.stderr).splitlines()[0] if told.stdout or told.stderr else ''}")
            return
    yield Check("compiler", "C++ compiler", "warn", "none found", "Without one the slower kernels are used. Debian and Ubuntu: "
                "apt-get install g++; macOS: xcode-select --install; Windows: the Visual C++ build tools.")


def _backends(registry: Registry) -> Iterator[Check]:
    for backend in registry.backends:
        missing = backend.missing()
        yield Check("backends", backend.title, "warn" if missing else "ok", f"unavailable: needs {', '.join(missing)}" if missing
                    else "available", f"Install it: python -m pip install {' '.join(missing)}" if missing else "")


# ---------------------------------------------------------------------------------------------- asked in a child
def probe() -> dict[str, Any]:
    """What `backends.probe` tells, or {"error": why not}."""
    root = Path(__file__).resolve().parents[2]
    try:
        child = subprocess.run([sys.executable, "-m", "backends.probe"], cwd=root, capture_output=True, text=True, errors="replace",
                               timeout=PROBE_SECONDS, stdin=subprocess.DEVNULL)
        return json.loads(child.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"torch did not answer within {PROBE_SECONDS} s"}
    except (IndexError, ValueError):
        last = child.stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        return {"error": last[0][:300]}


def _probed(facts: dict[str, Any]) -> Iterator[Check]:
    if "error" in facts:
        yield Check("packages", "torch works", "fail", facts["error"],
                    "Install it again: python -m pip install --force-reinstall torch==" + TORCH)
    if torch := facts.get("torch"):
        build = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "Metal" if torch["mps"] else "CPU"
        yield Check("packages", "torch works", "ok", f"{build} build, CPU code {torch['cpu_capability']}, {torch['threads']} threads")
    if "bandwidth" in facts:
        yield Check("memory", "Measured read bandwidth", "info", f"{facts['bandwidth'] / 1e9:.1f} GB/s")
    for row in facts.get("kernels", ()):
        yield Check("kernels", row["name"], "ok" if row["available"] else "info",
                    f"available: {row['detail']}" if row["available"] else f"not available: {row['detail']}")
