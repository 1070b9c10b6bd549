"""A GGUF file's header, metadata and tensor directory. Standard library; every read is bounded by the file itself.

Knows the container: magic, version, typed key-value pairs, the tensor directory, alignment, split files. Refuses to know
what a key or a tensor means, and never touches tensor data: it only proves that each tensor lies inside the file, whole,
aligned and apart from the others. A count is believed only after the bytes it promises are seen to be there, so a
damaged file costs one `BrokenFile`, not memory or time.
"""

from __future__ import annotations

import re
import struct
import sys
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from backends.errors import BrokenFile, UnknownFormat, UnsupportedTensor

if TYPE_CHECKING:
    from backends.gguf_strings import Strings

MAX_DIMS, MAX_KEY, MAX_KEYS, MAX_TENSORS, MAX_STRINGS, MAX_ALIGNMENT = 4, 65_535, 1 << 16, 1 << 17, 1 << 21, 1 << 20
MAX_TEXT = 16 << 20                 # bytes of one string or of one array of metadata
READ_AHEAD = 1 << 20                # bytes fetched at once: metadata is read front to back
SETTLED = 2_000_000_000             # nanoseconds after which a file's next change has another time, on any file system

# number: (name, weights in a block, bytes of a block), as ggml numbers them
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18)}

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
           12: "d"}   # value type: struct code
STRING, ARRAY = 8, 9
SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the directory. ``shape`` runs from the outermost dimension in, as torch has it (ggml: reversed);
    ``offset`` counts from the start of ``path``; ``bytes`` are those of the whole tensor."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    bytes: int
    path: Path

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bits(self) -> float:
        """Stored bits per weight, scales included."""
        return 8 * self.bytes / self.elements


@dataclass(frozen=True)
class GgufFile:
    """What the header says. ``metadata`` values: int, float, bool, str, `Strings`, or `array.array` for numbers."""

    path: Path
    version: int
    alignment: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    parts: tuple[Path, ...] = field(default=())        # all files of the model, this one first

    @property
    def architecture(self) -> str:
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise BrokenFile(f"{self.path.name} does not say its architecture.", file=self.path.name,
                             key="general.architecture")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``{architecture}.{key}``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def weight_type(self) -> str:
        """The type that holds most of the weights: what people call the file, Q4_K say."""
        weights: dict[str, int] = {}
        for tensor in self.tensors.values():
            weights[tensor.type] = weights.get(tensor.type, 0) + tensor.elements
        return max(weights, key=lambda name: weights[name]) if weights else ""

    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors.values())

    def bits(self) -> float | None:
        """Mean stored bits per weight, scales included."""
        count = self.parameters()
        return 8 * sum(tensor.bytes for tensor in self.tensors.values()) / count if count else None


def read(path: str | Path) -> GgufFile:
    """One file alone, a part of a split model included. BrokenFile, UnsupportedTensor (a type whose size is not known) or
    UnknownFormat (no GGUF, or one of a version or byte order that is not read)."""
    path = Path(path)
    try:
        state = path.stat()
        if time.time_ns() - state.st_mtime_ns > SETTLED:
            return _settled(path, state.st_size, state.st_mtime_ns)
        return _header(path)
    except OSError as error:
        raise BrokenFile(f"{path.name} cannot be read.", file=path.name, reason=error) from error


def _header(path: Path) -> GgufFile:
    with open(path, "rb") as file:
        return _Reader(file, path).header()


@lru_cache(maxsize=1)           # a load asks for the same header three times (claim, facts, weights), at some 50 ms each
def _settled(path: Path, size: int, modified: int) -> GgufFile:
    """Of a file that has not changed for so long that another change would show in its time."""
    return _header(path)


