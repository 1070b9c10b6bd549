"""What a model is, from its headers alone: config.json and safetensors headers, or a GGUF file's metadata. Light: no torch.

Knows how the common architectures name their sizes. Refuses to know values: no weight is read, and a file that says of
itself what cannot be is a BrokenFile.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

from backends.base import BrokenFile, LayerKV, ModelDir, UnknownFormat, read_json
from backends.gguf import find
from backends.gguf_file import GgufFile, read_model
from backends.sizes import NAMES, check_config, check_gguf

MAX_HEADER = 100 << 20                  # bytes; the format's own limit
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "U16": 2,
          "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class Stored:
    """All weights of one kind in the files."""

    kind: str                           # "BF16", "Q4_1", "int4 packed" …
    elements: int                       # weights, unpacked
    bytes: int                          # scales included
    floating: bool


@dataclass(frozen=True)
class ModelFacts:
    """0, "" and None: the files do not say."""

    name: str
    format: str                         # "safetensors", "GGUF"
    architecture: str = ""
    model_type: str = ""
    layers: tuple[LayerKV, ...] = ()
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    inner: int = 0                      # width of the feed-forward block
    vocab: int = 0
    parameters: int = 0
    bits: float | None = None           # mean stored bits per weight
    trained_context: int = 0
    quantization: str = ""              # "gptq, 4 bits, group 128"
    stored: tuple[Stored, ...] = ()     # biggest first
    disk_bytes: int = 0

    @property
    def weights_bytes(self) -> int:
        return sum(kind.bytes for kind in self.stored)


def describe(model: ModelDir) -> ModelFacts:
    """BrokenFile naming the file; UnknownFormat where there are neither safetensors nor GGUF."""
    disk = sum((model.folder / name).stat().st_size for name in model.files)
    if (gguf := find(model)) is not None:
        file = read_model(gguf)
        check_gguf(file)
        return _from_gguf(model, file, disk)
    if model.ending(".safetensors"):
        return _from_folder(model, disk)
    raise UnknownFormat(f"{model.name} holds neither safetensors nor GGUF.", model=model.name)


# ---------------------------------------------------------------------------------------------- safetensors
def safetensors_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Name → (dtype, shape, bytes). BrokenFile where the header promises what the file does not hold."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else MAX_HEADER + 1
        if length > min(MAX_HEADER, size - 8):
            raise BrokenFile(f"{path.name} is cut or no safetensors file.", file=path.name, bytes=size)
        raw = file.read(length)
    try:
        entries = {name: _entry(item, size - 8 - length) for name, item in json.loads(raw).items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenFile(f"The header of {path.name} is damaged, or the file is cut.", file=path.name,
                         reason=error) from error
    return entries


def _entry(item: Mapping[str, Any], room: int) -> tuple[str, tuple[int, ...], int]:
    begin, end = item["data_offsets"]
    shape = tuple(item["shape"])
    if not 0 <= begin <= end <= room or any(not isinstance(side, int) or side < 0 for side in shape):
        raise ValueError(f"{end} bytes of {room}")
    width = WIDTHS.get(item["dtype"])
    if width is not None and prod(shape) * width != end - begin:
        raise ValueError(f"shape {shape} of {item['dtype']} is not {end - begin} bytes")
    return item["dtype"], shape, end - begin


def weight_files(model: ModelDir) -> list[str]:
    """The safetensors files of the model: those of its index, else those that are there. BrokenFile: one is missing."""
    index = read_json(model.folder / "model.safetensors.index.json").get("weight_map")
    if not isinstance(index, Mapping):
        here = [name for name in model.ending(".safetensors") if "/" not in name]
        return [name for name in here if name.startswith("model")] or here
    wanted = sorted({str(name) for name in index.values()})
    for name in wanted:
        if name not in model.files:
            raise BrokenFile(f"{name} of the index is missing.", file=name, index="model.safetensors.index.json")
    return wanted


def _from_folder(model: ModelDir, disk: int) -> ModelFacts:
    quantization = _quantization(model)
    tensors = [(name, *entry) for file in weight_files(model)
               for name, entry in safetensors_header(model.folder / file).items()]
    bits = quantization.get("bits", quantization.get("w_bit", 4))
    own = _kinds(tensors, bits if isinstance(bits, int) and bits > 0 else 4)
    stored = _gather([*own, *_borrowed(model.config)])
    outer = model.config
    check_config(outer)
    config = outer["text_config"] if isinstance(outer.get("text_config"), Mapping) else outer
    size = {key: _first(config, names) for key, names in NAMES.items()}
    size["head_dim"] = size["head_dim"] or size["hidden"] // max(1, size["heads"])
    size["kv_heads"] = size["kv_heads"] or (1 if config.get("multi_query") else size["heads"])
    return ModelFacts(
        model.name, "safetensors", next(iter(outer.get("architectures") or ()), ""), str(outer.get("model_type", "")),
        _layers(config, size), size["hidden"], size["heads"], size["kv_heads"], size["head_dim"], size["inner"],
        size["vocab"],
        sum(kind.elements for kind in stored), _bits(stored), size["context"], _words(quantization), stored, disk)


def _kinds(tensors: Iterable[tuple], bits: int) -> Iterable[Stored]:
    """Each tensor as its kind. Packed integers hold 32 / bits weights each; scales and zeros belong to them."""
    for name, dtype, shape, size in tensors:
        leaf = name.rpartition(".")[2]
        if leaf == "qweight":
            yield Stored(f"int{bits} packed", size * 8 // bits, size, False)
        elif leaf in {"qzeros", "scales", "g_idx"}:
            yield Stored(f"int{bits} packed", 0, size, False)
        else:
            yield Stored(dtype, prod(shape), size, dtype in FLOATS)


def _borrowed(config: Mapping[str, Any]) -> Iterable[Stored]:
    """What a draft takes from its parent: it is in memory a second time, and in no file of the draft."""
    lent = config.get("gainz_draft")
    lent = lent.get("borrows") if isinstance(lent, Mapping) else None
    if isinstance(lent, Mapping) and isinstance(lent.get("weights"), int) and isinstance(lent.get("bits"), (int, float)):
        floating = lent["bits"] >= 16
        yield Stored("BF16" if floating else "borrowed", lent["weights"], int(lent["weights"] * lent["bits"] / 8), floating)


def _quantization(model: ModelDir) -> Mapping[str, Any]:
    inside = model.config.get("quantization_config")
    return inside if isinstance(inside, Mapping) else read_json(model.folder / "quantize_config.json")


def _words(quantization: Mapping[str, Any]) -> str:
    method = quantization.get("quant_method") or ("gptq" if quantization else "")
    group = quantization.get("group_size", quantization.get("q_group_size"))
    bits = quantization.get("bits", quantization.get("w_bit"))
    return ", ".join(str(part) for part in (method, bits and f"{bits} bits", group and f"group {group}") if part)


def _first(config: Mapping[str, Any], names: Iterable[str]) -> int:
    whole = (config[name] for name in names if isinstance(config.get(name), int) and not isinstance(config[name], bool))
    return next(whole, 0)


def _layers(config: Mapping[str, Any], size: Mapping[str, int]) -> tuple[LayerKV, ...]:
    heads, key, value = size["kv_heads"], size["head_dim"], size["head_dim"]
    if isinstance(config.get("kv_lora_rank"), int):         # latent attention: what is cached is the full keys and values
        heads, value = size["heads"], config.get("v_head_dim") or value
        key = (config.get("qk_nope_head_dim") or 0) + (config.get("qk_rope_head_dim") or 0) or key
    window = config.get("sliding_window")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        window = None
    types = config.get("layer_types") or ()
    sliding = [not types or types[min(i, len(types) - 1)] == "sliding_attention" for i in range(size["layers"])]
    return tuple(LayerKV(heads, key, value, window if slides else None) for slides in sliding)


# ---------------------------------------------------------------------------------------------- GGUF
def _from_gguf(model: ModelDir, file: GgufFile, disk: int) -> ModelFacts:
    stored = _gather(Stored(t.type, t.elements, t.bytes, t.type in FLOATS) for t in file.tensors.values())
    count, hidden = _whole(file, "block_count"), _whole(file, "embedding_length")
    heads = _whole(file, "attention.head_count")
    per_layer = file.get("attention.head_count_kv") or heads
    kv = [per_layer] * count if isinstance(per_layer, int) else [int(n) for n in per_layer][:count]
    key = _whole(file, "attention.key_length") or hidden // max(1, heads)
    value, window = _whole(file, "attention.value_length") or key, _whole(file, "attention.sliding_window") or None
    embedding = file.tensors.get("token_embd.weight")
    return ModelFacts(
        model.name, "GGUF", file.architecture, file.architecture, tuple(LayerKV(n, key, value, window) for n in kv), hidden,
        heads, max(kv, default=0), key, _whole(file, "feed_forward_length"), embedding.shape[0] if embedding else 0,
        file.parameters(),
        file.bits(), _whole(file, "context_length"), file.weight_type(), stored, disk)


def _whole(file: GgufFile, key: str) -> int:
    """A whole number of the metadata; of a list, one for each layer, the largest; 0 where it is not given."""
    value = file.get(key, 0)
    if isinstance(value, (int, float, bool, str)):
        return value if isinstance(value, int) and not isinstance(value, bool) else 0
    return max((int(n) for n in value), default=0)


# ---------------------------------------------------------------------------------------------- sums
def _gather(kinds: Iterable[Stored]) -> tuple[Stored, ...]:
    sums: dict[tuple[str, bool], tuple[int, int]] = {}
    for kind in kinds:
        elements, size = sums.get((kind.kind, kind.floating), (0, 0))
        sums[kind.kind, kind.floating] = elements + kind.elements, size + kind.bytes
    return tuple(sorted((Stored(kind, *both, floating) for (kind, floating), both in sums.items()), key=lambda s: -s.bytes))


def _bits(stored: Iterable[Stored]) -> float | None:
    elements = sum(kind.elements for kind in stored)
    return 8 * sum(kind.bytes for kind in stored) / elements if elements else None


def pages(tokens: int, page: int = 16) -> int:
    """Tokens rounded up to whole pages."""
    return ceil(tokens / page) * page
