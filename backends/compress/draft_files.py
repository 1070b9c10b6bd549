"""The folder of a draft: layers alone, in the GPTQ format or as floats, or a whole model; config and manifest.

Knows file formats and what a person is to be told; nothing of how layers were chosen or trained.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends.base import Cancel
from backends.compress.join import JOIN, join_stream
from backends.compress.layers import METHODS, quantize_layer
from backends.compress.origin import Origin
from backends.compress.pack import gptq_v1
from backends.compress.prune import Choice
from backends.compress.skeleton import Skeleton, linears, matrix_of
from backends.compress.stream import Stream
from backends.compress.writer import Parts, file_rows, merge, model_config, quantization_config, write_json
from backends.draft_recipe import DraftOptions
from backends.engine import arch as archs
from backends.engine.draft_weights import EMBEDDINGS, HEAD, borrowed_digest, tied
from backends.engine.weights import WeightSource
from backends.kernels import QWeight
from backends.recipe import QuantizeOptions, fitting_groups

HEAD_IDS = "head_ids.json"


def must_be_whole(config: Mapping[str, Any]) -> str:
    """Why a draft of this model cannot borrow, or "": only the fused decoders read borrowed parts."""
    return archs.plan(config)[1]


def sentence(choice: Choice) -> str:
    """What leaving the layers out costs, for people, said before anything is made."""
    whole, less = choice.perplexities
    return (f"{len(choice.kept)} layers stay ({', '.join(map(str, choice.kept))}); without the others the perplexity on the "
            f"calibration text goes from {whole:.1f} to {less:.4g}")


def words_of(choice: Choice) -> dict[str, Any]:
    whole, less = choice.perplexities
    return {"kept": list(choice.kept), "method": choice.method, "perplexity_before": round(whole, 3),
            "perplexity_after": round(less, 3), "order": [[layer, round(value, 5)] for layer, value in choice.order]}


# ---------------------------------------------------------------------------------------------- weights
def write_whole(folder: Path, parts: Parts, origin: Origin, source: WeightSource, extra: Mapping[str, Any]) -> None:
    """A standard folder in float16, layer by layer."""
    skeleton = Skeleton(source, torch.device("cpu"))
    skeleton.fill()
    inside, head = skeleton.prefix + ".", skeleton.path(skeleton.head) + "." if skeleton.head is not None else "\0"
    outside = {name: value for name, value in skeleton.model.state_dict().items()
               if not name.startswith(inside) and not (skeleton.tied and name.startswith(head))}
    parts.save("outside", {name: _half(value) for name, value in outside.items()}, {})
    for index in range(len(skeleton.layers)):
        layer = skeleton.load(index)
        parts.save(f"whole-{index:05d}", {f"{skeleton.layer_path(index)}.{name}": _half(value)
                                          for name, value in layer.state_dict().items()}, {})
        skeleton.drop(index)
    merge([parts.path("outside"), *(parts.path(f"whole-{index:05d}") for index in range(len(skeleton.layers)))], folder)
    config = model_config({"architectures": [type(skeleton.model).__name__], **source.config}, {}, skeleton.tied)
    del config["quantization_config"]
    write_json(folder / "config.json", {**config, **extra})
    origin.write_text(folder)


def write_layers(folder: Path, parts: Parts, origin: Origin, source: WeightSource, head_ids: Sequence[int] | None,
                 options: DraftOptions, windows: Sequence[Sequence[int]], states: Sequence[Tensor], device: torch.device,
                 precision: str, cancel: Cancel) -> dict[str, Tensor]:
    """The layers and norms alone, for a draft that borrows the rest. Returns the values that the files hold, as the student
    names them. ``windows``: calibration of the rounding; ``states``: the teacher's at all their places, one [T, H] a window, for a
    draft that reads states (its ``source`` has J)."""
    skeleton = Skeleton(source, device)
    skeleton.fill()
    recipe = _recipe(skeleton)
    stream = Stream(skeleton, windows, precision, cancel)
    stream.begin()
    join = {JOIN: _half(source.tensor(JOIN))} if options.reads_states else {}
    if join:
        join_stream(stream, join[JOIN], states)
    dense, names = dict(join), []
    for index in range(len(skeleton.layers)):
        tensors, values = _rounded(stream, index, recipe) if options.bits == 4 else _floats(stream, index)
        parts.save(f"layer-{index:05d}", tensors, {})
        names.append(f"layer-{index:05d}")
        dense |= values
        skeleton.drop(index)
    lent = {f"{EMBEDDINGS}.weight", f"{HEAD}.weight"}
    outside = {name: _half(value) for name, value in skeleton.model.state_dict().items()
               if name not in lent and not name.startswith(skeleton.prefix + ".")}
    parts.save("outside", outside | join, {})
    merge([parts.path(name) for name in ("outside", *names)], folder)
    quantization = quantization_config(recipe, True, [], []) if options.bits == 4 else {}
    config = model_config({"architectures": [type(skeleton.model).__name__], **source.config}, quantization, skeleton.tied)
    if not quantization:
        del config["quantization_config"]
    config["gainz_draft"] = _lent(origin, head_ids) | ({"reads": options.reads} if options.reads_states else {})
    write_json(folder / "config.json", config)
    if head_ids is not None:
        (folder / HEAD_IDS).write_text(json.dumps(list(head_ids), separators=(",", ":")), encoding="utf-8")
    return dense


def _recipe(skeleton: Skeleton) -> QuantizeOptions:
    """4-bit GPTQ in groups of 64, or the next smaller size that divides every matrix."""
    widths = {matrix_of(module).shape[1] for layer in skeleton.layers for module in linears(layer).values()}
    group = max((group for group in fitting_groups(widths) if group <= 64), default=-1)
    return QuantizeOptions(method="gptq", bits=4, group=group)


def _rounded(stream: Stream, index: int, recipe: QuantizeOptions) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(tensors of the file, values that they mean) of one layer; the stream goes on behind it."""
    layer, path = quantize_layer(stream, index, recipe, METHODS["gptq"](recipe)), stream.skeleton.layer_path(index)
    tensors, values = {}, {}
    for name, weight in layer.weights.items():
        tensors |= {f"{path}.{name}.{leaf}": value for leaf, value in gptq_v1(weight).items()}
        values[f"{path}.{name}.weight"] = weight.dequantize()
    for name, value in layer.module.state_dict().items():
        if f"{path}.{name}" not in values:
            tensors[f"{path}.{name}"] = values[f"{path}.{name}"] = _half(value)
    return tensors, values


