"""The C interface of the native kernels through ctypes: descriptors, instructions, a context.

Mirrors `native/abi.h` word for word and knows nothing else: no models, no layouts beyond the words' order. Descriptors hold
borrowed pointers; whoever makes one keeps the tensors alive beside it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import weakref
from array import array
from pathlib import Path

from torch import Tensor

from backends.errors import MissingRequirement

ABI = 5
F32, F16, BF16, U8 = range(4)
CENTER, ZERO, BIAS = range(3)
# Blocks of GGUF files that are laid out as they are; those of 256 weights (K) give float32 scales, the others float16 ones.
STORED = {"Q4_0": 0, "Q4_1": 1, "Q8_0": 2, "Q4_K": 3, "Q5_K": 4, "Q6_K": 5}
GLU = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
EMBED, NORM, ACT, MATMUL, NORM_ADD, GLU_OP, ATTEND, LOGITS, SCAN, GATED, CHAIN = range(11)
WORDS = 12                      # of an instruction: the op and its arguments
BATCH_WORDS, LINEAR_WORDS, LOAD_WORDS, CHAIN_WORDS = 11, 15, 10, 37
CHAIN_ROWS = 16                 # most rows of a chain's first pass
LANES, BLOCK = 16, 32


def bits(value: float) -> int:
    """A double as the 64-bit word that carries it."""
    return struct.unpack("q", struct.pack("d", value))[0]


def pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def words(*values: int) -> array:
    """A descriptor. Its address is `address(…)`."""
    return array("q", values)


def address(descriptor: array) -> int:
    return descriptor.buffer_info()[0]


@functools.cache                # one image of one file; ctypes would return the same handle
def open_library(path: Path) -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise MissingRequirement("The native kernels were built but cannot be loaded.", file=str(path), error=str(error),
                                 remedy="Remove the file and start again; it is built anew.") from error
    word, pointer_type = ctypes.c_int64, ctypes.c_void_p
    lib.gainz_abi.restype, lib.gainz_abi.argtypes = word, ()
    lib.gainz_pool_open.restype, lib.gainz_pool_open.argtypes = pointer_type, (word,)
    lib.gainz_pool_close.restype, lib.gainz_pool_close.argtypes = None, (pointer_type,)
    lib.gainz_open.restype, lib.gainz_open.argtypes = pointer_type, (pointer_type,)
    lib.gainz_close.restype, lib.gainz_close.argtypes = None, (pointer_type,)
    lib.gainz_isa.restype, lib.gainz_isa.argtypes = ctypes.c_char_p, (pointer_type,)
    lib.gainz_run.restype, lib.gainz_run.argtypes = ctypes.c_int, (pointer_type, pointer_type, word)
    lib.gainz_pack.restype = None
    lib.gainz_pack.argtypes = (pointer_type, pointer_type, word, word, word, pointer_type, word, word, pointer_type)
    lib.gainz_pack_stored.restype = None
    lib.gainz_pack_stored.argtypes = (pointer_type, word, pointer_type, word, word, pointer_type, pointer_type, pointer_type)
    lib.gainz_pack_floats.restype = None
    lib.gainz_pack_floats.argtypes = (pointer_type, pointer_type, word, word, word, pointer_type)
    lib.gainz_load_open.restype, lib.gainz_load_open.argtypes = pointer_type, (word,)
    lib.gainz_load_add.restype, lib.gainz_load_add.argtypes = ctypes.c_int, (pointer_type, pointer_type, word)
    lib.gainz_load_finish.restype, lib.gainz_load_finish.argtypes = word, (pointer_type,)
    lib.gainz_load_close.restype, lib.gainz_load_close.argtypes = None, (pointer_type,)
    if lib.gainz_abi() != ABI:
        raise MissingRequirement("The native kernels are of another version.", file=str(path), found=lib.gainz_abi(),
                                 wanted=ABI)
    return lib


class Pool:
    """Threads of one library that all contexts share: each with its own, those of one would wait, spinning, on the cores that another's
    are to work on. Ends with its last user."""

    def __init__(self, lib: ctypes.CDLL, threads: int) -> None:
        self._lib, self.handle = lib, lib.gainz_pool_open(threads)

    def __del__(self) -> None:
        if self.handle:
            self._lib.gainz_pool_close(self.handle)


_pools: weakref.WeakValueDictionary[tuple[Path, int], Pool] = weakref.WeakValueDictionary()     # what a process has, as its libraries


def _pool(path: Path, threads: int) -> Pool:
    found = _pools.get((path, threads))
    return found if found is not None else _pools.setdefault((path, threads), Pool(open_library(path), threads))


class Context:
    """Scratch memory and the ops of one instruction set, over threads that others use as well. Not for two callers at once.

    MissingRequirement where this processor lacks the instructions that the library was built for.
    """

    def __init__(self, path: Path, threads: int) -> None:
        self.path = path
        self._lib = open_library(path)
        self._pool = _pool(path, threads)                   # before the handle, which it outlives
        self._handle = self._lib.gainz_open(self._pool.handle)
        if not self._handle:
            raise MissingRequirement("This processor cannot run the native kernels that were built.", file=path.name,
                                     threads=threads)
        self.isa = self._lib.gainz_isa(self._handle).decode()
        self._line = array("q", [0] * WORDS)
        self._at = address(self._line)
        self._fill = {n: struct.Struct(f"{n}q").pack_into for n in range(1, WORDS + 1)}
        self._run = self._lib.gainz_run

    def call(self, *line: int) -> None:
        """Run one instruction."""
        self._fill[len(line)](self._line, 0, *line)
        code = self._run(self._handle, self._at, 1)
        if code:
            self._fail(code)

    def run(self, program: array) -> None:
        """Run a whole program: instructions of `WORDS` words."""
        code = self._run(self._handle, address(program), len(program) // WORDS)
        if code:
            self._fail(code)

    def pack(self, codes: int, rows: int, columns: int, padded: int, gather: int, width: int, shift: int, out: int) -> None:
        self._lib.gainz_pack(self._handle, codes, rows, columns, padded, gather, width, shift, out)

    def pack_stored(self, kind: str, blocks: int, rows: int, columns: int, codes: int, scale: int, offset: int) -> None:
        self._lib.gainz_pack_stored(self._handle, STORED[kind], blocks, rows, columns, codes, scale, offset)

    def pack_floats(self, values: int, rows: int, columns: int, kind: int, out: int) -> None:
        self._lib.gainz_pack_floats(self._handle, values, rows, columns, kind, out)

    def loader(self, threads: int) -> Loader:
        return Loader(self._lib, threads)

    def close(self) -> None:
        if self._handle:
            self._lib.gainz_close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    @staticmethod
    def _fail(code: int) -> None:
        raise MemoryError("the native kernels' workspace") if code != 1 else AssertionError("unknown instruction")


class Loader:
    """Threads that read matrices from files into the kernels' layout. `close` waits for what is being worked on."""

    def __init__(self, lib: ctypes.CDLL, threads: int) -> None:
        self._lib, self._handle = lib, lib.gainz_load_open(threads)
        if not self._handle:
            raise MemoryError("the native loader")

    def add(self, matrices: array) -> None:
        """The words of each `Matrix` of load.cpp."""
        if self._lib.gainz_load_add(self._handle, address(matrices), len(matrices) // LOAD_WORDS):
            raise MemoryError("the native loader")

    def finish(self) -> int:
        """Works too, until everything is there. The number of a matrix that its file does not hold whole, or -1."""
        return self._lib.gainz_load_finish(self._handle)

    def close(self) -> None:
        if self._handle:
            self._lib.gainz_load_close(self._handle)
            self._handle = None
