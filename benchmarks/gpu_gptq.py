"""A GPTQ checkpoint of the 1B shape with random weights, written to a temporary folder and loaded by GPTQModel."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from backends.compress.pack import gptq_v1
from benchmarks.gpu_models import SHAPES, Format, RandomSource

PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
         "mlp.down_proj")


def write(folder: Path, shape: str, device: torch.device) -> None:
    config = dict(SHAPES[shape])
    source, tensors = RandomSource(config, Format("", 4), device, torch.float16), {}
    floats = lambda name: source.linear(name)[0].cpu()  # noqa: E731
    tensors["model.embed_tokens.weight"] = floats("model.embed_tokens")
    tensors["model.norm.weight"] = torch.ones(config["hidden_size"], dtype=torch.float16)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = torch.ones(config["hidden_size"], dtype=torch.float16)
        for part in PARTS:
            packed = gptq_v1(source.linear(f"{at}.{part}")[0])
            tensors |= {f"{at}.{part}.{key}": value.contiguous() for key, value in packed.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(quantization))


def load(shape: str = "1B") -> Any:
    from gptqmodel import GPTQModel
    with tempfile.TemporaryDirectory(prefix="gainz-gptq-") as folder:
        write(Path(folder), shape, torch.device("cuda"))
        return GPTQModel.load(folder, device="cuda:0")
