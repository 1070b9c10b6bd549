"""Packs whole numbers as GPTQ, AWQ and compressed-tensors do, bit by bit in Python's own integers; writes tiny checkpoints.

Slow and plain on purpose: it shares no code with what it tests.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)          # column of nibble 0, 1 … in a word of AWQ gemm


def words(values: list[int], bits: int, width: int = 32) -> list[int]:
    """A stream of numbers, lowest bits first, cut into signed words."""
    stream = sum(int(value) << bits * place for place, value in enumerate(values))
    count = -(-len(values) * bits // width)
    cut = [stream >> width * place & (1 << width) - 1 for place in range(count)]
    return [word - (1 << width) if word >> width - 1 else word for word in cut]


def packed_columns(values: Tensor, bits: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """[K, N] → [K·bits/width, N], packed down each column."""
    width = dtype.itemsize * 8
    return torch.tensor([words(column, bits, width) for column in values.T.tolist()], dtype=dtype).T.contiguous()


def packed_rows(values: Tensor, bits: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """[R, C] → [R, C·bits/width], packed along each row."""
    return packed_columns(values.T, bits, dtype).T.contiguous()


def awq_rows(values: Tensor) -> Tensor:
    """[R, C] → int32 [R, C/8], each eight neighbours in AWQ gemm's order."""
    eights = values.view(values.shape[0], -1, 8)[:, :, list(AWQ_NIBBLES)]
    return packed_rows(eights.reshape(values.shape), 4)


def gptq_layer(codes: Tensor, scale: Tensor, zero: Tensor, bits: int, index: Tensor | None = None, version: int = 1,
               dtype: torch.dtype = torch.int32) -> dict[str, Tensor]:
    """codes [N, K], scale and zero [N, G] in the order of the groups, index [K] → the tensors of a file."""
    groups = scale.shape[1]
    index = torch.arange(codes.shape[1]) // -(-codes.shape[1] // groups) if index is None else index
    stored = zero if version == 2 else (zero.long() - 1) % (1 << bits)
    return {"qweight": packed_columns(codes.T, bits, dtype), "qzeros": packed_rows(stored.T, bits, dtype),
            "scales": scale.T.contiguous().half(),
            "g_idx": index.int()}


def dense(codes: Tensor, scale: Tensor, zero: Tensor, index: Tensor) -> Tensor:
    """float32 [N, K] by the formula, column by column."""
    return (codes.float() - zero.float()[:, index]) * scale.half().float()[:, index]


def random_layer(outputs: int, inputs: int, bits: int, group: int, seed: int = 0, symmetric: bool = False):
    """codes, scale, zero of a layer, [N, K] and [N, G]."""
    generator = torch.Generator().manual_seed(seed)
    groups, top = -(-inputs // group), 1 << bits
    codes = torch.randint(0, top, (outputs, inputs), generator=generator)
    drawn = torch.randint(0, top, (outputs, groups), generator=generator)
    zero = torch.full_like(drawn, top // 2) if symmetric else drawn
    return codes, torch.rand(outputs, groups, generator=generator) * 0.1 / top + 0.001, zero


LAYERS = [f"{block}.{name}" for block, names in (("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
                                                 ("mlp", ("gate_proj", "up_proj", "down_proj")))
          for name in names]


def tiny_llama(**config) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 head_dim=16, vocab_size=512,
                 max_position_embeddings=256, pad_token_id=None, bos_token_id=0, eos_token_id=1)
    model = LlamaForCausalLM(LlamaConfig(**sizes | config)).eval()
    for value in model.parameters():
        if value.ndim == 2:
            value.data = torch.randn_like(value) * 0.2
    return model


def write(folder: Path, model: LlamaForCausalLM, layer, settings: dict | None, *, skip=(), extra: dict | None = None,
          file: str = "model.safetensors",
          settings_file: str = "config.json", tokenizer: Path | None = None) -> Path:
    """A checkpoint whose linear layers are what ``layer(name, shape)`` gives: (tensors of the file, dense weight). The
    model's own weights become the dense ones, so that it is the reference."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"
             or not model.config.tie_word_embeddings}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and not any(part in name for part in skip):
            tensors, weight = layer(name, tuple(module.weight.shape))
            module.weight.data = weight.float()
            del state[f"{name}.weight"]
            state |= {f"{name}.{part}": value for part, value in tensors.items()}
    save_file({name: value.contiguous() for name, value in (state | (extra or {})).items()}, folder / file, {"format": "pt"})
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    if settings is not None and settings_file == "config.json":
        config["quantization_config"] = settings
    elif settings is not None:
        (folder / settings_file).write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config, default=str))
    source = tokenizer or Path(__file__).parent / "fixtures" / "llama-fp16"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder
