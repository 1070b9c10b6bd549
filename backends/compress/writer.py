"""A variant's folder: layer parts while the job runs, then one checkpoint that other programs load.

A part is a safetensors file of its own, complete once it has its name; the checkpoint is made of the parts' bytes, copied, so
that no more than a piece of it is ever in memory. Knows file formats; nothing of how weights were chosen.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from backends.compress.origin import sha256
from backends.recipe import QuantizeOptions

PARTS = ".parts"
SHARD_BYTES = 4 << 30
PIECE = 8 << 20
DIGITS = 5


class Parts:
    """Finished pieces of a job in ``folder/.parts``, and how long all its runs have worked. ``key``: what they depend on; parts
    of another key are removed. ``began``: of this run, by `time.monotonic`; None: now."""

    def __init__(self, folder: Path, key: str, began: float | None = None) -> None:
        self._began = time.monotonic() if began is None else began
        self.folder = folder / PARTS
        stamp = self.folder / "key"
        if self.folder.exists() and (not stamp.is_file() or stamp.read_text(encoding="utf-8") != key):
            shutil.rmtree(self.folder)
        self.folder.mkdir(exist_ok=True)
        stamp.write_text(key, encoding="utf-8")
        self._clock = self.folder / "worked.json"
        self._before = json.loads(self._clock.read_text(encoding="utf-8")) if self._clock.is_file() else [0.0, 0.0]

    def worked(self) -> tuple[float, float]:
        """Seconds by the clock, and of this machine's processor: this run's, and of those that were stopped up to their last
        part."""
        return self._before[0] + time.monotonic() - self._began, self._before[1] + time.process_time()

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def has(self, name: str) -> bool:
        return self.path(name).is_file()

    def save(self, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """``facts``: small JSON values kept with the part. Whole or not at all."""
        unfinished = self.path(name).with_suffix(".unfinished")
        save_file({key: value.contiguous().cpu() for key, value in tensors.items()}, unfinished,
                  metadata={"facts": json.dumps(facts)})
        os.replace(unfinished, self.path(name))
        unfinished.write_text(json.dumps(self.worked()), encoding="utf-8")
        os.replace(unfinished, self._clock)

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        with safe_open(str(self.path(name)), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["facts"])

    def facts(self, name: str) -> dict[str, Any]:
        """What `save` was given beside the tensors, which stay unread."""
        with safe_open(str(self.path(name)), framework="pt") as file:
            return json.loads(file.metadata()["facts"])

    def remove(self) -> None:
        shutil.rmtree(self.folder)


# ---------------------------------------------------------------------------------------------- one checkpoint
def merge(parts: Sequence[Path], folder: Path, limit: int = SHARD_BYTES) -> None:
    """model.safetensors, or numbered shards with an index where it would be larger than ``limit`` bytes."""
    shards = _shards(parts, limit)
    if len(shards) == 1:
        _write(folder / "model.safetensors", shards[0])
        return
    weight_map, total = {}, 0
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:0{DIGITS}d}-of-{len(shards):0{DIGITS}d}.safetensors"
        _write(folder / name, tensors)
        weight_map |= {key: name for key in tensors}
        total += sum(end - start for _, _, start, end in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(parts: Sequence[Path], limit: int) -> list[dict[str, tuple[Path, dict, int, int]]]:
    """Tensor name → (file, header entry, first byte, end), shard by shard."""
    shards: list[dict] = [{}]
    held = 0
    for path in parts:
        for name, (entry, start, end) in _entries(path).items():
            if held and held + end - start > limit:
                shards.append({})
                held = 0
            shards[-1][name] = (path, entry, start, end)
            held += end - start
    return shards


def _entries(path: Path) -> dict[str, tuple[dict, int, int]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    base = 8 + length
    found = {name: (entry, base + entry["data_offsets"][0], base + entry["data_offsets"][1])
             for name, entry in header.items() if name != "__metadata__"}
    return dict(sorted(found.items(), key=lambda item: item[1][1]))


def _write(target: Path, tensors: Mapping[str, tuple[Path, dict, int, int]]) -> None:
    # Wider types first: the parts keep each tensor aligned to its type, and so must the whole.
    ordered = sorted(tensors.items(), key=lambda item: -_width(item[1]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (_, entry, start, end) in ordered:
        header[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [offset, offset + end - start]}
        offset += end - start
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, (path, _, start, end) in ordered:
            _copy(path, start, end, out)
        out.flush()
        os.fsync(out.fileno())


def _width(place: tuple[Path, dict, int, int]) -> int:
    count = 1
    for size in place[1]["shape"]:
        count *= size
    return (place[3] - place[2]) // count if count else 0


def _copy(path: Path, start: int, end: int, out: Any) -> None:
    with path.open("rb") as file:
        file.seek(start)
        left = end - start
        while left:
            piece = file.read(min(left, PIECE))
            out.write(piece)
            left -= len(piece)


# ---------------------------------------------------------------------------------------------- configs and manifest
def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def quantization_config(options: QuantizeOptions, sequential: bool, floats: Sequence[str],
                        blocks: Sequence[Sequence[str]]) -> dict[str, Any]:
    """What the formats' own tools write. ``sequential``: columns of a group are neighbours (no act-order index needed);
    ``floats``: matrices of the layers that stayed float; ``blocks``: the quantized ones, by stage."""
    if options.method == "awq":
        skipped = [*floats, *([] if options.head_bits else ["lm_head"])]
        return {"quant_method": "awq", "version": "gemm", "bits": options.bits, "group_size": options.group,
                "zero_point": True,
                "modules_to_not_convert": skipped if floats else None}
    extra = {"modules_in_block_to_quantize": [list(block) for block in blocks]} if floats else {}
    return {"quant_method": "gptq", "checkpoint_format": "gptq", "bits": options.bits, "group_size": options.group,
            "desc_act": not sequential, "sym": options.sym, "static_groups": options.static_groups, "true_sequential": True,
            "damp_percent": options.damp, "lm_head": bool(options.head_bits), "model_name_or_path": None,
            "model_file_base_name": "model", **extra}


def model_config(config: Mapping[str, Any], quantization: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """config.json of the variant, in words that older and newer transformers both read."""
    out = {key: value for key, value in config.items() if not key.startswith("_")}
    out |= {"torch_dtype": "float16", "dtype": "float16", "tie_word_embeddings": tied,
            "quantization_config": dict(quantization)}
    rope = config.get("rope_parameters")
    # transformers 5 has moved it; others would take a default
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        out["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            out["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return out


def file_rows(folder: Path) -> list[dict[str, Any]]:
    """Path, size and SHA-256 of every file that belongs to the variant."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and PARTS not in path.parts
             and path.name != "manifest.json"]
    return [{"path": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "sha256": sha256(path)}
            for path in paths]