def read_model(path: str | Path) -> GgufFile:
    """The whole model: with the tensors of its other parts where ``path`` is the first part of a split file."""
    first = read(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return GgufFile(first.path, first.version, first.alignment, first.metadata, first.tensors, (first.path,))
    if first.metadata.get("split.no") != 0:
        raise UnknownFormat(f"{first.path.name} is not the first part of its model.", remedy="Open the part numbered 00001.",
                            part=first.metadata.get("split.no", "?"), count=count)
    tensors, parts = dict(first.tensors), split_parts(first.path, count)
    for number, part in enumerate(parts[1:], 1):
        more = read(part)
        if more.metadata.get("split.no") != number or tensors.keys() & more.tensors.keys():
            raise BrokenFile(f"{part.name} is not part {number + 1} of this model.", file=part.name)
        tensors |= more.tensors
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise BrokenFile(f"The {count} parts hold {len(tensors)} tensors of {total}.", file=first.path.name)
    return GgufFile(first.path, first.version, first.alignment, first.metadata, tensors, tuple(parts))


def split_parts(first: Path, count: int) -> list[Path]:
    """The files of a split model in order. BrokenFile naming the first that is missing."""
    match = SPLIT_NAME.match(first.name)
    if match is None or int(match["count"]) != count:
        raise BrokenFile(f"{first.name} says it is one of {count} parts, but is not named NAME-00001-of-{count:05}.gguf.",
                         file=first.name)
    parts = [first.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise BrokenFile(f"A part of the model is missing: {part.name}.", file=part.name, parts=count)
    return parts


class _Reader:
    """A cursor over the file's front, in a window that moves with it."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path, self.size = file, path, path.stat().st_size
        self.window, self.start, self.at, self.strings = b"", 0, 0, 0

    # ---- bytes
    def broken(self, cause: str, **evidence: Any) -> BrokenFile:
        return BrokenFile(f"{self.path.name}: {cause}", file=self.path.name, at=self.at, **evidence)

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            raise self.broken(f"the file ends inside {what}.", needed=count, left=self.size - self.at)
        if count > MAX_TEXT:
            raise self.broken(f"{what} is larger than {MAX_TEXT} bytes.", bytes=count)
        low = self.at - self.start
        if low + count > len(self.window):
            self.file.seek(self.at)
            self.window, self.start, low = self.file.read(max(count, READ_AHEAD)), self.at, 0
        if low + count > len(self.window):
            raise self.broken(f"the file ends inside {what}.", needed=count, left=len(self.window) - low)
        self.at += count
        return self.window[low:low + count]

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def text(self, what: str, longest: int = MAX_TEXT) -> str:
        length = self.number("Q", what)
        if length > longest:
            raise self.broken(f"{what} claims {length} bytes.", limit=longest)
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.broken(f"{what} is not UTF-8.") from error

    # ---- header
    def header(self) -> GgufFile:
        version = self.version()
        tensor_count, key_count = self.number("Q", "the tensor count"), self.number("Q", "the key count")
        if tensor_count > MAX_TENSORS or key_count > MAX_KEYS:
            raise self.broken("absurd counts in the header.", tensors=tensor_count, keys=key_count)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.text("a key", MAX_KEY)
            if not key or key in metadata:
                raise self.broken("an empty key." if not key else f"the key {key!r} is there twice.")
            metadata[key] = self.value(self.number("I", key), key)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.broken(f"an alignment of {alignment!r}.", key="general.alignment")
        return GgufFile(self.path, version, alignment, metadata, self.directory(tensor_count, alignment))

    def version(self) -> int:
        if self.size < 24 or self.take(4, "the magic") != b"GGUF":
            if self.size >= 24:
                raise UnknownFormat(f"{self.path.name} is not a GGUF file: it does not begin with GGUF.",
                                    file=self.path.name)
            raise self.broken("too short for a GGUF header.", bytes=self.size)
        version = self.number("I", "the version")
        if version and not version & 0xFFFF:
            raise UnknownFormat(f"{self.path.name} is a big-endian GGUF file.",
                                remedy="Use the little-endian file of this model.")
        if version not in (2, 3):
            raise UnknownFormat(f"{self.path.name} is GGUF version {version}; versions 2 and 3 are read.",
                                remedy="Fetch a newer conversion of this model.", version=version)
        return version

    # ---- values
    def value(self, kind: int, key: str) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind], key)
        if kind == STRING:
            return self.text(key)
        if kind != ARRAY:
            raise self.broken(f"{key} has the unknown value type {kind}.", key=key)
        inner, count = self.number("I", key), self.number("Q", key)
        if inner == STRING:
            return self.string_array(count, key)
        if inner not in SCALARS:
            raise self.broken(f"{key} is an array of the type {inner}, which is not allowed.", key=key)
        width = struct.calcsize("<" + SCALARS[inner])
        values = array("B" if SCALARS[inner] == "?" else SCALARS[inner], self.take(count * width, f"the array {key}"))
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def string_array(self, count: int, key: str) -> Strings:
        from backends.gguf_strings import Strings, string_starts     # here: a catalog is listed without NumPy
        self.strings += count
        if count * 8 > self.size - self.at or self.strings > MAX_STRINGS:
            raise self.broken(f"the array {key} claims {count} strings.", left=self.size - self.at)
        begin, starts = self.at, array("q", [0])
        raw = self.take(min(READ_AHEAD, self.size - begin, MAX_TEXT), key)
        starts.frombytes(string_starts(raw, count).tobytes())
        at = starts[-1]
        length, append = struct.Struct("<Q").unpack_from, starts.append
        for _ in range(count + 1 - len(starts)):
            if at + 8 > len(raw):
                raw = self.more(raw, begin, key, at)
            end = at + 8 + length(raw, at)[0]
            if end > len(raw):
                raw = self.more(raw, begin, key, at)
            at = end
            append(at)
        self.at = begin + at
        self.window, self.start = raw[at:], self.at
        return Strings(key, raw[:at], starts)

    def more(self, raw: bytes, begin: int, key: str, at: int) -> bytes:
        """The same bytes and as many again; an array whose string at ``at`` would leave the file ends here."""
        self.at = begin
        wanted = at + 8 + int.from_bytes(raw[at:at + 8], "little")
        larger = min(max(2 * len(raw), wanted), self.size - begin, MAX_TEXT)
        if larger <= len(raw) or wanted > larger:
            raise self.broken(f"the array {key} goes beyond the file, or is larger than {MAX_TEXT} bytes.", key=key)
        return self.take(larger, key)

    # ---- tensors
    def directory(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        entries = [self.entry() for _ in range(count)]
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise self.broken(f"the tensor {name!r} is there twice.", tensor=name)
            if offset % alignment:
                raise self.broken(f"the tensor {name!r} is not aligned.", tensor=name, offset=offset, alignment=alignment)
            title, block, width = TYPES[kind]
            tensors[name] = TensorInfo(name, shape, title, base + offset, prod(shape) // block * width, self.path)
        self.check_places(sorted(tensors.values(), key=lambda tensor: tensor.offset))
        return tensors

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text("a tensor's name", MAX_KEY)
        dims = self.number("I", name)
        if not name or not 0 < dims <= MAX_DIMS:
            raise self.broken(f"the tensor {name!r} claims {dims} dimensions.", tensor=name, limit=MAX_DIMS)
        shape = tuple(reversed(struct.unpack(f"<{dims}Q", self.take(8 * dims, name))))
        kind, offset = self.number("I", name), self.number("Q", name)
        if kind not in TYPES:
            raise UnsupportedTensor(f"{self.path.name}: the tensor {name!r} has the unknown type {kind}.", tensor=name,
                                    type=kind)
        if not all(shape):
            raise self.broken(f"the tensor {name!r} is empty.", tensor=name, shape=shape)
        if shape[-1] % TYPES[kind][1]:
            raise self.broken(f"a row of the tensor {name!r} is no whole number of {TYPES[kind][0]} blocks.", tensor=name,
                              shape=shape)
        return name, shape, kind, offset

    def check_places(self, tensors: list[TensorInfo]) -> None:
        end, before = 0, ""
        for tensor in tensors:
            if tensor.offset + tensor.bytes > self.size:
                raise self.broken(f"the tensor {tensor.name!r} lies outside the file, which is cut or damaged.",
                                  tensor=tensor.name,
                                  ends=tensor.offset + tensor.bytes, size=self.size)
            if tensor.offset < end:
                raise self.broken(f"the tensors {before!r} and {tensor.name!r} overlap.", tensor=tensor.name)
            end, before = tensor.offset + tensor.bytes, tensor.name
