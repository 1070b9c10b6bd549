"""Builds the native kernels with the machine's own compiler, once, and finds them again by what they were made from.

The library's name holds a hash of the sources, the flags, the compiler's version and the processor: any change makes a new
one, and nothing is ever overwritten. Builds run in a folder of their own and arrive by an atomic rename, so that two
processes may build at once. Knows files and processes; knows nothing of what is inside.
"""

from __future__ import annotations

import functools
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


@dataclass(frozen=True)
class Isa:
    """An instruction set: its flags for the compiler, and what Linux's /proc/cpuinfo calls what it needs."""

    flags: tuple[str, ...]
    needs: frozenset[str]


AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = Isa((*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
             frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}))
ISAS = {                                                       # best first
    "avx512bf16": Isa((*AVX512.flags, "-mavx512bf16"), AVX512.needs | {"avx512_bf16"}),
    "avx512": AVX512,
    "avxvnni": Isa((*AVX2, "-mavxvnni"), frozenset({"avx2", "fma", "f16c", "avx_vnni"})),
    "avx2": Isa(AVX2, frozenset({"avx2", "fma", "f16c"})),
    "neon": Isa(("-march=armv8.2-a+dotprod+fp16",), frozenset({"asimd", "asimddp"})),
    "portable": Isa((), frozenset()),
}
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT = 300


@dataclass(frozen=True)
class Toolchain:
    """A compiler command and what it calls itself."""

    command: tuple[str, ...]
    version: str


def library(isa: str = "", cache: Path | None = None, flags: tuple[str, ...] | None = None) -> Path:
    """Path of the shared library for ``isa`` ("": the best of this processor that the compiler knows), built now if it is
    not there. ``flags`` replaces the instruction set's own. MissingRequirement: no compiler, it failed, or no such set."""
    tools = toolchain()
    folder = cache or cache_folder()
    for name in (isa,) if isa else usable():
        if name not in ISAS:
            raise MissingRequirement(f"There are no native kernels for {name!r}.", known=", ".join(ISAS))
        own = ISAS[name].flags if flags is None else flags
        path = folder / f"gainz-{name}-{fingerprint(tools, own)}{suffix()}"
        if path.exists():
            return path
        if name == "portable" or isa or knows(tools, own):
            build(tools, name, own, path)
            return path
    raise AssertionError("the portable kernels are always usable")


def usable() -> list[str]:
    """The instruction sets this processor has, best first. The library itself asks again when opened."""
    has = features()
    return [name for name, isa in ISAS.items() if isa.needs <= has]


def features() -> frozenset[str]:
    """What the system says the processor can do, in Linux's words."""
    if sys.platform.startswith("linux"):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.split(":", 1)[1].split())
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return ISAS["neon"].needs                              # every one of them has it
    if sys.platform == "darwin":
        done = subprocess.run(["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"], capture_output=True,
                              text=True,
                              timeout=TIMEOUT, check=False)
        return frozenset(done.stdout.lower().replace("avx512", "avx512_").replace("avx512_f", "avx512f").split())
    return frozenset()


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
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    for name in names:
        command = tuple(name.split())
        if shutil.which(command[0]):
            return Toolchain(command, _version(command))
    raise MissingRequirement("The native kernels need a C++ compiler and none was found.", looked_for=", ".join(names),
                             remedy="Install g++ or clang++ (Debian: `apt install g++`; macOS: `xcode-select --install`).")


@functools.cache                # asking takes longer than reading a layer, and every load asks
def _version(command: tuple[str, ...]) -> str:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    return (done.stdout or done.stderr).strip().splitlines()[0] if done.stdout or done.stderr else "unknown"


def fingerprint(tools: Toolchain, flags: tuple[str, ...]) -> str:
    """20 hex digits of everything that the library depends on."""
    digest = hashlib.sha256()
    for text in (" ".join(tools.command), tools.version, repr((COMMON, flags)), processor()):
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


def knows(tools: Toolchain, flags: tuple[str, ...]) -> bool:
    """Does this compiler know these flags? (An old one lacks some.)"""
    with tempfile.TemporaryDirectory(prefix="gainz-") as folder:
        probe = Path(folder) / "probe.cpp"
        probe.write_text("int main() { return 0; }\n")
        command = [*tools.command, *flags, "-c", str(probe), "-o", str(probe.with_suffix(".o"))]
        return subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=False).returncode == 0


def build(tools: Toolchain, isa: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile and link into ``path``; a second builder's equal file may take its place at any time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="build-", dir=path.parent))
    except OSError as error:
        raise MissingRequirement("The native kernels have no folder to be built in.", folder=str(path.parent),
                                 error=str(error),
                                 remedy="Make the folder writable, or set XDG_CACHE_HOME.") from error
    try:
        define = f"-DGAINZ_{isa.upper()}"
        common = sorted(file.name for file in SOURCES.glob("*.cpp") if not file.name.startswith("isa_"))
        jobs = [*((name, ("-O2", define)) for name in common),
                (f"isa_{isa}.cpp", ("-O3" if isa.startswith("avx512") else "-O2", *flags))]
        extra = tuple(flag for flag in flags if flag.startswith("-D"))
        with ThreadPoolExecutor(max_workers=len(jobs)) as pool:
            objects = list(pool.map(lambda job: _compile(tools, work, job[0], (*job[1], *extra)), jobs))
        made = work / path.name
        _run([*tools.command, "-shared", "-pthread", "-o", str(made), *objects], "link")
        os.replace(made, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile(tools: Toolchain, work: Path, name: str, flags: tuple[str, ...]) -> str:
    target = work / f"{name}.o"
    _run([*tools.command, *COMMON, *flags, "-c", str(SOURCES / name), "-o", str(target)], name)
    return str(target)


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise MissingRequirement("Building the native kernels took too long.", step=what, seconds=TIMEOUT) from error
    if done.returncode:
        raise MissingRequirement("The native kernels could not be built with this compiler.", step=what, command=command[0],
                                 said=done.stderr.strip()[-600:], remedy="Install g++ 10 or later, or clang++ 12.")
