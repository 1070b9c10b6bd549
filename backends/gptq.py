"""GPTQ checkpoints, by whatever tool wrote them, and compressed-tensors' pack-quantized ones. Claims are cheap."""

from __future__ import annotations

from dataclasses import replace

from backends.base import Backend, Cancel, Claim, LocalOptions, Model, ModelDir, ProgressFn, UnknownFormat
from backends.quant_config import Quantization, looks_packed, read_quantization

COMPRESSED = "compressed-tensors"


def format_of(quantization: Quantization) -> str:
    if quantization.method == COMPRESSED:
        return f"compressed-tensors {quantization.data.get('format', '')}".strip()
    return f"GPTQ {quantization.words()}" + (" act-order" if quantization.flag("act-order") else "")


def claims(model: ModelDir) -> Claim | None:
    """ConfigConflict where two files contradict each other; UnknownFormat for packed weights that nothing describes."""
    if not model.config:
        return None
    quantization = read_quantization(model)
    if quantization is None:
        if looks_packed(model):
            raise UnknownFormat(f"{model.name!r} holds packed weights, but no quantization metadata was found.",
                                looked_for="quantization_config in config.json, quantize_config.json, quant_config.json",
                                remedy="Fetch the checkpoint again, with its quantize_config.json.")
        return None
    if quantization.method not in ("gptq", COMPRESSED):
        return None
    bits = None if quantization.method == COMPRESSED else float(quantization.bits)
    return Claim(60, f"{quantization.method} in {' and '.join(quantization.files)}", format_of(quantization), bits)


def check(model: ModelDir, options: LocalOptions) -> None:
    from backends.engine.assemble import check_options
    check_options(model, options)


def load(model: ModelDir, options: LocalOptions, progress: ProgressFn, cancel: Cancel) -> Model:
    from backends.engine.assemble import assemble
    from backends.engine.compressed_weights import CompressedLayout
    from backends.engine.gptq_weights import GptqLayout
    from backends.engine.packed_files import PackedFiles
    from backends.engine.text import TextCodec
    quantization = read_quantization(model)
    if quantization is None or quantization.method not in ("gptq", COMPRESSED):
        raise UnknownFormat(f"{model.name!r} is no GPTQ checkpoint: no quantization metadata found.", model=model.name)
    # Whoever looks at the config later must see that this is no float checkpoint, wherever the settings came from.
    model = replace(model, config={**model.config, "quantization_config": dict(quantization.data)})
    source = PackedFiles(model, (CompressedLayout if quantization.method == COMPRESSED else GptqLayout)(quantization))
    text = TextCodec.from_folder(model.folder)
    return assemble(model, "gptq", format_of(quantization), source, lambda: text, options, progress, cancel, Notes(source))


class Notes:
    """The source's notes, read when the load is over and they are complete."""

    def __init__(self, source) -> None:
        self._source = source

    def __iter__(self):
        return iter(self._source.notes)


BACKEND = Backend("gptq", "GPTQ", ("torch", "safetensors", "tokenizers"), LocalOptions, claims, load, order=20, check=check)
