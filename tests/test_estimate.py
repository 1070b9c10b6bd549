"""Sizes from headers. Right values: by hand from the shapes, or counted in the file by another reader."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from backends.base import BrokenFile, LayerKV, LocalOptions, ModelDir, UnknownFormat
from backends.estimate import describe, estimate, token_bytes
from backends.facts import safetensors_header
from backends.memory import group_memory, machine_memory

FIXTURES = Path(__file__).parent / "fixtures"
FLOAT32 = LocalOptions(dtype="float32", device="cpu")


def tensors(path: Path, shapes: dict, dtype: str = "F16", width: int = 2) -> None:
    header, at = {}, 0
    for name, shape in shapes.items():
        size = width
        for side in shape:
            size *= side
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0" * at)


def folder(tmp_path: Path, config: dict, shapes: dict | None = None) -> ModelDir:
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors(tmp_path / "model.safetensors", shapes or {"w": [8, 8]})
    return ModelDir.of(tmp_path)


@pytest.mark.parametrize("name", ["llama-fp16", "qwen2-fp16"])
def test_facts_of_the_fixtures(name):
    safetensors = pytest.importorskip("safetensors")
    facts = describe(ModelDir.of(FIXTURES / name))
    with safetensors.safe_open(FIXTURES / name / "model.safetensors", "np") as file:
        count = sum(file.get_tensor(key).size for key in file.keys())
    assert facts.parameters == count and facts.bits == 16 and facts.trained_context == 512 and facts.vocab == 512
    assert facts.layers == (LayerKV(2, 64, 64),) * 3        # qwen2: its window is switched off


def test_by_hand():
    expected = estimate(ModelDir.of(FIXTURES / "llama-fp16"), LocalOptions(context=100, streams=2, dtype="float32"), free=1 << 30)
    assert expected.weights == 2_033_408 * 4
    assert expected.kv == 112 * 2 * (3 * 2 * (64 + 64) * 4)  # 100 tokens are 7 pages of 16
    assert expected.context == 100 and expected.fits and expected.largest_context == 512


@pytest.mark.parametrize(("kv_type", "size"), [("float32", 4 * 128), ("bfloat16", 2 * 128), ("int8", 128 + 16)])
def test_bytes_of_a_token(kv_type, size):
    assert token_bytes(describe(ModelDir.of(FIXTURES / "llama-fp16")), kv_type) == 3 * 2 * size


def test_what_does_not_fit_says_how_much_would():
    model, options = ModelDir.of(FIXTURES / "llama-fp16"), replace(FLOAT32, context=512, streams=1)
    whole = estimate(model, options, free=1 << 30)
    token = whole.kv // 512
    tight = estimate(model, options, free=whole.weights + whole.workspace + 400 * token)
    assert not tight.fits and tight.largest_context == 352  # 0.9 of 400 tokens, in whole pages
    assert estimate(model, replace(options, context=352), free=tight.free).fits
    none = estimate(model, options, free=whole.weights // 2)
    assert not none.fits and none.largest_context == 0


@pytest.mark.parametrize(("context", "streams", "tokens"), [(0, 1, 10_000), (0, 1, 400), (0, 8, 2000), (100, 8, 10_000), (100, 8, 300)])
def test_the_same_rule_as_the_engine_has_once_the_weights_are_there(context, streams, tokens):
    from backends.engine.room import plan_room
    model, options = ModelDir.of(FIXTURES / "llama-fp16"), replace(FLOAT32, context=context, streams=streams)
    facts, token = describe(model), 3 * 2 * 4 * 128
    before = estimate(model, options, free=1 << 30)
    found = estimate(model, options, free=before.weights + before.workspace + tokens * token)
    room = plan_room(facts.layers, "float32", context, facts.trained_context, streams, tokens * token)
    assert found.context == room.context and abs(found.kv - room.pages * 16 * token) < 16 * token


def test_packed_integers_count_their_weights_and_keep_their_bits(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}))
    tensors(tmp_path / "model.safetensors", {"a.qweight": [32, 64], "a.qzeros": [2, 8], "a.g_idx": [256]}, "I32", 4)
    facts = describe(ModelDir.of(tmp_path))
    assert facts.parameters == 256 * 64 and facts.quantization == "gptq, 4 bits, group 128"
    assert estimate(ModelDir.of(tmp_path), FLOAT32, free=1 << 30).weights == 4 * (32 * 64 + 16 + 256)


@pytest.mark.parametrize(("config", "layer"), [
    ({"n_layer": 2, "n_embd": 64, "n_head": 4}, LayerKV(4, 16, 16)),
    ({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "multi_query": True}, LayerKV(1, 16, 16)),
    ({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "sliding_window": 128}, LayerKV(2, 32, 32, 128)),
    ({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 12,
      "qk_rope_head_dim": 4, "v_head_dim": 10}, LayerKV(4, 16, 10)),
    ({"text_config": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}}, LayerKV(4, 16, 16))])
def test_names_that_families_give_to_the_same_size(tmp_path, config, layer):
    assert describe(folder(tmp_path, config)).layers == (layer, layer)


def test_windows_of_some_layers(tmp_path):
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "sliding_window": 8,
              "layer_types": ["sliding_attention", "full_attention"]}
    assert [layer.window for layer in describe(folder(tmp_path, config)).layers] == [8, None]


def test_a_model_that_says_nothing_of_its_layers_is_told_so(tmp_path):
    notes = estimate(folder(tmp_path, {}), FLOAT32, free=1 << 30).notes
    assert "not counted" in notes[0] and "assumed" in notes[1]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_a_cut_file_is_named(tmp_path, share):
    whole = (FIXTURES / "llama-fp16" / "model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole[:int(share * len(whole))])
    with pytest.raises(BrokenFile, match=r"model\.safetensors"):
        safetensors_header(path)


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"a": 1}', b'{"a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 3]}}',
                                    b'{"a": {"dtype": "F16", "shape": [-1], "data_offsets": [0, 2]}}'])
def test_a_header_that_cannot_be_is_refused(tmp_path, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    with pytest.raises(BrokenFile):
        safetensors_header(path)


def test_a_missing_shard_is_named(tmp_path):
    folder(tmp_path, {})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(BrokenFile, match="model-00002"):
        describe(ModelDir.of(tmp_path))


def test_neither_safetensors_nor_gguf(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(UnknownFormat):
        describe(ModelDir.of(tmp_path))


def test_the_control_groups_limit_bounds_what_is_free(tmp_path):
    for name, value in {"memory.max": str(1 << 30), "memory.current": str(700 << 20), "memory.stat": f"inactive_file {200 << 20}"}.items():
        (tmp_path / name).write_text(value)
    assert group_memory(tmp_path) == (1 << 30, (1024 - 500) << 20)
    (tmp_path / "memory.max").write_text("max")
    assert group_memory(tmp_path) is None
    total, available = machine_memory()
    assert 0 < available < total


def test_which_devices_torch_is_built_for_is_read_without_importing_it(monkeypatch, tmp_path):
    import torch
    from backends import memory
    assert memory.torch_is_for("cuda") == (torch.version.cuda is not None)
    assert memory.torch_is_for("hip") == (torch.version.hip is not None)
    (tmp_path / "version.py").write_text("__all__ = ['cuda']\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    monkeypatch.setattr(memory, "find_spec", lambda name: type("Spec", (), {"origin": str(tmp_path / "__init__.py")}))
    assert memory.torch_is_for("cuda") and not memory.torch_is_for("hip") and not memory.torch_is_for("xpu")
    monkeypatch.setattr(memory, "find_spec", lambda name: None)
    assert not memory.torch_is_for("cuda")


@pytest.mark.parametrize(("visible", "asked"), [(None, 0), ("2,0", 2), ("GPU-8f6a", "GPU-8f6a"), ("", None), ("-1", None)])
def test_the_gpu_counted_is_the_first_that_may_be_used(monkeypatch, visible, asked):
    import sys
    from types import SimpleNamespace
    from backends import memory
    handles = []
    library = SimpleNamespace(
        NVMLError=OSError, nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetHandleByIndex=handles.append,
        nvmlDeviceGetHandleByUUID=handles.append, nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=24, free=20))
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(memory, "find_spec", lambda name: library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert memory.gpu_memory() == (None if asked is None else (24, 20))
    assert handles == ([] if asked is None else [asked])
