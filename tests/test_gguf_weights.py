"""GGUF weights: every block type against ggml's own reference, every family against the transformers model it came from."""

from __future__ import annotations

import copy

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from backends.engine.gguf_blocks import QUANTIZED, unpack
from backends.engine.gguf_config import llama3_factors
from backends.engine.gguf_weights import GgufWeights
from backends.errors import BrokenFile, NotSupported, UnknownFormat, UnsupportedTensor
from backends.gguf_file import TYPES as TABLE, read_model
from backends.kernels import QWeight
from tests.gguf_maker import GEMMA_NAMES, HF_NAMES, TYPES, base_metadata, random_blocks, to_gguf_tensors, write

BYTES = {name: width for name, _, width in TABLE.values()}
BITS = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q2_K": 2, "Q3_K": 3, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6}


@pytest.mark.parametrize("kind", sorted(QUANTIZED))
def test_any_block_dequantizes_to_what_ggml_says(kind):
    raw = random_blocks(kind, 9, 768, seed=3)
    weight = unpack(kind, raw, BYTES[kind])
    assert weight.bits == BITS[kind] and weight.shape == (9, 768) and int(weight.codes.max()) == 2 ** weight.bits - 1
    assert (weight.zero is None) != (weight.bias is None)
    np.testing.assert_array_equal(weight.dequantize().numpy(), gguf.dequantize(raw, TYPES[kind]))


