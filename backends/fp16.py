"""Float checkpoints: a folder with config.json and *.safetensors in float32, float16 or bfloat16.

It claims folders whose config names no quantization. A folder with nothing but pickles is claimed as well, in order to
refuse it: no other backend must open them.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.base import Backend, Cancel, Claim, LocalOptions, Model, ModelDir, ProgressFn, UnsafeFile

BITS = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0, "float64": 64.0}
PICKLES = (".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Fp16Options(LocalOptions):
    """Nothing beyond what every local model has to choose."""


def claims(model: ModelDir) -> Claim | None:
    if not model.config or "quantization_config" in model.config or "quantize_config.json" in model.files:
        return None
    stored = str(model.config.get("dtype") or model.config.get("torch_dtype") or "").removeprefix("torch.")
    if any(model.ending(".safetensors")):
        kind = f"safetensors {stored}".strip()
        return Claim(50, "config.json and safetensors without quantization", kind, BITS.get(stored))
    pickles = [name for ending in PICKLES for name in model.ending(ending)]
    if pickles:
        raise UnsafeFile("The weights are there only as pickles, which can run code when opened.", files=", ".join(pickles[:4]))
    return None


def check(model: ModelDir, options: Fp16Options) -> None:
    from backends.engine.assemble import check_options
    check_options(model, options)


def load(model: ModelDir, options: Fp16Options, progress: ProgressFn, cancel: Cancel) -> Model:
    from backends.engine.assemble import assemble
    from backends.engine.text import TextCodec
    from backends.engine.weights import SafetensorsSource
    source = SafetensorsSource(model)
    text = TextCodec.from_folder(model.folder)
    return assemble(model, "fp16", claims(model).format, source, lambda: text, options, progress, cancel)


BACKEND = Backend("fp16", "FP16 / BF16 / FP32 (safetensors)",
                  ("torch", "safetensors", "tokenizers"), Fp16Options, claims, load, order=10, check=check)
