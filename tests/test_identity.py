"""The same text, token for token, with and without a draft, alone and in a batch, on reference and fast kernels.

Short: the tiny fixtures in 4, 8 and 16 bits. `make slow`: 50 prompts of 200 tokens on the starter in each of the widths, in parts.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from backends.base import DraftSpec, Sampling
from backends.engine.loop import Engine
from backends.errors import MissingRequirement
from backends.registry import load_model
from gainz_ui.services.starter import NAME
from tests.test_gguf_backend import starter
from tests.toys import ask

FIXTURES = Path(__file__).parent / "fixtures"
SHIPPED = Path(__file__).parents[1] / "gainz_ui" / "data" / "starter-draft"
TEXT = ("Copy the list again and again: red, green, blue; red, green, blue; red, green. Once upon a time there was a small model "
        "that read a long line of text, and it wrote another one, and another one after it, and the list again: red, green, ")
TEMPERATURES = (0.0, 0.7, 1.2)


def load(path: Path, threads: int = 1, **options):
    try:
        return load_model(path, threads=threads, **options)
    except MissingRequirement as error:
        pytest.skip(f"these kernels are not to be had here: {error}")


def compare(model, draft, prompts, tokens: int, specs, **more) -> int:
    """Each prompt plain and alone, then drafted alone, then all together with mixed drafts. The number of accepted tokens."""
    engine, rng, accepted = Engine(budget=64, mixed=24), random.Random(5), 0
    engine.attach(model)
    if draft is not None:
        engine.attach(draft)
    for temperature in TEMPERATURES:
        asked = [Sampling(temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True, **more)
                 for seed in range(len(prompts))]
        plain = [run(engine, model, [(prompt, sampling, None)])[0] for prompt, sampling in zip(prompts, asked)]
        for place, (prompt, sampling) in enumerate(zip(prompts, asked)):
            got, = run(engine, model, [(prompt, sampling, specs[place % len(specs)])])
            assert got.ids() == plain[place].ids(), (temperature, place, specs[place % len(specs)])
            assert got.text() == plain[place].text()
            accepted += got.last.usage.accepted
        together = run(engine, model, [(*pair, rng.choice([*specs, None])) for pair in zip(prompts, asked)])
        assert [got.ids() for got in together] == [got.ids() for got in plain], temperature
    engine.detach(model)
    if draft is not None:
        engine.detach(draft)
    return accepted


def run(engine, model, requests):
    answers = [ask(engine, model, prompt, sampling, draft=spec) for prompt, sampling, spec in requests]
    while not all(got.done for got in answers):
        engine.step()
    return [got.check() for got in answers]


@pytest.mark.parametrize(("name", "options"), [
    ("llama-fp16", {"kernels": "ref", "dtype": "float32"}),
    ("llama-fp16", {"kernels": "cpu", "dtype": "bfloat16"}),
    ("qwen2-autogptq-4bit-g64-actorder", {"kernels": "cpu"}),
    ("llama-autogptq-8bit-g64", {"kernels": "cpu"})], ids=lambda value: value if isinstance(value, str) else value["kernels"])
def test_a_draft_changes_no_token_of_tiny_models(name, options):
    model, draft = load(FIXTURES / name, context=512, **options), load(FIXTURES / "llama-fp16", kernels="ref", context=512)
    draft.info = replace(draft.info, name="draft")
    ids = model.tokenize(TEXT)
    prompts = [tuple(ids[start:start + size]) for start, size in ((0, 60), (20, 5))]
    specs = [DraftSpec("lookup", 4), DraftSpec("lookup+draft"), DraftSpec(name, 3)]
    assert model.info.lossless and compare(model, draft, prompts, 16, specs) > 0
    drain_and_close(model, draft)


def test_penalties_and_biases_hold_under_drafts():
    model = load(FIXTURES / "llama-fp16", kernels="ref", dtype="float32", context=512)
    ids = model.tokenize(TEXT)
    more = {"repetition_penalty": 1.3, "frequency_penalty": .4, "presence_penalty": .2, "min_tokens": 3, "top_k": 30, "top_p": .95,
            "logit_bias": ((5, 4.0), (9, -50.0)), "logprobs": 1}
    compare(model, None, [tuple(ids[:60]), tuple(ids[5:20])], 16, [DraftSpec("lookup", 4), DraftSpec("llama-fp16", 2)], **more)
    drain_and_close(model)


@pytest.mark.parametrize("family", ["mistral window", "gemma3", "qwen2 window"])
def test_a_sliding_window_holds_under_drafts(tmp_path, family):
    """Windows of 9 and 11 tokens, prompts and drafts across their edges."""
    from backends.engine.text import TextCodec
    from tests import tiny
    from tests.toys import byte_tokenizer
    folder = tiny.write(tmp_path / "model", family)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    model = load(folder, kernels="ref", dtype="float32", context=128)
    assert isinstance(model.text, TextCodec) and any(layer.window for layer in model.decoder.arch.layers)
    prompts = [tuple([5, 6, 7, 8, 9, 10, 11] * 4), tuple(range(20, 29))]
    assert compare(model, None, prompts, 16, [DraftSpec("lookup", 4), DraftSpec(model.info.name, 5)]) > 0
    drain_and_close(model)


def drain_and_close(*models) -> None:
    for model in models:
        model.close()


# ------------------------------------------------------------------------------------------- the starter
QUESTIONS = ("Write a short story about a lighthouse.", "List five animals and what they eat.", "Why is the sky blue?",
             "Repeat this word for word: the quick brown fox jumps over the lazy dog, the quick brown fox jumps again.",
             "Write a Python function that adds two numbers, then one that subtracts them.")


def prompts_of(model, numbers) -> list[tuple[int, ...]]:
    from backends.base import Message
    asked = [f"{QUESTIONS[n % len(QUESTIONS)]} (Version {n}.)" for n in numbers]
    return [model.tokenize((Message("user", text),)) for text in asked]


def made(kind: str, folder: Path) -> Path:
    """The starter's weights in the width asked for."""
    source = starter()
    if kind == "4-bit":
        return source
    whole = dequantized(source)
    if kind == "8-bit":
        return eight_bits(source, whole, folder / "starter-q8.gguf")
    whole.to(torch.bfloat16).save_pretrained(folder)
    text = load_model(source, context=64)
    text.text.tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n")
    text.close()
    return folder


