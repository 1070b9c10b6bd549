"""Safetensors folders, whole and broken: each fault is one typed error that names the file or the tensor."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from backends.base import BrokenFile, ConfigConflict, Cancel, ModelDir, UnknownFormat, UnsafeFile, UnsupportedTensor
from backends.engine import arch as archs
from backends.engine.weights import SafetensorsSource
from backends.fp16 import BACKEND
from backends.kernels.ref import RefOps
from tests import tiny

FIXTURE = Path(__file__).parent / "fixtures" / "llama-fp16"


def folder(path: Path, files: dict[str, dict[str, torch.Tensor]], index: dict | None = None) -> ModelDir:
    for name, tensors in files.items():
        save_file(tensors, path / name, {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if index is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return ModelDir.of(path)


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    a, b = torch.randn(2, 3), torch.randn(4).half()
    files = {"model-1.safetensors": {"model.a.weight": a}, "model-2.safetensors": {"model.a.bias": b}}
    index = {"model.a.weight": "model-1.safetensors", "model.a.bias": "model-2.safetensors"}
    source = SafetensorsSource(folder(tmp_path, files, index))
    weight, bias = source.linear("model.a")
    assert torch.equal(weight, a) and torch.equal(bias, b) and sorted(source.names()) == ["model.a.bias", "model.a.weight"]
    with pytest.raises(BrokenFile, match="model.b.weight"):
        source.linear("model.b")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    model = folder(tmp_path, {"model-1.safetensors": {"a": torch.ones(1)}},
                   index={"a": "model-1.safetensors", "b": "model-2.safetensors"})
    with pytest.raises(BrokenFile, match="model-2.safetensors"):
        SafetensorsSource(model)


def test_a_shard_that_lacks_what_the_index_says(tmp_path: Path) -> None:
    model = folder(tmp_path, {"model-1.safetensors": {"a": torch.ones(1)}},
                   index={"a": "model-1.safetensors", "b": "model-1.safetensors"})
    with pytest.raises(BrokenFile, match="model-1.safetensors"):
        SafetensorsSource(model)


def test_the_same_tensor_in_two_files_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(BrokenFile, match="two files"):
        SafetensorsSource(folder(tmp_path, {"x.safetensors": {"a": torch.ones(1)}, "y.safetensors": {"a": torch.ones(1)}}))


@pytest.mark.parametrize("share", [0, .0001, .1, .5, .99, .999999])
def test_a_cut_file(tmp_path: Path, share: float) -> None:
    whole = (FIXTURE / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:int(len(whole) * share)])
    with pytest.raises(BrokenFile, match="model.safetensors"):
        SafetensorsSource(ModelDir.of(tmp_path))


@pytest.mark.parametrize("content", [b"\xff" * 64,
                                     (1 << 62).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]",
                                     (20).to_bytes(8, "little") + b'{"a": {"dtype":"F32"', (1).to_bytes(8, "little") + b"{",
                                     (8).to_bytes(8, "little") + b'{"a": 1}', b"GGUF" + bytes(60)])
def test_a_damaged_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BrokenFile, match="model.safetensors"):
        SafetensorsSource(ModelDir.of(tmp_path))


def test_no_weights_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnknownFormat):
        SafetensorsSource(ModelDir.of(tmp_path))


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def test_a_pickle_is_refused_unopened(tmp_path: Path) -> None:
    """CK-13: refused by the claim, so that the catalog says why, and by the load; never opened, so that the marker never appears."""
    marker = tmp_path / "marker"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb(marker)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    model = ModelDir.of(tmp_path)
    with pytest.raises(UnsafeFile, match="pytorch_model.bin"):
        BACKEND.claims(model)
    with pytest.raises(UnsafeFile, match="pytorch_model.bin") as error:
        BACKEND.load(model, BACKEND.options(), lambda _: None, Cancel())
    assert "safetensors" in error.value.remedy and not marker.exists()


def test_claims() -> None:
    model = ModelDir.of(FIXTURE)
    claim = BACKEND.claims(model)
    assert claim.format == "safetensors float16" and claim.bits == 16
    quantized = ModelDir(model.name, model.path, model.files, dict(model.config)
                         | {"quantization_config": {"quant_method": "gptq"}})
    assert BACKEND.claims(quantized) is None
    assert BACKEND.claims(ModelDir("x", FIXTURE / "model.gguf", ("model.gguf",))) is None


def test_integers_are_no_weights(tmp_path: Path) -> None:
    source = SafetensorsSource(folder(tmp_path, {"model.safetensors": {"a.weight": torch.ones(2, dtype=torch.int32)}}))
    with pytest.raises(UnsupportedTensor, match="a.weight"):
        source.tensor("a.weight")
    assert source.raw("a.weight").dtype == torch.int32


def test_the_bare_stack_is_named_like_the_whole_model(tmp_path: Path) -> None:
    source = SafetensorsSource(
        folder(tmp_path, {"model.safetensors": {"embed_tokens.weight": torch.ones(2, 2), "norm.weight": torch.ones(2)}}))
    assert sorted(source.names()) == ["model.embed_tokens.weight", "model.norm.weight"]


def test_tensors_are_copies(tmp_path: Path) -> None:
    """A file that is replaced while its model is loaded must not change the weights."""
    source = SafetensorsSource(folder(tmp_path, {"model.safetensors": {"a.weight": torch.ones(4)}}))
    first = source.tensor("a.weight")
    first += 1
    assert torch.equal(source.tensor("a.weight"), torch.ones(4))


def build(model: ModelDir):
    return archs.build(SafetensorsSource(model), RefOps(), lambda _: None, Cancel())


@pytest.mark.parametrize(("change", "tensor"), [({"hidden_size": 64, "head_dim": 16}, "model.embed_tokens.weight"),
                                                ({"intermediate_size": 96}, "mlp.gate_proj"),
                                                ({"vocab_size": 300}, "model.embed_tokens.weight"),
                                                ({"num_key_value_heads": 4}, "self_attn.k_proj")])
def test_a_config_that_contradicts_the_weights(tmp_path: Path, change: dict, tensor: str) -> None:
    tiny.write(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigConflict, match=tensor):
        build(ModelDir.of(tmp_path))


def test_biases_that_the_config_asks_for(tmp_path: Path) -> None:
    tiny.write(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    with pytest.raises(BrokenFile, match="q_proj.bias"):
        build(ModelDir.of(tmp_path))


def test_a_config_without_sizes(tmp_path: Path) -> None:
    tiny.write(tmp_path, "llama")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(BrokenFile, match="lacks"):
        build(ModelDir.of(tmp_path))
