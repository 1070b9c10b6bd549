"""The GGUF backend: one *.gguf file (or the parts of a split one) with its own codes, tokenizer and template.

Claims from the header alone. Knows how a model's file is found in a folder; everything about its content is elsewhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from backends.base import (
    Backend, BrokenFile, Cancel, Claim, LocalOptions, Model, ModelDir, Progress, ProgressFn, UnknownFormat)
from backends.gguf_file import SPLIT_NAME, GgufFile, read_model

if TYPE_CHECKING:
    from backends.engine.text import TextCodec

# Files that accompany a model and are none: image projectors, importance matrices, adapters, draft heads' vocabularies.
COMPANION = re.compile(r"(^|[-_.])(mmproj|imatrix|lora|vocab)([-_.]|$)", re.IGNORECASE)


def find(model: ModelDir) -> Path | None:
    """The file to open; None where there is none, or safetensors beside several. UnknownFormat: it is not clear which."""
    names = [name for name in model.ending(".gguf") if model.path.is_file() or not COMPANION.search(Path(name).stem)]
    firsts = [name for name in names if (match := SPLIT_NAME.match(Path(name).name)) is None or int(match["part"]) == 1]
    if len(firsts) == 1:
        return model.folder / firsts[0]
    if not firsts and names:
        raise BrokenFile(f"{model.name!r} has parts of a split GGUF model, but not the first.", files=", ".join(names[:4]))
    if firsts and not model.ending(".safetensors"):
        raise UnknownFormat(f"{model.name!r} has {len(firsts)} GGUF files.", files=", ".join(firsts[:8]),
                            remedy="Open one of the files, or keep one a folder.")
    return None


def format_of(file: GgufFile) -> str:
    return f"GGUF {file.weight_type()}"


def claims(model: ModelDir) -> Claim | None:
    """BrokenFile, UnsupportedTensor or UnknownFormat for a file that cannot be what its name says."""
    path = find(model)
    if path is None or model.path.is_dir() and model.ending(".safetensors"):
        return None
    file = read_model(path)
    bits = file.bits()
    return Claim(90, f"{path.name}, {file.architecture}", format_of(file), None if bits is None else round(bits, 2))


def check(model: ModelDir, options: LocalOptions) -> None:
    from backends.engine.assemble import check_options
    check_options(model, options)


def load(model: ModelDir, options: LocalOptions, progress: ProgressFn, cancel: Cancel) -> Model:
    from backends.engine.assemble import assemble
    from backends.engine.gguf_config import FAMILIES
    from backends.engine.gguf_foreign import ForeignGguf
    from backends.engine import gguf_text
    from backends.engine.gguf_weights import GgufWeights
    path = find(model)
    if path is None:
        raise UnknownFormat(f"{model.name!r} has no GGUF file, or several.", files=", ".join(model.ending(".gguf")[:8]))
    progress(Progress("read", note=path.name))
    file = read_model(path)
    source = GgufWeights(file) if file.architecture in FAMILIES else ForeignGguf(file)
    cancel.raise_if_set("The load")
    gguf_text.check(file)
    notes = [*source.notes]

    def text() -> TextCodec:
        codec, more = gguf_text.text_of(file)
        notes.extend(more)
        return codec

    return assemble(model, "gguf", format_of(file), source, text, options, progress, cancel, notes)


BACKEND = Backend("gguf", "GGUF", ("torch", "tokenizers", "jinja2"), LocalOptions, claims, load, order=40, check=check)
