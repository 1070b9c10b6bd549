"""How models get onto the generic path: float folders, quantized sources, refusals; and all the way to a generated text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from backends.base import BrokenFile, Cancel, ConfigConflict, LocalOptions, ModelDir, NotSupported, Request, Sampling
from backends.engine.arch import generic
from backends.kernels import QWeight
from backends.kernels.ref import RefOps
from backends.registry import load_model
from tests.tiny_models import CONTEXT, apart, decoder_of, ids, plain, run, tiny, vocab

FIXTURE = Path(__file__).parent / "fixtures" / "llama-fp16"


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small gain nothing from threads and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family, path, batch", [("gpt_oss", "generic", True), ("mamba", "generic-sequential", False)])
def test_a_folder_becomes_a_model_that_generates(tmp_path, family, path, batch):
    """Through the registry, the assembly and the engine, with the fixture's tokenizer."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURE / file, tmp_path)
    reference = tiny(family, vocab_size=512)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, context=CONTEXT, streams=2)
    try:
        info = model.info
        assert info.path == path and ("batch" in info.capabilities) == ("draft" in info.capabilities) == batch
        assert info.parameters == sum(p.numel() for p in reference.parameters()) and "transformers" in info.kernels
        prompt = list(model.tokenize("Hello world"))
        request = Request("Hello world", Sampling(max_tokens=6, ignore_eos=True))
        got = [token for event in model.generate(request, Cancel()) for token in event.ids]
        with torch.no_grad():
            for token in got:
                assert token == int(reference(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1].argmax())
                prompt.append(token)
        assert len(got) == 6
    finally:
        model.close()


def build(model, source=None, **options):
    options = LocalOptions(context=CONTEXT, **options)
    return generic.build_generic(model, source, RefOps(), options, vocab(), lambda _: None, Cancel())


@pytest.fixture
def folder(tmp_path):
    tiny("gpt_neox").save_pretrained(tmp_path)
    return tmp_path


def test_a_float_folder(folder):
    served = build(ModelDir.of(folder))
    prompt = ids(9, 14)
    assert apart(run(decoder_of(served), [prompt], [4])[0][0], plain(tiny("gpt_neox"), prompt)) <= 1e-4
    assert served.parameters == sum(p.numel() for p in tiny("gpt_neox").parameters())
    assert served.weights_bytes() == sum(p.numel() * 4 for p in tiny("gpt_neox").parameters())


def test_a_missing_tensor_is_named(folder):
    from safetensors.torch import load_file, save_file
    tensors = load_file(folder / "model.safetensors")
    gone = next(name for name in tensors if name.endswith("dense_h_to_4h.weight"))
    del tensors[gone]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenFile) as caught:
        build(ModelDir.of(folder))
    assert gone in str(caught.value)