def dequantized(path: Path):
    """transformers' own module with the file's weights in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from backends.engine.gguf_weights import GgufWeights
    from backends.gguf_file import read_model
    source = GgufWeights(read_model(path))
    config = dict(source.config)
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config), dtype=torch.float32)
    missing, surplus = whole.load_state_dict({name: source.tensor(name).float() for name in source.names()}, strict=False)
    source.close()
    assert set(missing) <= {"lm_head.weight"} and not surplus
    whole.tie_weights()
    return whole


def eight_bits(source: Path, whole, path: Path) -> Path:
    import gguf
    from tests.gguf_maker import TYPES, base_metadata, to_gguf_tensors, write
    fields = gguf.GGUFReader(str(source)).fields
    text = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
    tensors = {name: (gguf.quants.quantize(data, TYPES.Q8_0), "Q8_0") if data.ndim == 2 else data
               for name, data in to_gguf_tensors(whole, paired=True).items()}
    theta = float(whole.config.rope_parameters["rope_theta"])
    return write(path, "llama", base_metadata(whole.config, **{"rope.freq_base": theta}) | text, tensors)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The starter in a width, made once for all parts."""
    return cache(lambda kind: made(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture
def distilled(tmp_path):
    """The starter's own draft: it lies beside the file that it borrows from."""
    parent, folder = tmp_path / NAME, tmp_path / "starter-draft"
    parent.symlink_to(starter().parent, target_is_directory=True)
    folder.symlink_to(SHIPPED, target_is_directory=True)
    model = load(folder, threads=0, context=4096, streams=16, kernels="cpu")
    yield model
    model.close()


PARTS = 10                   # of five prompts, a minute or two each: a part is a test by itself, to be run and repeated alone


@pytest.mark.slow
@pytest.mark.starter
@pytest.mark.parametrize("part", range(PARTS), ids=lambda part: f"part{part + 1}of{PARTS}")
@pytest.mark.parametrize(("kind", "dtype"), [("4-bit", "auto"), ("8-bit", "auto"), ("16-bit", "bfloat16")], ids=lambda value: value)
def test_a_draft_changes_no_token_of_the_starter(kind, dtype, part, weights, distilled):
    """50 prompts of 200 tokens, two parts in ten on one core. A piece of it: ``make slow TESTS="tests/test_identity.py -k 'part2of
    and 16-bit'"``; with ``--stepwise`` in TESTS it goes on where it failed or was stopped."""
    model = load(weights(kind), threads=1 if part % 5 == 0 else 0, context=4096, streams=16, kernels="cpu", dtype=dtype)
    identical(model, distilled, range(part, 50, PARTS), 200)


@pytest.mark.slow
@pytest.mark.starter
def test_a_draft_changes_no_token_of_the_starter_on_reference_kernels(weights, distilled):
    model = load(weights("4-bit"), threads=0, context=4096, streams=16, kernels="ref", dtype="float32")
    identical(model, distilled, range(5), 60)


def identical(model, draft, numbers, tokens: int) -> None:
    """Five ways to draft, the next one for each prompt; the last one is the model itself."""
    assert model.info.lossless
    draft.info = replace(draft.info, name="draft")
    specs = [DraftSpec("lookup", 4), DraftSpec("lookup"), DraftSpec("lookup+draft", 3), DraftSpec("draft"), DraftSpec(model.info.name, 2)]
    assert compare(model, draft, prompts_of(model, numbers), tokens, specs) > tokens
    model.close()
