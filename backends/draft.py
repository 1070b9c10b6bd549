"""Drafts made here: layers of their own, embeddings, head and tokenizer borrowed from the model beside them that they were made from.

Claims folders whose config has ``gainz_draft``. Knows where the parent lies; what is borrowed, and whether it is still the
same, the engine's `DraftSource` knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.base import (
    Backend, BrokenFile, Cancel, Claim, DraftParent, LocalOptions, Model, ModelDir, ProgressFn)
from backends.quant_config import read_quantization

KEY = "gainz_draft"


def lent(model: ModelDir) -> Mapping[str, Any]:
    """What config.json says of the parent. BrokenFile where it is not what we write."""
    found = model.config.get(KEY)
    kinds = {"parent": str, "files": list, "digest": str, "borrows": Mapping}
    if not isinstance(found, Mapping) or not all(isinstance(found.get(key), kind) for key, kind in kinds.items()):
        raise BrokenFile(f"config.json of {model.name!r} does not say what it borrows.", file="config.json", key=KEY)
    name = found["parent"]
    if not name or any(sign in name for sign in "/\\\0") or name in {".", ".."}:
        raise BrokenFile(f"{name!r} in config.json is no model's name.", file="config.json", key=f"{KEY}.parent")
    return found


def parent_of(model: ModelDir) -> ModelDir:
    """The parent beside the draft, its weight files as long as they were. DraftParent."""
    said = lent(model)
    name, beside = said["parent"], model.folder.parent
    place = next((path for path in (beside / name, beside / f"{name}.gguf") if path.exists()), None)
    if place is None:
        raise DraftParent(f"{model.name!r} is a draft of {name!r}, which is not here: embeddings and head are that model's.",
                          parent=name, looked_in=beside.name)
    parent = ModelDir.of(place, name)
    for row in said["files"]:
        path = parent.folder / str(row["path"])
        size = path.stat().st_size if path.is_file() else None
        if size != row["size"]:
            raise DraftParent(f"{name!r} is not the model that {model.name!r} was made from: {row['path']} differs.", parent=name,
                              expected_bytes=row["size"], found_bytes=size)
    return parent


def claims(model: ModelDir) -> Claim | None:
    """BrokenFile, DraftParent."""
    if KEY not in model.config:
        return None
    parent = parent_of(model)
    bits = 4.0 if "quantization_config" in model.config else 16.0
    return Claim(95, f"{KEY} in config.json", f"draft of {parent.name}, {bits:g} bits", bits)


def check(model: ModelDir, options: LocalOptions) -> None:
    from backends.engine.assemble import check_options
    check_options(model, options)


def load(model: ModelDir, options: LocalOptions, progress: ProgressFn, cancel: Cancel) -> Model:
    from backends.engine.assemble import assemble
    from backends.engine.draft_weights import DraftSource, open_parent
    from backends.engine.gptq_weights import GptqLayout
    from backends.engine.packed_files import PackedFiles
    from backends.engine.weights import SafetensorsSource
    from backends.gguf import find
    said, parent, quantization = lent(model), parent_of(model), read_quantization(model)
    lender, text = open_parent(parent, find(parent))
    own = SafetensorsSource(model) if quantization is None else PackedFiles(model, GptqLayout(quantization))
    source = DraftSource(own, lender, _ids(model, said), said["digest"], parent.name)
    return assemble(model, "draft", claims(model).format, source, lambda: text, options, progress, cancel,
                    (f"Embeddings, head and tokenizer are those of {parent.name}.",))


def _ids(model: ModelDir, said: Mapping[str, Any]) -> list[int] | None:
    """The ids of the head's rows, rising; None: all of them."""
    if said.get("head_ids") is None:
        return None
    import json
    path, size = model.folder / "head_ids.json", model.config.get("vocab_size")
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BrokenFile("head_ids.json cannot be read.", file=path.name, reason=error) from error
    if not isinstance(ids, list) or not ids or not all(type(id) is int for id in ids) or ids != sorted(set(ids)) or \
            ids[0] < 0 or not isinstance(size, int) or ids[-1] >= size:
        raise BrokenFile("head_ids.json is no rising list of the model's ids.", file=path.name, entries=len(ids))
    return ids


BACKEND = Backend("draft", "Draft made here", ("torch", "safetensors", "tokenizers"), LocalOptions, claims, load, order=25,
                  check=check, helper=True)
