"""Tiny random models of the fused families, written as transformers writes them, and its logits as the reference."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZE = {"vocab_size": 199, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA3_ROPE = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
               "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}

FAMILIES = {
    "llama": ("llama", {}),
    "llama biased tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn mscale": ("llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16,
                                                               "truncate": False}}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}),
    "mistral window": ("mistral", {"sliding_window": 11}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3 biased": ("qwen3", {"attention_bias": True, "head_dim": 24}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 9, "query_pre_attn_scalar": 20,
                          "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": 9, "query_pre_attn_scalar": 24,
                               "rope_parameters": GEMMA3_ROPE}),
}


def write(folder: Path, name: str) -> Path:
    """A folder with the family's tiny model; weights far enough from their defaults that each of them matters."""
    kind, changes = FAMILIES[name]
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZE | changes)).float()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * (.3 if weight.ndim == 1 else 1.5 / weight.shape[1] ** .5))
            if "norm" in key and kind not in ("gemma", "gemma2", "gemma3_text"):
                weight += 1
    model.save_pretrained(folder)
    return folder


def reference(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def logits(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


def greedy(model, ids: list[int], count: int) -> list[int]:
    """The ``count`` ids that transformers adds greedily, past any end of text."""
    mask = torch.ones(1, len(ids), dtype=torch.long)
    made = model.generate(torch.tensor([ids]), attention_mask=mask, max_new_tokens=count, min_new_tokens=count,
                          do_sample=False, eos_token_id=None)
    return made[0, len(ids):].tolist()