def _floats(stream: Stream, index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    layer, path = stream.skeleton.load(index), stream.skeleton.layer_path(index)
    tensors = {f"{path}.{name}": _half(value) for name, value in layer.state_dict().items()}
    return tensors, dict(tensors)


def _half(value: Tensor) -> Tensor:
    return value.to(torch.float16) if value.is_floating_point() else value


def _lent(origin: Origin, head_ids: Sequence[int] | None) -> dict[str, Any]:
    """What config.json says of the parent: by it the draft finds what it borrows, and knows it again."""
    weights = [origin.source.linear(module)[0] for module in ((EMBEDDINGS,) if tied(origin.source) else (EMBEDDINGS, HEAD))]
    rows = 0 if head_ids is None else len(head_ids) * weights[-1].shape[1]
    return {"parent": origin.model.name, "files": [{key: row[key] for key in ("path", "size")} for row in origin.parent()["files"]],
            "digest": borrowed_digest(origin.source), "head_ids": None if head_ids is None else HEAD_IDS,
            "borrows": {"weights": sum(weight.shape[0] * weight.shape[1] for weight in weights) + rows,
                        "bits": max(_bits(weight) for weight in weights)}}


def _bits(weight: QWeight | Tensor) -> float:
    return 16.0 if isinstance(weight, Tensor) else weight.bits + 16.0 / weight.group


# ---------------------------------------------------------------------------------------------- the manifest
def manifest(folder: Path, origin: Origin, options: DraftOptions, choice: Choice, versions: Mapping[str, str],
             facts: Mapping[str, Any]) -> dict[str, Any]:
    import transformers
    notes = [*origin.notes, sentence(choice) + ".", *facts.get("notes", ())]
    return {"source": origin.model.name, "method": "draft", "parent": origin.parent(), "settings": options.public(),
            "pruned": words_of(choice), **facts, "notes": notes,
            "versions": {**versions, "python": platform.python_version(), "torch": torch.__version__,
                         "transformers": transformers.__version__},
            "made": datetime.now(UTC).isoformat(timespec="seconds"), "files": file_rows(folder)}