def test_left_over_tensors_are_told(folder):
    from safetensors.torch import load_file, save_file
    tensors = {**load_file(folder / "model.safetensors"), "extra.weight": torch.zeros(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert any("extra.weight" in note for note in build(ModelDir.of(folder)).notes)


@pytest.mark.parametrize("config, word", [
    ({"model_type": "brand_new", "auto_map": {"AutoModelForCausalLM": "modeling.New"}}, "own code"),
    ({"model_type": "brand_new"}, "brand_new"), ({"model_type": "clip"}, "causal")])
def test_what_transformers_has_no_class_for_is_refused(folder, config, word):
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling.py").write_text("raise SystemExit('code of a checkpoint was run')")
    with pytest.raises(NotSupported, match=word):
        build(ModelDir.of(folder))


class Quantized:
    """A `WeightSource` over a module's tensors: every 2-D matrix of a linear layer in 4 bits, asymmetric, groups of 16."""

    def __init__(self, module, names: tuple[str, ...], file_names=lambda tensors: tensors) -> None:
        self.config = module.config.to_dict()
        self.config["quantization_config"] = {"bits": 4}
        self.tensors = file_names({k: v for k, v in module.state_dict().items()})
        self.packed = names

    def names(self):
        return self.tensors.keys()

    def tensor(self, name):
        return self.tensors[name]

    def linear(self, module):
        weight, bias = self.tensors[module + ".weight"], self.tensors.get(module + ".bias")
        return (self.quantize(weight) if module.endswith(self.packed) else weight), bias

    @staticmethod
    def quantize(weight) -> QWeight:
        grouped = weight.reshape(weight.shape[0], -1, 16)
        low, high = grouped.amin(-1), grouped.amax(-1)
        scale = (high - low) / 15
        codes = ((grouped - low[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.uint8)
        return QWeight(codes.reshape(weight.shape), scale, None, low, 4, 16)

    def close(self):
        pass


LINEAR = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "q_proj", "k_proj", "v_proj", "o_proj", "embed_out",
          "embed_in", "embed_tokens", "gate_proj", "up_proj", "down_proj")


@torch.no_grad()
def rounded(module, source):
    """The same module with its quantized matrices dequantized in place: what packed weights must equal."""
    for name, part in module.named_modules():
        if name.endswith(source.packed) and getattr(part, "weight", None) is not None:
            part.weight.copy_(Quantized.quantize(part.weight).dequantize())
    return module


@pytest.mark.parametrize("family, more", [
    ("gpt_neox", {}), ("granite", {"tie_word_embeddings": True}), ("falcon", {}), ("gpt2", {})])
def test_quantized_source_stays_packed(tmp_path, family, more):
    module = tiny(family, **more)
    source = Quantized(module, LINEAR)
    served = build(ModelDir(family, tmp_path / "file.gguf", ()), source)
    expected = plain(rounded(module, source), ids(9, 15))
    assert apart(run(decoder_of(served), [ids(9, 15)], [4])[0][0], expected) <= 1e-4
    if family != "gpt2":                                            # its matrices are named otherwise and stay float here
        assert served.weights_bytes() < 0.6 * sum(p.numel() * 4 for p in module.parameters())


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.fixture(scope="module")
def native():
    from backends.errors import MissingRequirement
    from backends.kernels import cpu
    try:
        return lambda: cpu.make("auto", 1)
    except MissingRequirement as error:
        pytest.skip(str(error))


def test_products_of_one_shape_do_not_share_their_memory(tmp_path, native):
    """q, k and v of OPT are [R, H] each, and the native target hands out one workspace for that shape."""
    module = tiny("opt")
    source = Quantized(module, ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"))
    served = generic.build_generic(ModelDir("opt", tmp_path / "file.gguf", ()), source, native(), LocalOptions(context=CONTEXT),
                                   vocab(), lambda _: None, Cancel())
    found = run(decoder_of(served), [ids(9, 17)], [4])[0][0]
    assert far(found, plain(rounded(module, source), ids(9, 17))) < 0.05


@pytest.mark.parametrize("family, tied", [("opt", True), ("gpt_neox", False), ("gpt2", True), ("mamba", True)])
def test_a_narrow_float_folder_is_held_once_in_its_own_type(tmp_path, native, family, tied):
    module = tiny(family, tie_word_embeddings=tied).to(torch.bfloat16)
    module.save_pretrained(tmp_path)
    served = generic.build_generic(ModelDir.of(tmp_path), None, native(), LocalOptions(context=CONTEXT), vocab(),
                                   lambda _: None, Cancel())
    count = sum(p.numel() for p in module.parameters())
    small = sum(p.numel() for p in module.parameters() if p.dim() == 1)
    assert served.parameters == count
    if family == "mamba":                                          # multiplies by its layers' weights itself
        assert any("by itself" in note for note in served.notes) and served.weights_bytes() == 4 * count
    else:
        assert served.kernels is None
        assert served.weights_bytes() <= 2 * count + 2 * small + 16 * 32 * 2 * 20      # blocks of 16 rows are filled up
    reference = module.float()
    decoder = decoder_of(served) if served.path == "generic" else served
    assert far(run(decoder, [ids(9, 18)], [4])[0][0], plain(reference, ids(9, 18))) < 0.03


def per_expert(tensors: dict) -> dict:
    """As checkpoints keep them: one matrix an expert."""
    out = {}
    for name, value in tensors.items():
        base, _, last = name.rpartition(".")
        if last == "gate_up_proj" and value.dim() == 3:
            for e, both in enumerate(value):
                gate, up = both.chunk(2)
                out[f"{base}.{e}.gate_proj.weight"], out[f"{base}.{e}.up_proj.weight"] = gate.contiguous(), up.contiguous()
        elif last == "down_proj" and value.dim() == 3:
            out |= {f"{base}.{e}.down_proj.weight": down for e, down in enumerate(value)}
        else:
            out[name] = value
    return out


def test_experts_of_a_source_are_gathered(tmp_path):
    module = tiny("qwen3_moe")
    source = Quantized(module, ("q_proj",), per_expert)
    served = build(ModelDir("moe", tmp_path / "file", ()), source)
    prompt = ids(9, 16)
    assert apart(run(decoder_of(served), [prompt], [4])[0][0], plain(rounded(module, source), prompt)) <= 1e-4
    assert any("experts of 2 layers" in note for note in served.notes)


def test_a_source_that_lacks_or_misshapes_a_tensor_is_refused(tmp_path):
    source = Quantized(tiny("gpt_neox"), ())
    whole = dict(source.tensors)
    del source.tensors["gpt_neox.final_layer_norm.weight"]
    with pytest.raises(BrokenFile, match="final_layer_norm"):
        build(ModelDir("x", tmp_path / "file", ()), source)
    source.tensors = {**whole, "gpt_neox.final_layer_norm.weight": torch.ones(7)}
    with pytest.raises(ConfigConflict, match="final_layer_norm"):
        build(ModelDir("x", tmp_path / "file", ()), source)
