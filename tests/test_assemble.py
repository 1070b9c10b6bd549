"""A load from end to end: what the model says of itself, what it does, what stops it."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch

from backends.base import (
    Cancel, Cancelled, ConfigConflict, InvalidRequest, LocalOptions, MissingRequirement, ModelDir, NotSupported, Progress,
    Request, Sampling, Vocab, make_options)
from backends.engine.assemble import fit_vocab
from backends.fp16 import BACKEND
from backends.registry import Registry
from tests import tiny

FIXTURE = Path(__file__).parent / "fixtures" / "llama-fp16"


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load(folder: Path = FIXTURE, progress=lambda _: None, cancel: Cancel | None = None, **options):
    chosen = make_options(BACKEND.options, {"threads": 1} | options)
    return BACKEND.load(ModelDir.of(folder), chosen, progress, cancel or Cancel())


def text_of(model, prompt: str, count: int = 16) -> str:
    events = list(model.generate(Request(prompt, Sampling(max_tokens=count, ignore_eos=True)), Cancel()))
    assert events[-1].error is None and events[-1].last
    return "".join(event.text for event in events)


def test_what_a_loaded_model_says_of_itself() -> None:
    model = load(kernels="ref", dtype="float32", streams=3)
    info = model.info
    assert (info.name, info.backend, info.format, info.architecture) == (
        "llama-fp16", "fp16", "safetensors float16", "LlamaForCausalLM")
    assert (info.path, info.device, info.dtype, info.kv_type, info.lossless) == ("fused", "cpu", "float32", "float32", True)
    assert info.kernels.startswith("ref") and info.threads == 1 and info.streams == 3
    assert (info.context, info.trained_context, info.vocab_size) == (512, 512, 512)
    assert info.parameters == sum(p.numel() for p in tiny.reference(FIXTURE).parameters())
    assert info.weights_bytes == pytest.approx(info.parameters * 4, rel=.01) and info.bits == pytest.approx(32, rel=.01)
    assert info.kv_bytes_per_token == 3 * 2 * 64 * 2 * 4 and info.eos_ids == (1,)
    assert info.estimate.context == 512 and info.peak_bytes >= 0 and info.load_seconds > 0
    assert model.decoder.stats()["pages_total"] == 3 * 512 // 16
    assert {"batch", "prefix", "draft", "logprobs"} <= set(info.capabilities)
    model.close()


@pytest.mark.parametrize("kernels", ["ref", "aten"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_every_type_generates(kernels: str, dtype: str) -> None:
    """CK-21."""
    model = load(kernels=kernels, dtype=dtype)
    assert model.info.dtype == ({"ref": "float32", "aten": "bfloat16"}[kernels] if dtype == "auto" else dtype)
    assert text_of(model, "the cat sat on", 8)
    model.close()


def test_float32_is_the_text_of_transformers() -> None:
    model = load(kernels="ref", dtype="float32")
    ids = list(model.tokenize("the cat sat on the mat and then it"))
    events = list(model.generate(Request(tuple(ids), Sampling(max_tokens=16, ignore_eos=True)), Cancel()))
    assert [token for event in events for token in event.ids] == tiny.greedy(tiny.reference(FIXTURE), ids, 16)
    model.close()


def test_stored_as_float32_is_computed_as_float32(tmp_path: Path) -> None:
    tiny.write(tmp_path, "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURE / name, tmp_path / name)
    model = load(tmp_path)
    assert model.info.dtype == "float32" and model.info.kv_type == "float32"
    assert model.info.vocab_size == 199 and any("199" in note for note in model.info.notes)     # the tokenizer knows 512
    model.close()


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int8"])
def test_kv_types(kind: str) -> None:
    model = load(kernels="ref", kv_type=kind)
    assert model.info.kv_type == kind and text_of(model, "the cat", 4)
    model.close()


def test_a_kv_type_the_kernels_lack_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.kernels.ref import RefOps
    monkeypatch.setattr(RefOps, "kv_types", ("float32",))
    with pytest.raises(NotSupported, match="int8"):
        load(kernels="ref", kv_type="int8")


@pytest.mark.parametrize("name", [backend.name for backend in Registry.scan().backends if backend.local])
def test_every_local_backend_can_say_beforehand_what_its_load_would_refuse(monkeypatch, name: str) -> None:
    backend = Registry.scan().get(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = torch.get_num_threads()
    monkeypatch.setattr("backends.kernels.ref.RefOps.kv_types", ("float32",))
    good = {"device": "cpu", "kernels": "ref", "threads": before + 1}
    for wrong, kind, word in (({"device": "cuda"}, MissingRequirement, "cuda"), ({"kernels": "triton"}, InvalidRequest, "triton"),
                              ({"kv_type": "int8"}, NotSupported, "int8")):
        with pytest.raises(kind, match=word):
            backend.check(ModelDir.of(FIXTURE), make_options(backend.options, good | wrong))
    backend.check(ModelDir.of(FIXTURE), make_options(backend.options, good))
    assert torch.get_num_threads() == before


def test_context_as_asked() -> None:
    model = load(kernels="ref", context=100, streams=2)
    assert model.info.context == 100 and model.decoder.stats()["pages_total"] == 14
    model.close()
    longer = load(kernels="ref", context=1000)
    assert longer.info.context == 1000 and any("beyond" in note for note in longer.info.notes)
    longer.close()


def test_without_prefix_cache() -> None:
    model = load(kernels="ref", prefix_cache=False)
    assert "prefix" not in model.info.capabilities
    text_of(model, "the cat sat on the mat " * 8, 2)
    assert model.decoder.stats()["pages_cached"] == 0
    model.close()


def test_progress_rises_and_cancel_stops() -> None:
    seen: list[Progress] = []
    load(progress=seen.append, kernels="ref").close()
    done = [p.done for p in seen if p.stage == "read"]
    assert done == sorted(done) and done[-1] == seen[-1].total == 30 and any("down_proj" in p.note for p in seen)
    cancel = Cancel()

    def stop(p: Progress) -> None:
        if p.done >= 10:
            cancel.set()

    with pytest.raises(Cancelled):
        load(progress=stop, cancel=cancel, kernels="ref")


def test_tensors_without_a_place_are_named(tmp_path: Path) -> None:
    """CK-15 in floats: a tied model that ships a head of its own."""
    from safetensors.torch import load_file, save_file
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"model.odd.weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    model = load(tmp_path, kernels="ref")
    assert any("lm_head.weight" in note and "model.odd.weight" in note for note in model.info.notes)
    model.close()


def test_another_model_type_runs_on_the_generic_path(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
    torch.manual_seed(0)
    config = GPTNeoXConfig(vocab_size=512, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                           max_position_embeddings=128)
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURE / name, tmp_path / name)
    model = load(tmp_path, kernels="ref", dtype="float32")
    assert model.info.path == "generic" and any("gpt_neox" in note for note in model.info.notes)
    assert model.info.parameters == sum(p.numel() for p in tiny.reference(tmp_path).parameters())
    ids = list(model.tokenize("the cat sat"))
    events = list(model.generate(Request(tuple(ids), Sampling(max_tokens=8, ignore_eos=True)), Cancel()))
    assert [token for event in events for token in event.ids] == tiny.greedy(tiny.reference(tmp_path), ids, 8)
    model.close()


def test_a_tokenizer_of_another_model() -> None:
    with pytest.raises(ConfigConflict):
        fit_vocab(Vocab(1000, frozenset({900}), "x"), 500)
    fitted, notes = fit_vocab(Vocab(1000, frozenset({3, 900}), "x"), 500)
    assert fitted.size == 500 and fitted.eos_ids == {3} and len(notes) == 1
    assert fit_vocab(Vocab(300, frozenset({3}), "x"), 320) == (Vocab(300, frozenset({3}), "x"), ())


def test_a_closed_model_is_gone() -> None:
    """ME-01 within one process: nothing keeps the weights."""
    model = load(kernels="ref")
    text_of(model, "the cat", 2)
    alive = weakref.ref(model.decoder.arch)
    model.close()
    del model
    gc.collect()
    assert alive() is None


def test_options_are_strict() -> None:
    assert issubclass(BACKEND.options, LocalOptions)
    with pytest.raises(InvalidRequest, match="layers_on_gpu"):
        make_options(BACKEND.options, {"layers_on_gpu": 3})