# ---------------------------------------------------------------------------------------------- families
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             head_dim=32,
             vocab_size=80, max_position_embeddings=256, rms_norm_eps=1e-5)
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
WINDOW = dict(hidden_activation="gelu_pytorch_tanh", sliding_window=8, query_pre_attn_scalar=32, tie_word_embeddings=True)
# name: (architecture in the file, config of the transformers model, keys of llama.cpp's converter, how it lays tensors out)
FAMILIES = {
    "llama": ("llama", dict(model_type="llama", rope_theta=5e5), {"rope.freq_base": 5e5, "rope.dimension_count": 32},
              dict(paired=True)),
    "llama tied": ("llama", dict(model_type="llama", tie_word_embeddings=True), {}, dict(paired=True)),
    "llama biased": ("llama", dict(model_type="llama", attention_bias=True), {}, dict(paired=True)),
    "llama 3.2": ("llama", dict(model_type="llama", rope_theta=5e5, rope_scaling=LLAMA3), {"rope.freq_base": 5e5},
                  dict(paired=True)),
    "llama linear": ("llama", dict(model_type="llama", rope_scaling={"rope_type": "linear", "factor": 4.0}),
                     {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, dict(paired=True)),
    "llama yarn": ("llama", dict(model_type="llama", rope_scaling={"rope_type": "yarn", "factor": 4.0,
                                                                   "original_max_position_embeddings": 64}),
                   {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
                   dict(paired=True)),
    "mistral": ("llama", dict(model_type="mistral", sliding_window=8), {"attention.sliding_window": 8}, dict(paired=True)),
    "qwen2": ("qwen2", dict(model_type="qwen2", rope_theta=1e6), {"rope.freq_base": 1e6}, {}),
    "qwen3": ("qwen3", dict(model_type="qwen3", rope_theta=1e6, tie_word_embeddings=True), {"rope.freq_base": 1e6}, {}),
    "smollm3": ("smollm3", dict(model_type="smollm3", num_hidden_layers=4, rope_theta=2e6, use_sliding_window=False,
                                pad_token_id=0, bos_token_id=None, eos_token_id=None),
                {"rope.freq_base": 2e6}, dict(paired=True)),
    "gemma": ("gemma", dict(model_type="gemma", hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True), {},
              dict(offset=1.0)),
    "gemma2": ("gemma2", dict(model_type="gemma2", attn_logit_softcapping=20.0, final_logit_softcapping=10.0, **WINDOW),
               {"attention.sliding_window": 8, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
               dict(offset=1.0, names=GEMMA_NAMES)),
    "gemma3": ("gemma3", dict(model_type="gemma3_text", num_hidden_layers=7,
                              rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_theta=1e6,
                              rope_local_base_freq=10000.0, sliding_window_pattern=6, **WINDOW),
               {"attention.sliding_window": 8, "rope.freq_base": 1e6, "rope.scaling.type": "linear",
                "rope.scaling.factor": 8.0},
               dict(offset=1.0, names=GEMMA_NAMES)),
}


def model_of(config: dict):
    """A seeded transformers model whose norms and biases are not all alike."""
    torch.manual_seed(0)
    made = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(SIZES | config))       # it writes into nested dicts
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="eager").eval()
    for name, value in model.named_parameters():
        value.data = torch.randn_like(value) * 0.3 + (0.0 if "gemma" in config["model_type"] or "norm" not in name else 1.0)
    return model


def gguf_of(tmp_path, family, model, **more):
    architecture, _, keys, _ = FAMILIES[family]
    return write(tmp_path / "m.gguf", architecture, base_metadata(model.config, **keys) | more, tensors_of(family, model))


def tensors_of(family, model):
    """float32 arrays, with the factors that the converter writes for Llama 3.2's rotation."""
    tensors = to_gguf_tensors(model, **FAMILIES[family][3])
    if FAMILIES[family][1].get("rope_scaling") == LLAMA3:
        tensors["rope_freqs.weight"] = np.array(llama3_factors(LLAMA3, 5e5, 32), np.float32)
    return tensors


def rebuilt(source):
    """The transformers model that the source describes, filled with the source's tensors and no others."""
    config = CONFIG_MAPPING[source.config["model_type"]].from_dict(dict(source.config))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    missing, unexpected = model.load_state_dict({name: source.tensor(name) for name in source.names()}, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_names_tensors_and_config_give_the_models_logits(tmp_path, family):
    model = model_of(FAMILIES[family][1])
    source = GgufWeights(read_model(gguf_of(tmp_path, family, model)))
    again, ids = rebuilt(source), torch.randint(0, 80, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, found = model(ids).logits, again(ids).logits
    assert float((expected - found).norm() / expected.norm()) < 1e-5
    assert source.config["tie_word_embeddings"] == model.config.tie_word_embeddings
    for name, value in model.state_dict().items():
        if name in source.names():
            torch.testing.assert_close(source.tensor(name), value, rtol=0, atol=3e-7)       # 1 + w - 1 rounds for Gemma


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_matrices_come_out_in_the_order_of_transformers(tmp_path, family, kind):
    """llama.cpp quantizes after it interleaves q and k: undoing it must move whole rows of codes."""
    model = model_of(FAMILIES[family][1])
    architecture, _, keys, layout = FAMILIES[family]
    tensors = to_gguf_tensors(model, **layout)
    packed = {n: (gguf.quantize(v, TYPES[kind]), kind) if v.ndim == 2 else v for n, v in tensors.items()}
    source = GgufWeights(read_model(write(tmp_path / "m.gguf", architecture, base_metadata(model.config, **keys), packed)))
    state = model.state_dict()
    for module in ("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj", "model.layers.2.mlp.down_proj",
                   "model.embed_tokens"):
        weight, bias = source.linear(module)
        assert bias is None and isinstance(weight, QWeight) == kind.startswith("Q")
        dense = weight.dequantize() if isinstance(weight, QWeight) else weight.float()
        wanted = gguf.dequantize(gguf.quantize(state[f"{module}.weight"].numpy(), TYPES[kind]),
                                 TYPES[kind])    # rows are independent
        torch.testing.assert_close(dense, torch.from_numpy(wanted), rtol=0, atol=0)
        torch.testing.assert_close(source.tensor(f"{module}.weight").float(), torch.from_numpy(wanted), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_inside_a_model(tmp_path, kind):
    sizes = dict(hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64)
    model = model_of(FAMILIES["llama"][1] | sizes)
    tensors = {n: (random_blocks(kind, *v.shape, seed=len(n)), kind) if v.ndim == 2 else v
               for n, v in to_gguf_tensors(model, paired=True).items()}
    source = GgufWeights(read_model(write(tmp_path / "m.gguf", "llama", base_metadata(model.config), tensors)))
    raw = gguf.dequantize(tensors["blk.0.attn_q.weight"][0], TYPES[kind])
    wanted = raw.reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
    np.testing.assert_array_equal(source.tensor("model.layers.0.self_attn.q_proj.weight").numpy(), wanted)


def test_biases_of_q_and_k_move_with_their_rows(tmp_path):
    model = model_of(FAMILIES["llama biased"][1])
    source = GgufWeights(read_model(gguf_of(tmp_path, "llama biased", model)))
    for kind in ("q", "k", "v"):
        _, bias = source.linear(f"model.layers.0.self_attn.{kind}_proj")
        torch.testing.assert_close(bias, model.state_dict()[f"model.layers.0.self_attn.{kind}_proj.bias"], rtol=0, atol=0)


def test_llama3_factors_name_their_rule(tmp_path):
    source = GgufWeights(read_model(gguf_of(tmp_path, "llama 3.2", model_of(FAMILIES["llama 3.2"][1]))))
    assert source.config["rope_scaling"] == LLAMA3


def test_other_frequency_factors_are_kept_one_by_one(tmp_path):
    model = model_of(FAMILIES["llama"][1])
    factors = np.linspace(1, 3, 16, dtype=np.float32)
    tensors = to_gguf_tensors(model, paired=True) | {"rope_freqs.weight": factors}
    source = GgufWeights(read_model(write(tmp_path / "m.gguf", "llama",
                                          base_metadata(model.config, **{"rope.freq_base": 5e5}), tensors)))
    rotary = rebuilt(source).model.rotary_emb
    cos, sin = rotary(torch.zeros(1, 1, 1), torch.tensor([[1]]))
    wanted = 1 / (factors * 5e5 ** (np.arange(0, 32, 2) / 32))
    np.testing.assert_allclose(torch.atan2(sin, cos)[0, 0, :16].numpy(), wanted, rtol=1e-5)


# ---------------------------------------------------------------------------------------------- refusals
def broken(tmp_path, change, family="llama", **more):
    model = model_of(FAMILIES[family][1])
    tensors = to_gguf_tensors(model, **FAMILIES[family][3])
    change(tensors)
    return read_model(write(tmp_path / "m.gguf", FAMILIES[family][0], base_metadata(model.config) | more, tensors))


@pytest.mark.parametrize("kind,columns,width", [("IQ4_NL", 64, 18), ("TQ1_0", 256, 54), ("MXFP4", 64, 17),
                                                ("IQ2_XXS", 256, 66)])
def test_types_that_are_not_read_are_named_with_their_tensor(tmp_path, kind, columns, width):
    block = gguf.GGML_QUANT_SIZES[TYPES[kind]][0]
    raw = np.zeros((96, columns // block * width), np.uint8)
    with pytest.raises(UnsupportedTensor, match=f"blk.1.ffn_up.weight.*{kind}"):
        GgufWeights(broken(tmp_path, lambda t: t.update({"blk.1.ffn_up.weight": (raw, kind)})))


def test_a_missing_layer_tensor_is_named(tmp_path):
    with pytest.raises(BrokenFile, match="blk.2.ffn_down.weight"):
        GgufWeights(broken(tmp_path, lambda t: t.pop("blk.2.ffn_down.weight")))


def test_a_missing_gemma_norm_is_named(tmp_path):
    with pytest.raises(BrokenFile, match="blk.0.post_ffw_norm.weight"):
        GgufWeights(broken(tmp_path, lambda t: t.pop("blk.0.post_ffw_norm.weight"), "gemma2"))


def test_a_wrong_shape_is_named(tmp_path):
    with pytest.raises(BrokenFile, match="blk.0.attn_k.weight"):
        GgufWeights(broken(tmp_path, lambda t: t.update({"blk.0.attn_k.weight": np.zeros((32, 64), np.float32)})))


def test_a_tensor_without_a_place_is_named(tmp_path):
    with pytest.raises(UnsupportedTensor, match="ffn_gate_exps"):
        GgufWeights(broken(tmp_path, lambda t: t.update({"blk.0.ffn_gate_exps.weight": np.zeros((2, 96, 64), np.float32)})))


def test_a_layer_beyond_the_count_is_named(tmp_path):
    with pytest.raises(BrokenFile, match="blk.2.attn_k.weight|blk.2"):
        GgufWeights(broken(tmp_path, lambda t: None, block_count=2))


@pytest.mark.parametrize("key,value", [("logit_scale", 16.0), ("attention.scale", 0.5), ("attention.causal", False),
                                       ("rope.dimension_count", 16),
                                       ("rope.scaling.type", "ntk-by-parts")])
def test_arithmetic_that_is_not_translated_is_refused(tmp_path, key, value):
    more = {key: value} | ({"rope.scaling.factor": 2.0} if "scaling" in key else {})
    with pytest.raises(NotSupported):
        GgufWeights(broken(tmp_path, lambda t: None, **more))


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "attention.head_count",
                                 "attention.layer_norm_rms_epsilon"])
def test_a_key_that_must_be_there_is_named(tmp_path, key):
    model = model_of(FAMILIES["llama"][1])
    keys = base_metadata(model.config)
    del keys[key]
    with pytest.raises(BrokenFile, match=key):
        GgufWeights(read_model(write(tmp_path / "m.gguf", "llama", keys, to_gguf_tensors(model, paired=True))))


def test_unknown_keys_are_reported(tmp_path):
    source = GgufWeights(broken(tmp_path, lambda t: None, wobble=3))
    assert source.notes == ("The file's key llama.wobble is not used.",)


def test_an_unknown_architecture_is_named(tmp_path):
    with pytest.raises(UnknownFormat, match="'rwkv6'"):
        GgufWeights(read_model(write(tmp_path / "m.gguf", "rwkv6", {}, {"a": np.zeros(32, np.float32)})))


def test_a_file_that_shrinks_later_is_an_error_not_a_crash(tmp_path):
    path = gguf_of(tmp_path, "llama", model_of(FAMILIES["llama"][1]))
    source = GgufWeights(read_model(path))
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(BrokenFile, match="ended inside"):
        for name in source.names():
            source.tensor(name)


def test_layout_names_cover_the_block():
    assert set(HF_NAMES.values()) < set(GEMMA_NAMES.values())
