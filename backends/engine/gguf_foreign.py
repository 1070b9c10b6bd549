"""GGUF architectures without a translation of our own, through transformers' GGUF reader: dequantized to floats.

The one place that knows that reader. The result is a `WeightSource` of float tensors for the generic path; what that costs
(the file's codes are not used, memory is that of a float model) is said in ``notes``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from backends.errors import BrokenFile, UnknownFormat, UnsupportedTensor
from backends.gguf_file import GgufFile


class ForeignGguf:
    """UnknownFormat naming an architecture that transformers does not read either, UnsupportedTensor for such a type."""

    def __init__(self, file: GgufFile) -> None:
        if len(file.parts) > 1:
            raise UnknownFormat(f"Split files of the architecture {file.architecture!r} are not read.", file=file.path.name,
                                remedy="Merge the parts into one file (llama-gguf-split --merge).")
        self._tensors, self.config = _read(file)
        self.notes = (f"The GGUF architecture {file.architecture!r} runs through transformers: its {file.weight_type()} "
                      f"codes were dequantized to floats.",)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise BrokenFile(f"The file has no tensor for {name}.", tensor=name)
        return self._tensors[name]

    def linear(self, module: str) -> tuple[Tensor, Tensor | None]:
        return self.tensor(f"{module}.weight"), self._tensors.get(f"{module}.bias")

    def close(self) -> None:
        self._tensors = {}


def _read(file: GgufFile) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES, load_gguf_checkpoint

    from backends.engine.hf_load import causal_config
    spelled = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
    if spelled.get(file.architecture, file.architecture) not in GGUF_SUPPORTED_ARCHITECTURES:
        raise UnknownFormat(f"The GGUF architecture {file.architecture!r} is not known, neither here nor to transformers.",
                            file=file.path.name, remedy="Use the safetensors folder of this model.")
    try:
        config = causal_config(load_gguf_checkpoint(str(file.path))["config"] | _ids(file))
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
        tensors = load_gguf_checkpoint(str(file.path), return_tensors=True, model_to_load=empty)["tensors"]
    except NotImplementedError as error:
        raise UnsupportedTensor(f"{file.path.name} holds a tensor of a type that is not read.", reason=error) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:      # what its reader is seen to raise on odd files
        raise BrokenFile(f"transformers cannot read {file.path.name}.",
                         reason=f"{type(error).__name__}: {str(error)[:200]}") from error
    return tensors, config.to_dict()


def _ids(file: GgufFile) -> dict[str, int | None]:
    """What the file says, where a config class would otherwise fill in the ids of another model."""
    return {f"{ours}_token_id": file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
            for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
