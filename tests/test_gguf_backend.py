"""The GGUF backend from a path to logits and text, against transformers on the weights that ggml's reference dequantizes."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from backends import gguf as backend
from backends.base import Cancel, Cancelled, LocalOptions, Message, ModelDir, Request, Sampling, Step
from backends.errors import BrokenFile, LoadError, UnknownFormat, UnsupportedTensor
from backends.registry import Registry, load_model
from tests.gguf_maker import TYPES, base_metadata, byte_vocabulary, random_blocks, to_gguf_tensors, write
from tests.test_gguf_weights import FAMILIES, SIZES, model_of, tensors_of

VOCABULARY = byte_vocabulary(320)
TEMPLATE = {"tokenizer.chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"}
WIDE = dict(hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64,
            vocab_size=320)     # whole K-quant rows
REF = dict(kernels="ref", dtype="float32", context=128)


def made(tmp_path: Path, family: str, kind: str = "F32", name: str = "m.gguf", **config):
    """A file of a tiny model, and the transformers model that computes with the very weights in it."""
    architecture, base, keys, layout = FAMILIES[family]
    model = model_of(base | dict(vocab_size=320) | config)
    tensors, keys = tensors_of(family, model), {k: v for k, v in keys.items() if k != "rope.dimension_count"}
    if kind != "F32":
        tensors = {n: packed(v, kind, len(n)) if v.ndim == 2 else v for n, v in tensors.items()}
        replace_matrices(model, tensors, layout.get("paired", False))
    return write(tmp_path / name, architecture, base_metadata(model.config, **keys) | VOCABULARY | TEMPLATE, tensors), model


def packed(value: np.ndarray, kind: str, seed: int):
    """K-quants have no quantizer in Python: any bits will do, of a size that keeps the model sane."""
    return (random_blocks(kind, *value.shape, seed=seed, size=2e-4), kind) if "K" in kind else (gguf.quantize(value,
        TYPES[kind]), kind)


def replace_matrices(model, tensors, paired: bool) -> None:
    """The model's matrices become what ggml's reference reads from the file, un-interleaved by hand."""
    from tests.gguf_maker import HF_NAMES
    back, state = {v: k for k, v in HF_NAMES.items()}, model.state_dict()
    for name, value in tensors.items():
        if not isinstance(value, tuple):
            continue
        dense = gguf.dequantize(value[0], TYPES[value[1]])
        parts = name.split(".")
        key = {"token_embd": "model.embed_tokens.weight", "output": "lm_head.weight"}.get(parts[0])
        if key is None:
            key = f"model.layers.{parts[1]}.{back[parts[2]]}.weight"
            heads = {"attn_q": model.config.num_attention_heads,
                     "attn_k": model.config.num_key_value_heads}.get(parts[2]) if paired else None
            if heads:
                dense = dense.reshape(heads, -1, 2, dense.shape[1]).swapaxes(1, 2).reshape(dense.shape)
        state[key].copy_(torch.from_numpy(np.ascontiguousarray(dense)))


def rows(decoder, ids: list[int], chunk: int = 1000) -> torch.Tensor:
    """Logits of every row, fed ``chunk`` tokens at a time."""
    slot, out = decoder.open(ids, reuse=False), []
    for start in range(0, len(ids), chunk):
        part = ids[start:start + chunk]
        assert decoder.reserve(slot, len(part))
        out.append(decoder.extend([Step(slot, part, len(part))])[0].clone())
    decoder.release(slot)
    return torch.cat(out)


@torch.inference_mode()
def check(model, reference, lengths=(1, 3, 15, 16, 17, 70)) -> None:
    for length in lengths:
        ids = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(length))
        expected = reference(ids).logits[0].float()
        found = rows(model.decoder, ids[0].tolist())
        assert float((found - expected[:, :found.shape[1]]).norm() / expected.norm()) <= 1e-4, length


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_transformers_logits(tmp_path, family):
    path, reference = made(tmp_path, family)
    model = load_model(path, **REF)
    check(model, reference)
    assert model.info.path == "fused" and model.info.format == "GGUF F32" and model.info.chat_template
    model.close()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
                                  "Q6_K"])
def test_every_type_gives_the_logits_of_its_dequantized_weights(tmp_path, kind):
    path, reference = made(tmp_path, "llama", kind, **WIDE)
    model = load_model(path, **REF)
    check(model, reference, (1, 17, 40))
    assert model.info.format == f"GGUF {kind}" and model.info.vocab_size == 259
    model.close()


def test_the_codes_stay_packed(tmp_path):
    """Four bits stay four bits: what is loaded is no larger than what is stored, but for the scales' type."""
    sizes = WIDE | dict(hidden_size=512, intermediate_size=1024, head_dim=128)
    path, _ = made(tmp_path, "llama", "Q4_1", **sizes)
    model = load_model(path, **REF)
    assert model.info.bits < 6.5 and model.info.weights_bytes < 1.3 * path.stat().st_size
    model.close()


