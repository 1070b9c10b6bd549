"""The native kernels of another architecture, run by an emulator, behind the face of `native_abi.Context`.

Knows no descriptor's layout: whatever word of an instruction or a descriptor lies inside a living tensor or descriptor is a
pointer, and that memory travels to the emulated process, is used there, and comes back. So every test of the CPU target runs
unchanged on kernels that this machine cannot execute.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import shutil
import struct
import subprocess
import weakref
from array import array
from pathlib import Path

import pytest
import torch

from backends.kernels import native_abi, native_build

CROSS, QEMU, SYSROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
ARENA = 16 << 20                    # what is larger is room that tensors are cut from, not one of them
DRIVER = Path(__file__).with_name("neon_driver.cpp")


def missing() -> str:
    """Why nothing can be emulated here; empty where it can."""
    lacking = [tool for tool in (CROSS, QEMU) if not shutil.which(tool)]
    if lacking:
        return f"{' and '.join(lacking)} missing (Debian: apt install g++-aarch64-linux-gnu qemu-user)"
    return ""


def build(folder: Path, isa: str) -> Path:
    """The driver, linked with the kernels of ``isa`` as `native_build` compiles them for AArch64."""
    tools = native_build.Toolchain((CROSS,), "cross")
    library, driver = folder / f"libgainz-{isa}.so", folder / f"driver-{isa}"
    native_build.build(tools, isa, native_build.ISAS[isa].flags, library)
    done = subprocess.run([CROSS, "-std=c++17", "-O1", "-Wall", "-Wextra", str(DRIVER), str(library), f"-Wl,-rpath,{folder}",
                           "-o", str(driver)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(done.stderr)
    return driver


class Descriptors:
    """Every array that `native_abi.words` makes while this is in place: arrays are invisible to the garbage collector."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._made: list[weakref.ref] = []
        make = native_abi.words

        def words(*values: int) -> array:
            line = make(*values)
            self._made.append(weakref.ref(line))
            return line

        patch.setattr(native_abi, "words", words)

    def living(self) -> list[array]:
        self._made = [ref for ref in self._made if ref() is not None]
        return [line for ref in self._made if (line := ref()) is not None]


class RemoteContext:
    """As `native_abi.Context`; ``isa`` is empty where the emulated processor was refused."""

    def __init__(self, driver: Path, cpu: str, descriptors: Descriptors, threads: int = 2) -> None:
        self.path, self._descriptors = driver, descriptors
        self._process = subprocess.Popen([QEMU, "-L", SYSROOT, "-cpu", cpu, str(driver), str(threads)],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        version, length = struct.unpack("qq", self._read(16))
        assert version == native_abi.ABI
        self.isa = self._read(length).decode()

    def call(self, *line: int) -> None:
        self.run(array("q", [*line, *[0] * (native_abi.WORDS - len(line))]))

    def run(self, program: array) -> None:
        assert self._send(0, program) == 0

    def pack(self, *line: int) -> None:
        self._send(1, array("q", line))

    def pack_floats(self, *line: int) -> None:
        self._send(2, array("q", line))

    def pack_stored(self, kind: str, *line: int) -> None:
        self._send(3, array("q", [native_abi.STORED[kind], *line]))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    # ------------------------------------------------------------------------------------------ memory
    def _send(self, kind: int, words: array) -> int:
        memory = self._memory()
        starts = [start for start, _, _ in memory]
        parts, where, moves = [(0, words.tobytes())], {}, []
        pending = [(0, words)]
        while pending:
            number, line = pending.pop()
            for i, word in enumerate(line):
                at = bisect.bisect_right(starts, word) - 1
                if at < 0 or word >= memory[at][1]:
                    continue
                start, end, descriptor = memory[at]
                if start not in where:
                    where[start] = len(parts)
                    parts.append((start, ctypes.string_at(start, end - start)))
                    if descriptor is not None:
                        pending.append((where[start], descriptor))
                moves.append((number, 8 * i, where[start], word - start))
        self._process.stdin.write(struct.pack("qqq", kind, len(parts), len(moves))
                                  + b"".join(struct.pack("q", len(data)) + data for _, data in parts)
                                  + b"".join(struct.pack("qqqq", *move) for move in moves))
        self._process.stdin.flush()
        code = struct.unpack("q", self._read(8))[0]
        pointed = {where[start] for start, _, descriptor in memory if descriptor is not None and start in where}
        for number, (start, sent) in enumerate(parts[1:], 1):
            data = self._read(len(sent))
            if number not in pointed and data != sent:         # descriptors come back with foreign pointers
                ctypes.memmove(start, data, len(data))
        return code

    def _memory(self) -> list[tuple[int, int, array | None]]:
        """(start, end, descriptor or None) of everything a word may point into; overlapping tensors are one."""
        found = [(line.buffer_info()[0], line.buffer_info()[0] + 8 * len(line), line) for line in self._descriptors.living()]
        for tensor in gc.get_objects():
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and 0 < tensor.nbytes < ARENA:
                last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
                found.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), None))
        merged: list[tuple[int, int, array | None]] = []
        for start, end, line in sorted(found, key=lambda part: part[:2]):
            if merged and start < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]), merged[-1][2])
            else:
                merged.append((start, end, line))
        return merged

    def _read(self, size: int) -> bytes:
        data = self._process.stdout.read(size)
        if len(data) != size:
            raise AssertionError(f"the emulated kernels ended: exit {self._process.wait(timeout=20)}")
        return data
