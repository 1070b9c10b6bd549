"""AWQ checkpoints: gemm, gemv and gemv_fast, by AutoAWQ or GPTQModel. Claims from names and small JSON."""

from __future__ import annotations

from dataclasses import replace

from backends.base import Backend, Cancel, Claim, LocalOptions, Model, ModelDir, ProgressFn, UnknownFormat
from backends.quant_config import Quantization, read_quantization


def format_of(quantization: Quantization) -> str:
    return f"AWQ {quantization.words()} {quantization.layout or 'gemm'}"


def claims(model: ModelDir) -> Claim | None:
    """ConfigConflict where two files contradict each other."""
    quantization = read_quantization(model) if model.config else None
    if quantization is None or quantization.method != "awq":
        return None
    return Claim(60, f"awq in {' and '.join(quantization.files)}", format_of(quantization), float(quantization.bits))


def check(model: ModelDir, options: LocalOptions) -> None:
    from backends.engine.assemble import check_options
    check_options(model, options)


def load(model: ModelDir, options: LocalOptions, progress: ProgressFn, cancel: Cancel) -> Model:
    from backends.engine.assemble import assemble
    from backends.engine.awq_weights import AwqLayout
    from backends.engine.packed_files import PackedFiles
    from backends.engine.text import TextCodec
    quantization = read_quantization(model)
    if quantization is None or quantization.method != "awq":
        raise UnknownFormat(f"{model.name!r} is no AWQ checkpoint: no quantization metadata found.", model=model.name)
    # Whoever looks at the config later must see that this is no float checkpoint, wherever the settings came from.
    model = replace(model, config={**model.config, "quantization_config": dict(quantization.data)})
    source = PackedFiles(model, AwqLayout(quantization))
    text = TextCodec.from_folder(model.folder)
    return assemble(model, "awq", format_of(quantization), source, lambda: text, options, progress, cancel, source.notes)


BACKEND = Backend("awq", "AWQ", ("torch", "safetensors", "tokenizers"), LocalOptions, claims, load, order=30, check=check)
