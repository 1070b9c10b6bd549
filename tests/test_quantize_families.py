"""Our quantizers on models that are no Llama: special norms, biases, experts in one tensor, matrices kept the other way round."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from backends.kernels import QWeight
from tests.test_quantize import FIXTURES, IDS, logits, make, reader, relative

SHAPE = dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=None)
# what is special about them: weight + 1 in the norm; biases and ReLU; experts in one tensor, old tensor names
FAMILIES = {
    "gemma3_text": dict(head_dim=32), "opt": dict(ffn_dim=128, word_embed_proj_dim=64), "mixtral": dict(num_local_experts=4)}


def tiny(folder: Path, family: str, **more) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | more)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(FIXTURES / "llama-fp16" / name, folder)
    return folder


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_family_of_transformers_can_be_quantized(tmp_path, family, method):
    source = tiny(tmp_path / "float", family, **FAMILIES[family])
    folder, manifest = make(tmp_path, source, method=method, group=32, bits=4)
    assert relative(logits(folder, IDS), logits(source, IDS)) < 0.3
    assert any("Experts" in note for note in manifest["notes"]) == (family == "mixtral")


@pytest.mark.parametrize("choices", [{"method": "gptq"}, {"method": "gptq", "static_groups": False}, {"method": "awq"}],
                         ids=lambda c: "-".join(map(str, c.values())))
def test_gpt2_keeps_its_matrices_the_other_way_round(tmp_path, choices):
    """What is loaded equals transformers' own model with the file's floats and the dequantized matrices; all stay packed."""
    source = tiny(tmp_path / "float", "gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2)
    folder, _ = make(tmp_path, source, group=32, **choices)
    module, file = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), reader(folder)
    packed = 0
    for name, value in module.state_dict().items():
        weight = file.linear(name.removesuffix(".weight"))[0] if "h." in name and name.endswith(".weight") else None
        if isinstance(weight, QWeight):
            packed += 1
            value.copy_(weight.dequantize().T)
        elif name != "lm_head.weight":                  # tied
            value.copy_(file.tensor(name))
    assert packed == 8                                  # c_attn, c_proj, c_fc, c_proj of both layers
    with torch.inference_mode():
        expected = module.eval()(torch.tensor([IDS])).logits[0]
    assert relative(logits(folder, IDS), expected) < 1e-4
