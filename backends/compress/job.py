"""A whole job: a model in, the folder of its variant out. Every finished layer is on disk, so that a stopped job goes on
there.

Knows the order of things. Whoever calls it gives a folder that nobody sees yet, and moves it into place when this returns.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends.base import Cancel, DiskFull, ModelDir, NotSupported, OutOfMemory, Progress, ProgressFn
from backends.compress import calibrate
from backends.compress.calibrate import Calibration
from backends.compress.gram import Gram
from backends.compress.layers import METHODS, Layer, quantize_layer
from backends.compress.origin import Origin, open_origin
from backends.compress.pack import awq_gemm, fits, from_awq_gemm, from_gptq_v1, gptq_v1
from backends.compress.skeleton import Skeleton, linears, matrix_of
from backends.compress.stream import MEMO_BYTES, Stream
from backends.compress.writer import (
    PARTS, Parts, file_rows, merge, model_config, quantization_config, write_json)
from backends.kernels import QWeight
from backends.memory import machine_memory
from backends.recipe import QuantizeOptions, check_group

PACK = {"gptq": gptq_v1, "awq": awq_gemm}
UNPACK = {"gptq": from_gptq_v1, "awq": from_awq_gemm}
FORMAT = 1                  # of the parts: another number, and old parts are not gone on with


@dataclass
class _Tally:
    """What the layers report, for configs and manifest."""

    errors: list[dict[str, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    blocks: list[list[str]] = field(default_factory=list)
    sequential: bool = True
    floats: list[str] = field(default_factory=list)


def run(model: ModelDir, options: QuantizeOptions, folder: Path, progress: ProgressFn, cancel: Cancel, *,
        text: Path | None = None, versions: Mapping[str, str] = {}) -> dict[str, Any]:
    """Write the variant of ``model`` into ``folder`` and return its manifest. ``text``: calibration file, None = the
    bundled one.

    Parts of an earlier run with the same model, settings and text are gone on with. Raises InvalidRequest (a group that
    does not
    fit, a text too short), NotSupported, Cancelled, and what reading the model raises."""
    began = time.monotonic()
    if options.threads:
        torch.set_num_threads(options.threads)
    progress(Progress("read", note=model.name))
    origin = open_origin(model)
    try:
        return _Job(origin, options, folder, progress, cancel, text, began).run(versions)
    finally:
        origin.source.close()


class _Job:
    def __init__(self, origin: Origin, options: QuantizeOptions, folder: Path, progress: ProgressFn, cancel: Cancel,
                 text: Path | None, began: float) -> None:
        self.origin, self.options, self.folder, self.progress, self.cancel = origin, options, folder, progress, cancel
        self.device = torch.device(device_of(options.device))
        self.skeleton = Skeleton(origin.source, self.device)
        if self.skeleton.missing():
            self.origin = origin.whole(progress, cancel)
            self.skeleton = Skeleton(self.origin.source, self.device)
        self._check_shapes()
        self.calibration = self._calibrate(text)
        self._check_room()
        self.skeleton.fill()
        self.precision = precision_of(options.precision, self.device)
        clear(folder)
        self.parts = Parts(folder, self._key(), began)
        self.method = METHODS[options.method](options)
        self.tally = _Tally()
        self.steps = len(self.skeleton.layers) + bool(options.head_bits)

    def run(self, versions: Mapping[str, str]) -> dict[str, Any]:
        stream = Stream(self.skeleton, self.calibration.windows, self.precision, self.cancel)
        self._report(0, "first pass")
        stream.begin()
        resumed = sum(self.parts.has(f"layer-{index:05d}") for index in range(len(self.skeleton.layers)))
        for index in range(len(self.skeleton.layers)):
            self._layer(stream, index)
            self._report(index + 1, f"layer {index + 1} of {len(self.skeleton.layers)}")
        if self.options.head_bits:
            self._head(stream)
            self._report(self.steps, "head")
        self._outside()
        return self._finish(versions, resumed)

    # ---- pieces
    def _layer(self, stream: Stream, index: int) -> None:
        name, path = f"layer-{index:05d}", self.skeleton.layer_path(index)
        if self.parts.has(name):
            tensors, facts = self.parts.load(name)
            self.skeleton.put(index, _dense(tensors, facts["quantized"], self.options))
            stream.advance(index)
        else:
            layer = quantize_layer(stream, index, self.options, self.method)
            tensors, facts = self._packed(layer, path)
            self.parts.save(name, tensors, facts)
        self.skeleton.drop(index)
        self.tally.errors.append(facts["errors"])
        self.tally.notes += [f"Layer {index}: {note}" for note in facts["notes"]]
        self.tally.blocks = facts["blocks"] if len(facts["blocks"]) > len(self.tally.blocks) else self.tally.blocks
        self.tally.sequential &= facts["sequential"]
        self.tally.floats += [f"{path}.{item}" for item in facts["floats"]]

    def _packed(self, layer: Layer, path: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        for name, weight in layer.weights.items():
            tensors |= {f"{path}.{name}.{leaf}": value for leaf, value in PACK[self.options.method](weight).items()}
        for name, value in layer.module.state_dict().items():
            owner = name.rpartition(".")[0]
            if owner not in layer.weights or not name.endswith(".weight"):
                tensors[f"{path}.{name}"] = _stored(value)
        facts = {"errors": layer.errors, "notes": layer.notes, "blocks": layer.blocks,
                 "quantized": [f"{path}.{name}" for name in layer.weights],
                 "sequential": all(weight.perm is None for weight in layer.weights.values()),
                 "floats": sorted(set(linears(layer.module)) - layer.weights.keys())}
        return tensors, facts

    def _head(self, stream: Stream) -> None:
        if self.parts.has("head"):
            self.tally.errors.append(self.parts.load("head")[1]["errors"])
            return
        name, weight = self.skeleton.path(self.skeleton.head), matrix_of(self.skeleton.head)
        gram = Gram(weight.shape[1], self.device)
        stream.head_inputs(gram.add)
        packed, error = self.method.head(weight, gram.finish())
        tensors = {f"{name}.{leaf}": value for leaf, value in PACK[self.options.method](packed).items()}
        bias = getattr(self.skeleton.head, "bias", None)
        if bias is not None:
            tensors[f"{name}.bias"] = _stored(bias)
        self.parts.save("head", tensors, {"errors": {name: error}})
        self.tally.sequential &= packed.perm is None
        self.tally.errors.append({name: error})

    def _outside(self) -> None:
        """Embeddings, final norm, the float head: everything that belongs to no layer."""
        head = self.skeleton.path(self.skeleton.head) if self.skeleton.head is not None else ""
        tensors = {}
        for name, value in self.skeleton.model.state_dict().items():
            is_head = bool(head) and name.startswith(head + ".")
            if name.startswith(self.skeleton.prefix + ".") or is_head and (self.options.head_bits or self.skeleton.tied):
                continue
            tensors[name] = _stored(value)
        self.parts.save("outside", tensors, {})

    def _finish(self, versions: Mapping[str, str], resumed: int) -> dict[str, Any]:
        names = ["outside", *(f"layer-{index:05d}" for index in range(len(self.skeleton.layers))),
                 *(["head"] if self.options.head_bits else [])]
        self._report(self.steps, "writing")
        merge([self.parts.path(name) for name in names], self.folder)
        quantization = quantization_config(self.options, self.tally.sequential, self.tally.floats, self.tally.blocks)
        source = dict(self.origin.source.config)
        source.setdefault("architectures", [type(self.skeleton.model).__name__])
        tied = self.skeleton.tied and not self.options.head_bits
        write_json(self.folder / "config.json", model_config(source, quantization, tied))
        if self.options.method == "gptq":
            write_json(self.folder / "quantize_config.json", quantization)
        self.origin.write_text(self.folder)
        self.cancel.raise_if_set("The job")
        manifest = self._manifest(versions, resumed)
        self.parts.remove()
        return manifest

    # ---- values
    def _manifest(self, versions: Mapping[str, str], resumed: int) -> dict[str, Any]:
        import transformers
        options, errors = self.options, [value for row in self.tally.errors for value in row.values()]
        return {
            "source": self.origin.model.name,
            "format": f"{options.method.upper()} {options.bits} bits, group {options.group}", "bits": options.bits,
            "method": options.method, "settings": options.public(), "parent": self.origin.parent(),
            "calibration": {"source": self.calibration.source, "sha256": self.calibration.sha256,
                            "windows": len(self.calibration.windows), "tokens": self.calibration.tokens},
            "versions": {**versions, "python": platform.python_version(), "torch": torch.__version__,
                         "transformers": transformers.__version__},
            "made": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": round(self.parts.worked()[0], 1),
            "resumed_layers": resumed,
            "device": str(self.device), "precision": self.precision,
            "relative_output_error": round(sum(errors) / max(len(errors), 1), 6),
            "notes": [*self.origin.notes, *self.tally.notes], "files": file_rows(self.folder)}

    def _check_shapes(self) -> None:
        shapes = [tuple(matrix_of(module).shape) for layer in self.skeleton.layers for module in linears(layer).values()]
        if not shapes:
            raise NotSupported(f"The layers of {type(self.skeleton.model).__name__} hold no plain matrices.")
        head = self.skeleton.head
        if self.options.head_bits:
            if head is None or matrix_of(head) is None or not fits(tuple(matrix_of(head).shape), self.options.bits):
                raise NotSupported("The output head of this model cannot be quantized.",
                                   remedy="Leave the head float (head bits 0).")
            shapes.append(tuple(matrix_of(head).shape))
        check_group(self.options.group, {shape[1] for shape in shapes})

    def _check_room(self) -> None:
        """OutOfMemory, DiskFull before anything is done."""
        outside, layers, largest = self.skeleton.sizes()
        hidden = self.calibration.tokens * self.skeleton.config.get_text_config(decoder=True).hidden_size
        need, free = 4 * (outside + 3 * largest + hidden) + MEMO_BYTES, _free(self.device)
        if need > free:
            raise OutOfMemory("There is not enough memory free for this job.", need_bytes=need, free_bytes=free,
                              device=self.device,
                              remedy="Unload a model, or ask for fewer or shorter calibration windows.")
        disk, room = 2 * (2 * outside + layers * (self.options.bits + 1) // 8), shutil.disk_usage(self.folder).free
        if disk > room:
            raise DiskFull("There is not enough room on the disk for this job.", need_bytes=disk, free_bytes=room)

    def _calibrate(self, text: Path | None) -> Calibration:
        words, name = calibrate.read_text(text)
        return calibrate.calibration(words, name, self.origin.text.encode, self.options.samples, self.options.sample_tokens)

    def _key(self) -> str:
        """What the parts depend on. Threads are not among it; the last bit may be, of which nobody can tell."""
        facts = {"format": FORMAT, "weights": self.origin.digest(), "options": self.options.public(),
                 "text": self.calibration.sha256,
                 "precision": self.precision, "torch": torch.__version__}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _report(self, done: int, note: str) -> None:
        self.cancel.raise_if_set("The job")
        self.progress(Progress("quantize", done, self.steps, note))


def clear(folder: Path) -> None:
    """What is left of something else, or of a job that stopped while writing; finished parts stay."""
    for item in folder.iterdir():
        if item.name == PARTS:
            continue
        if item.is_dir():
            shutil.rmtree(item)
        else:
            item.unlink()


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else machine_memory()[1]


def _stored(value: Tensor) -> Tensor:
    return value.to(torch.float16) if value.is_floating_point() else value


def _dense(tensors: Mapping[str, Tensor], quantized: list[str], options: QuantizeOptions) -> dict[str, Tensor]:
    """A part's tensors as the layer computes with them."""
    packed = {name: {leaf: tensors[f"{name}.{leaf}"] for leaf in ("qweight", "qzeros", "scales", "g_idx")
                     if f"{name}.{leaf}" in tensors}
              for name in quantized}
    inside = {f"{name}.{leaf}" for name, leaves in packed.items() for leaf in leaves}
    dense = {name: value for name, value in tensors.items() if name not in inside}
    for name, leaves in packed.items():
        weight: QWeight = UNPACK[options.method](leaves, options.bits, options.group)
        dense[f"{name}.weight"] = weight.dequantize()
    return dense


def device_of(asked: str) -> str:
    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def precision_of(asked: str, device: torch.device) -> str:
    """bfloat16 where it is faster: the passes only gather statistics, the rounding itself is done in float32."""
    if asked != "auto":
        return asked
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    fast = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bfloat16" if fast else "float32"
