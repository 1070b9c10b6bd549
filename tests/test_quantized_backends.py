"""GPTQ, AWQ and compressed-tensors from a folder to logits: tiny checkpoints with every oddity."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backends.base import ModelDir
from backends.errors import BrokenFile, ConfigConflict, UnknownFormat, UnsafeFile
from backends.registry import Registry, load_model
from tests.quant_maker import gptq_layer, dense, packed_rows, random_layer, tiny_llama, write
from tests.test_awq_weights import gemm, wanted
from tests.test_other_tools import REF, apart, rows

FIXTURES = Path(__file__).parent / "fixtures"


def loaded(path: Path, **options):
    model = load_model(path, **REF | options)
    return model


# ---------------------------------------------------------------------------------------------- tiny checkpoints
def gptq(bits=4, group=32, act_order=False, version=1):
    """A layer maker for `write`: random codes of any GPTQ kind."""
    def layer(name, shape):
        size = shape[1] if group == -1 else group
        codes, scale, zero = random_layer(*shape, bits, size, seed=len(name))
        index = torch.arange(shape[1]) // size
        if act_order:       # layers of one input share their order, as GPTQ makes it
            index = index[torch.randperm(shape[1], generator=torch.Generator().manual_seed(shape[1]))]
        return gptq_layer(codes, scale * 4, zero, bits, index, version), dense(codes, scale * 4, zero, index)
    return layer


def awq(name, shape):
    codes, scale, zero = random_layer(*shape, 4, 32, seed=len(name))
    return gemm(codes, scale * 4, zero), wanted(codes, scale * 4, zero, 32)


def settings(method="gptq", bits=4, group=32, **more) -> dict:
    own = {"sym": False} if method == "gptq" else {"version": "gemm", "zero_point": True}
    return {"quant_method": method, "bits": bits, "group_size": group} | own | more


IDS = [5, 300, 17, 44, 101, 7, 250, 33, 90, 91, 92, 400, 3, 18, 77, 130, 131, 132]


@torch.inference_mode()
def check(folder: Path, reference, ids=IDS, **options):
    model = loaded(folder, **options)
    assert apart(rows(model, ids), reference(torch.tensor([ids])).logits[0]) <= 1e-4
    info = model.info
    model.close()
    return info


@pytest.mark.parametrize("bits,group,act_order,version", [(2, 16, False, 1), (3, 32, False, 1), (4, 16, True, 1),
                                                          (4, -1, False, 2), (8, 32, True, 2), (3, 32, True, 2),
                                                          (4, -1, True, 1)])
def test_every_kind_of_gptq_runs(tmp_path, bits, group, act_order, version):
    model = tiny_llama()
    folder = write(tmp_path / "m", model, gptq(bits, group, act_order, version),
                   settings("gptq", bits, group, desc_act=act_order, checkpoint_format="gptq" if version == 1
                            else "gptq_v2"))
    info = check(folder, model)
    assert info.backend == "gptq" and info.path == "fused"


def test_ragged_groups_short_and_long_prompts(tmp_path):
    """CK-06: 208 inputs in groups of 32; one token and two hundred."""
    model = tiny_llama(hidden_size=208, num_attention_heads=4, head_dim=52, intermediate_size=96)
    folder = write(tmp_path / "m", model, gptq(4, 32), settings())
    check(folder, model, [7])
    check(folder, model, [(i * 37) % 500 for i in range(200)])


def test_settings_in_either_file_or_both(tmp_path):
    """CK-11."""
    for name, file in (("a", "config.json"), ("b", "quantize_config.json"), ("c", "config.json")):
        model = tiny_llama()
        folder = write(tmp_path / name, model, gptq(), settings(), settings_file=file)
        if name == "c":
            (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "desc_act": False}))
        check(folder, model)
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 8, "group_size": 32}))
    with pytest.raises(ConfigConflict, match=r"config.json and quantize_config.json differ in bits: 4 and 8"):
        load_model(folder, **REF)


def test_autoawqs_older_file(tmp_path):
    model = tiny_llama()
    folder = write(tmp_path / "m", model, awq, {"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True},
                   settings_file="quant_config.json")
    info = check(folder, model)
    assert info.backend == "awq" and info.format == "AWQ 4-bit g32 gemm"


@pytest.mark.parametrize("other", [{"group_size": 64}, {"desc_act": True}, {"sym": True}, {"quant_method": "awq"},
                                   {"checkpoint_format": "gptq_v2"}])
def test_every_setting_that_two_files_give_must_agree(tmp_path, other):
    folder = write(tmp_path / "m", tiny_llama(), gptq(), settings(desc_act=False, checkpoint_format="gptq"))
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4} | other))
    with pytest.raises(ConfigConflict, match="config.json and quantize_config.json differ"):
        Registry.scan().claim(ModelDir.of(folder))


@pytest.mark.parametrize("change,words", [({"bits": "four"}, "bits is no whole number"),
                                          ({"group_size": 3.5}, "group is no whole number"),
                                          ({"desc_act": "yes"}, "act-order is neither")])
def test_settings_of_the_wrong_kind_are_named(tmp_path, change, words):
    folder = write(tmp_path / "m", tiny_llama(), gptq(), settings() | change)
    with pytest.raises(BrokenFile, match=words):
        load_model(folder)


def test_no_settings_at_all(tmp_path):
    folder = write(tmp_path / "m", tiny_llama(), gptq(), None)
    with pytest.raises(UnknownFormat, match="no quantization metadata was found"):
        load_model(folder)


def test_any_file_name_and_shards(tmp_path):
    model = tiny_llama()
    folder = write(tmp_path / "m", model, gptq(), settings(), file="gptq_model-4bit-32g.safetensors")
    check(folder, model)
    tensors = load_file(folder / "gptq_model-4bit-32g.safetensors")
    names = sorted(tensors)
    (folder / "gptq_model-4bit-32g.safetensors").unlink()
    index = {}
    for part, chosen in ((1, names[::2]), (2, names[1::2])):                # a layer's tensors lie in both
        file = f"model-{part:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in chosen}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    check(folder, model)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BrokenFile, match="shards are missing"):
        load_model(folder)


@pytest.mark.parametrize("maker,method", [(gptq(), "gptq"), (awq, "awq")])
def test_skipped_modules_stay_float(tmp_path, maker, method):
    """CK-16: layer 0's mlp is float in the file; a name that matches nothing is a note."""
    model = tiny_llama()
    folder = write(tmp_path / "m", model, maker, settings(method, modules_to_not_convert=["layers.0.mlp", "vision_tower"]),
                   skip=("layers.0.mlp",))
    info = check(folder, model)
    assert any("vision_tower" in note for note in info.notes) and not any("layers.0.mlp" in note for note in info.notes)


