"""Builds the native kernels with the machine's own compiler, once, and finds them again by what they were made from.

The library's name holds a hash of the sources, the flags, the compiler's version and the processor: any change makes a new
one, and nothing is ever overwritten. Builds run in a folder of their own and arrive by an atomic rename, so that two
processes may build at once. Knows files and processes; knows nothing of what is inside.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from backends.errors import MissingRequirement

SOURCES = Path(__file__).parent / "native"
COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra",
          "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-psabi")
X86 = {"isa_avx512.cpp": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c"),
       "isa_avxvnni.cpp": ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"),
       "isa_avx2.cpp": ("-mavx2", "-mfma", "-mf16c"), "isa_portable.cpp": ()}
ARM = {"isa_neon.cpp": ("-march=armv8.2-a+dotprod+fp16",), "isa_portable.cpp": ()}
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT = 300


@dataclass(frozen=True)
class Toolchain:
    """A compiler command, what it calls itself, and the flags and files for this kind of processor."""

    command: tuple[str, ...]
    version: str
    defines: tuple[str, ...]
    files: dict[str, tuple[str, ...]]


def library(cache: Path | None = None) -> Path:
    """Path of the shared library, built now if it is not there. MissingRequirement: no compiler, or it failed."""
    tools = toolchain()
    folder = cache or cache_folder()
    path = folder / f"gainz-{fingerprint(tools)}{suffix()}"
    if not path.exists():
        build(tools, path)
    return path


def cache_folder() -> Path:
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "gainz" / "kernels"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "gainz" / "kernels"
    return Path.home() / ".cache" / "gainz" / "kernels"


def suffix() -> str:
    return ".dylib" if sys.platform == "darwin" else ".so"


def toolchain() -> Toolchain:
    if os.name == "nt":
        raise MissingRequirement("The native kernels are not built on Windows.", remedy="Use the kernels \"aten\", or WSL.")
    machine = platform.machine().lower()
    kinds = {"x86_64": ("X86", X86), "amd64": ("X86", X86), "aarch64": ("NEON", ARM), "arm64": ("NEON", ARM)}
    define, files = kinds.get(machine, ("OTHER", {"isa_portable.cpp": ()}))
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    for name in names:
        command = tuple(name.split())
        if shutil.which(command[0]):
            return Toolchain(command, _version(command), (f"-DGAINZ_{define}",), files)
    raise MissingRequirement("The native kernels need a C++ compiler and none was found.", looked_for=", ".join(names),
                             remedy="Install g++ or clang++ (Debian, Ubuntu: `apt install g++`; macOS: `xcode-select --install`).")


def _version(command: tuple[str, ...]) -> str:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    return (done.stdout or done.stderr).strip().splitlines()[0] if done.stdout or done.stderr else "unknown"


def fingerprint(tools: Toolchain) -> str:
    """20 hex digits of everything that the library depends on."""
    digest = hashlib.sha256()
    for text in (" ".join(tools.command), tools.version, repr(sorted(tools.files.items())), repr((COMMON, tools.defines)), processor()):
        digest.update(text.encode() + b"\0")
    for file in sorted(SOURCES.iterdir()):
        if file.suffix in (".h", ".cpp"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def processor() -> str:
    """The processor's own name: a cache folder may be shared by several machines."""
    if sys.platform.startswith("linux"):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("model name", "CPU part")):
                return f"{platform.machine()} {line.split(':', 1)[1].strip()}"
    return f"{platform.machine()} {platform.processor()}"


def build(tools: Toolchain, path: Path) -> None:
    """Compile and link into ``path``; whoever arrives first stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="build-", dir=path.parent))
    except OSError as error:
        raise MissingRequirement("The native kernels have no folder to be built in.", folder=str(path.parent), error=str(error),
                                 remedy="Make the folder writable, or set XDG_CACHE_HOME.") from error
    try:
        jobs = {"api.cpp": (), "pool.cpp": (), **_supported(tools, work)}
        defines = tools.defines + tuple(f"-D{Path(name).stem.replace('isa_', 'GAINZ_').upper()}" for name in jobs if name.startswith("isa_"))
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            objects = list(pool.map(lambda item: _compile(tools, work, item[0], item[1] + defines), sorted(jobs.items())))
        made = work / path.name
        _run([*tools.command, "-shared", "-pthread", "-o", str(made), *objects], "link")
        os.replace(made, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _supported(tools: Toolchain, work: Path) -> dict[str, tuple[str, ...]]:
    """The instruction sets whose flags this compiler knows (an old one lacks some)."""
    probe = work / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    known = {}
    for name, flags in tools.files.items():
        if not (SOURCES / name).exists():
            continue
        command = [*tools.command, *flags, "-c", str(probe), "-o", str(work / "probe.o")]
        if subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=False).returncode == 0:
            known[name] = flags
    return known


def _compile(tools: Toolchain, work: Path, name: str, flags: tuple[str, ...]) -> str:
    target = work / f"{name}.o"
    level = "-O3" if name.startswith("isa_") else "-O2"
    _run([*tools.command, level, *COMMON, *flags, "-c", str(SOURCES / name), "-o", str(target)], name)
    return str(target)


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise MissingRequirement("Building the native kernels took too long.", step=what, seconds=TIMEOUT) from error
    if done.returncode:
        raise MissingRequirement("The native kernels could not be built with this compiler.", step=what, command=command[0],
                                 said=done.stderr.strip()[-600:], remedy="Install a newer g++ (10 or later) or clang++ (12 or later).")