def test_a_tied_head_is_the_embedding(tmp_path):
    """CK-23: no output.weight in the file."""
    path, reference = made(tmp_path, "llama tied", "Q8_0")
    assert "output.weight" not in {t.name for t in gguf.GGUFReader(path).tensors}
    model = load_model(path, **REF)
    check(model, reference, (1, 17))
    model.close()


def test_text_from_a_chat(tmp_path):
    path, reference = made(tmp_path, "qwen2")
    model = load_model(path, **REF)
    ids = list(model.tokenize((Message("user", "hé"),)))
    assert model.detokenize(ids) == "user: hé\n"
    events = list(model.generate(Request((Message("user", "hé"),), Sampling(max_tokens=8, ignore_eos=True)), Cancel()))
    tokens = [id for event in events for id in event.ids]
    assert len(tokens) == 8 and events[-1].last and events[-1].error is None
    model.close()


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "float32"])
def test_any_compute_type_runs_or_is_refused_by_name(tmp_path, dtype):
    path, reference = made(tmp_path, "qwen3", "Q8_0")
    model = load_model(path, kernels="ref", dtype=dtype, context=64)
    ids = list(range(40, 60))
    with torch.inference_mode():
        wanted = reference(torch.tensor([ids])).logits[0, :, :259].softmax(-1)
    assert float((rows(model.decoder, ids).softmax(-1) - wanted).abs().max()) < 0.05
    model.close()


# ---------------------------------------------------------------------------------------------- other architectures
def foreign(tmp_path, architecture: str, config: dict, keys: dict):
    torch.manual_seed(0)
    made_config = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    model = AutoModelForCausalLM.from_config(made_config, dtype=torch.float32).eval()
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[architecture],
                                     made_config.num_hidden_layers)
    tensors = {}
    for name, value in model.state_dict().items():
        stem, ending = name.rsplit(".", 1)
        if name != "lm_head.weight" or not made_config.tie_word_embeddings:
            tensors[f"{names.get_name(stem)}.{ending}"] = value.contiguous().numpy()
    return write(tmp_path / "f.gguf", architecture, keys | VOCABULARY, tensors), model