def test_skipped_modules_give_equal_logits_on_every_kernel(tmp_path):
    model = tiny_llama()
    folder = write(tmp_path / "m", model, awq, settings("awq", modules_to_not_convert=["layers.0.mlp"]),
                   skip=("layers.0.mlp",))
    for kernels in ("ref", "aten"):
        other = load_model(folder, kernels=kernels, dtype="float32", context=64)
        with torch.inference_mode():
            assert apart(rows(other, IDS), model(torch.tensor([IDS])).logits[0]) < 2e-2, kernels
        other.close()


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantized_head(tmp_path, tied):
    """CK-15: beside a tied embedding it is not used, with a note; else it is the head."""
    model = tiny_llama(tie_word_embeddings=tied)
    codes, scale, zero = random_layer(512, 64, 8, 32)
    extra = {f"lm_head.{part}": value for part, value in gptq_layer(codes, scale, zero, 8, torch.arange(64) // 32).items()}
    folder = write(tmp_path / "m", model, gptq(8), settings(bits=8, lm_head=True), extra=extra)
    if not tied:
        tensors = load_file(folder / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        model.lm_head.weight.data = dense(codes, scale, zero, torch.arange(64) // 32)
    info = check(folder, model)
    assert any("tied to the embedding" in note for note in info.notes) == tied


def test_extra_biases_of_zeros_and_real_ones(tmp_path):
    """CK-18: AutoGPTQ writes zero biases; a bias of 3 is added once."""
    model = tiny_llama()
    zeros = {f"{name}.bias": torch.zeros(module.out_features)
             for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name != "lm_head"}
    check(write(tmp_path / "zeros", model, gptq(), settings(), extra=zeros), model)
    biased = tiny_llama(attention_bias=True)
    for layer in biased.model.layers:
        for kind in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(layer.self_attn, kind).bias.data.fill_(3.0)
    check(write(tmp_path / "three", biased, gptq(), settings()), biased)


def test_compressed_tensors_runs(tmp_path):
    def layer(name, shape):
        codes, scale, zero = random_layer(*shape, 4, 32, seed=len(name), symmetric=True)
        tensors = {"weight_packed": packed_rows(codes, 4), "weight_scale": (scale * 4).half(),
                   "weight_shape": torch.tensor(shape)}
        return tensors, wanted(codes, scale * 4, zero, 32)
    model = tiny_llama()
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    data = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}}}
    folder = write(tmp_path / "m", model, layer, data)
    assert check(folder, model).format == "compressed-tensors pack-quantized"


def test_other_families_go_the_generic_way(tmp_path):
    """A GPTQ checkpoint of an architecture without a fused decoder, its settings in quantize_config.json only."""
    from transformers import StableLmConfig, StableLmForCausalLM
    torch.manual_seed(0)
    model = StableLmForCausalLM(StableLmConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                               num_attention_heads=4, num_key_value_heads=4,
                                               vocab_size=512, max_position_embeddings=256)).eval()
    folder = write(tmp_path / "m", model, gptq(act_order=True), settings(desc_act=True),
                   settings_file="quantize_config.json")
    info = check(folder, model)
    assert info.path.startswith("generic") and info.backend == "gptq" and info.bits < 20


def test_pickles_are_never_opened(tmp_path):
    """CK-13."""
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "marker"), "w"))
    folder = write(tmp_path / "m", tiny_llama(), gptq(), settings())
    (folder / "model.safetensors").unlink()
    for content in (pickle.dumps({"x": Trap()}), pickle.dumps({"x": [1, 2]})):
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(UnsafeFile, match="pickle"):
            load_model(folder)
    assert not (tmp_path / "marker").exists()


def test_settings_without_packed_layers(tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(FIXTURES / "llama-fp16", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings()}))
    with pytest.raises(BrokenFile, match="qweight"):
        load_model(folder)


def test_unknown_methods_are_nobodys(tmp_path):
    folder = write(tmp_path / "m", tiny_llama(), gptq(), {"quant_method": "exotic", "bits": 4})
    with pytest.raises(UnknownFormat):
        load_model(folder)
