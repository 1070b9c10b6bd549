"""How a folder says that it is quantized: config.json, quantize_config.json, quant_config.json, in their several dialects.

Light: names and small JSON only. Knows the spellings and that two files must not contradict each other; what a layout means
is the business of the weights' readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.errors import BrokenFile, ConfigConflict
from backends.base import ModelDir, read_json

INSIDE, GPTQ_FILE, AWQ_FILE = "config.json", "quantize_config.json", "quant_config.json"
SPELLINGS: dict[str, tuple[str, ...]] = {
    "method": ("quant_method", "method"), "bits": ("bits", "w_bit", "wbits"),
    "group": ("group_size", "q_group_size", "groupsize"),
    "act-order": ("desc_act",), "symmetric": ("sym",), "zero points": ("zero_point",),
    "layout": ("checkpoint_format", "format", "version")}
PEEK = 64 << 20            # bytes of a safetensors header that are looked through


@dataclass(frozen=True)
class Quantization:
    """``data``: the settings of all files, one over the other; ``values``: those of `SPELLINGS`, where a file has them."""

    method: str
    data: Mapping[str, Any]
    values: Mapping[str, Any]
    files: tuple[str, ...]

    @property
    def bits(self) -> int:
        return self.whole("bits", 4)

    @property
    def group(self) -> int:
        """Inputs that share a scale; -1: all of them."""
        return self.whole("group", -1 if self.method == "gptq" else 128)

    @property
    def layout(self) -> str:
        return str(self.values.get("layout", "")).lower()

    def flag(self, name: str, default: bool | None = None) -> bool | None:
        value = self.values.get(name, default)
        if value is not None and not isinstance(value, bool):
            raise BrokenFile(f"{self.files[0]}: {name} is neither true nor false.", file=self.files[0], value=value)
        return value

    def whole(self, name: str, default: int) -> int:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise BrokenFile(f"{self.files[0]}: {name} is no whole number.", file=self.files[0], value=value)
        return value

    def words(self) -> str:
        """For people: "4-bit g128"."""
        return f"{self.bits}-bit" + (f" g{self.group}" if self.group > 0 else "")


def read_quantization(model: ModelDir) -> Quantization | None:
    """What the folder's files say together, or None. ConfigConflict where two of them differ, with both values and files."""
    found = {INSIDE: model.config.get("quantization_config")}
    found |= {name: read_json(model.folder / name) or None for name in (GPTQ_FILE, AWQ_FILE) if name in model.files}
    given: dict[str, Mapping[str, Any]] = {}
    for file, data in found.items():
        if data is None:
            continue
        if not isinstance(data, Mapping):
            raise BrokenFile(f"The quantization settings in {file} are no JSON object.", file=file)
        given[file] = data
    if not given:
        return None
    values, origin = _together({file: _values(data, file) for file, data in given.items()})
    merged: dict[str, Any] = {}
    for data in reversed(given.values()):
        merged |= data
    return Quantization(str(values["method"]).lower(), merged, values, tuple(given))


def _values(data: Mapping[str, Any], file: str) -> dict[str, Any]:
    """By our names. A file of either tool's own needs not say which tool that is."""
    values = {}
    for name, spellings in SPELLINGS.items():
        stated = [data[key] for key in spellings if data.get(key) is not None]
        if stated:
            values[name] = stated[0].lower() if isinstance(stated[0], str) else stated[0]
    if "method" not in values:
        values["method"] = "awq" if file == AWQ_FILE or "zero_point" in data or "q_group_size" in data else "gptq"
    return values


def _together(by_file: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for file, stated in by_file.items():
        for name, value in stated.items():
            if name in values and values[name] != value:
                raise ConfigConflict(f"{origin[name]} and {file} differ in {name}: {values[name]} and {value}.",
                                     **{origin[name].replace(".", "_"): values[name], file.replace(".", "_"): value})
            values.setdefault(name, value)
            origin.setdefault(name, file)
    return values, origin


def looks_packed(model: ModelDir) -> bool:
    """Do the weight files name packed tensors, whatever the configs say?"""
    for name in model.ending(".safetensors.index.json") or model.ending(".safetensors"):
        if b".qweight\"" in _head(model.folder / name) or b".weight_packed\"" in _head(model.folder / name):
            return True
    return False


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        if path.suffix == ".json":
            return file.read(PEEK)
        length = int.from_bytes(file.read(8), "little")
        return file.read(min(length, PEEK))