FOREIGN = {
    "starcoder2": (dict(model_type="starcoder2", hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                        num_attention_heads=4,
                        num_key_value_heads=2, vocab_size=320, max_position_embeddings=128, tie_word_embeddings=True),
                   {"attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 10000.0}),
    "phi3": (dict(model_type="phi3", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2,
                  vocab_size=320, max_position_embeddings=128, pad_token_id=0, tie_word_embeddings=False,
                  sliding_window=None),
             {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0, "rope.dimension_count": 16})}


@pytest.mark.parametrize("architecture", FOREIGN)
def test_other_architectures_run_through_transformers_and_say_so(tmp_path, architecture):
    config, keys = FOREIGN[architecture]
    keys = {"context_length": 128, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96,
            "attention.head_count": 4,
            "attention.head_count_kv": 2} | keys
    path, reference = foreign(tmp_path, architecture, config, keys)
    model = load_model(path, **REF)
    check(model, reference, (1, 17, 40))
    assert model.info.path.startswith("generic") and any("dequantized" in note for note in model.info.notes)
    model.close()


def test_an_architecture_that_nobody_knows_is_named(tmp_path):
    path = write(tmp_path / "m.gguf", "martian", VOCABULARY, {"a": np.zeros(32, np.float32)})
    with pytest.raises(UnknownFormat, match="'martian'"):
        load_model(path)


# ---------------------------------------------------------------------------------------------- claims and refusals
def test_a_file_and_a_folder_are_claimed_with_their_type(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    path, _ = made(folder, "llama", "Q4_1")
    for place in (path, folder):
        chosen, claim = Registry.scan().claim(ModelDir.of(place))
        assert (chosen.name, claim.format) == ("gguf", "GGUF Q4_1") and 5 < claim.bits < 8
    (folder / "mmproj-model-f16.gguf").write_bytes(b"GGUF")
    assert backend.claims(ModelDir.of(folder)).format == "GGUF Q4_1"


def test_two_files_in_a_folder_are_both_named(tmp_path):
    made(tmp_path, "llama", name="a.gguf")
    made(tmp_path, "llama", name="b.gguf")
    with pytest.raises(UnknownFormat, match="a.gguf, b.gguf"):
        backend.claims(ModelDir.of(tmp_path))


def test_nothing_of_ours_is_not_claimed(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert backend.claims(ModelDir.of(tmp_path)) is None


def test_a_cut_file_is_refused_by_claim_and_load(tmp_path):
    path, _ = made(tmp_path, "llama")
    path.write_bytes(path.read_bytes()[:-100])
    for act in (lambda: backend.claims(ModelDir.of(path)), lambda: load_model(path)):
        with pytest.raises(BrokenFile):
            act()


def test_a_type_that_is_not_read_is_claimed_by_name_and_refused_by_tensor(tmp_path):
    path, model = made(tmp_path, "llama")
    tensors = to_gguf_tensors(model, paired=True)
    tensors = {n: (np.zeros((v.shape[0], v.shape[1] // 32 * 18), np.uint8), "IQ4_NL") if v.ndim == 2 else v
               for n, v in tensors.items()}
    write(path, "llama", base_metadata(model.config) | VOCABULARY, tensors)
    assert backend.claims(ModelDir.of(path)).format == "GGUF IQ4_NL"
    with pytest.raises(UnsupportedTensor, match="IQ4_NL"):
        load_model(path)


def test_split_files_load_as_one_model(tmp_path):
    whole, reference = made(tmp_path, "llama")
    tensors = to_gguf_tensors(reference, paired=True)
    half, folder = len(tensors) // 2, tmp_path / "split"
    folder.mkdir()
    for number, part in enumerate((list(tensors.items())[:half], list(tensors.items())[half:])):
        keys = base_metadata(reference.config, **FAMILIES["llama"][2]) | VOCABULARY if number == 0 else {}
        write(folder / f"m-{number + 1:05}-of-00002.gguf", "llama", keys
              | {"split.no": number, "split.count": 2, "split.tensors.count": len(tensors)}, dict(part))
    model = load_model(folder, **REF)
    check(model, reference, (17,))
    model.close()
    (folder / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(LoadError, match="m-00002-of-00002.gguf"):
        load_model(folder)


def test_a_load_can_be_cancelled(tmp_path):
    path, _ = made(tmp_path, "llama")
    cancel = Cancel()
    cancel.set()
    with pytest.raises(Cancelled):
        backend.load(ModelDir.of(path), LocalOptions(), lambda _: None, cancel)


# ---------------------------------------------------------------------------------------------- the starter
def starter() -> Path:
    """The file that STARTER_GGUF names, or the one under models/; else the test is skipped."""
    named = os.environ.get("STARTER_GGUF")
    place = Path(named) if named else Path(__file__).parent.parent / "models"
    found = [place] if place.is_file() else sorted(place.rglob("SmolLM2-135M-Instruct*.gguf"))
    return found[0] if found else pytest.skip("the starter is not there: put it under models/ or name it in STARTER_GGUF")


@pytest.mark.starter
def test_starter_tokens_equal_the_sources():
    """SmolLM2's own tokenizer.json: single digits, then GPT-2's words, over the file's vocabulary and merges."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from tests.test_gguf_text import STRINGS
    fields = gguf.GGUFReader(starter()).fields
    tokens, merges = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.merges"].contents()
    source = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m.split(" ")) for m in merges]))
    source.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                    pre_tokenizers.ByteLevel(add_prefix_space=False)])
    source.add_special_tokens([t for t, k in zip(tokens, fields["tokenizer.ggml.token_type"].contents()) if k == 3])
    model = load_model(starter(), context=64)
    for string in STRINGS:
        if string:
            assert list(model.tokenize(string)) == source.encode(string, add_special_tokens=False).ids, string
    assert model.info.format == "GGUF Q4_1" and model.info.path == "fused"
    model.close()


@pytest.mark.starter
@pytest.mark.slow
def test_starter_logits_and_greedy_text_equal_transformers():
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    parsed = load_gguf_checkpoint(str(starter()))["config"]
    config = CONFIG_MAPPING["llama"].from_dict({k: v for k, v in parsed.items() if k != "_model_name_or_path"})
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(starter()), return_tensors=True, model_to_load=reference)["tensors"]
    assert set(reference.load_state_dict(tensors, strict=False).missing_keys) <= {"lm_head.weight"}
    reference.tie_weights()
    model = load_model(starter(), kernels="ref", dtype="float32", context=1024)
    text = list(model.tokenize("The sea is wide, and the ships that cross it are small. " * 60))
    with torch.inference_mode():
        for length in (1, 3, 15, 16, 17, 700):
            expected = reference(torch.tensor([text[:length]])).logits[0]
            assert float((rows(model.decoder, text[:length]) - expected).norm() / expected.norm()) <= 1e-4, length
        wanted = reference.generate(torch.tensor([text[:40]]), max_new_tokens=24, do_sample=False, eos_token_id=None)[0,
            40:].tolist()
    events = list(model.generate(Request(tuple(text[:40]), Sampling(max_tokens=24, ignore_eos=True)), Cancel()))
    assert [id for event in events for id in event.ids] == wanted
    model.close()


def test_sizes_are_those_of_the_weights_tests():
    assert SIZES["vocab_size"] < len(VOCABULARY["tokenizer.ggml.tokens"])
