"""Drafts: which layers go, what a draft learns from, its training, its folder, and what it borrows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from backends.base import Cancel, DraftParent, InvalidRequest, Message, ModelDir, NotSupported, Sampling, Step
from backends.compress import corpus, prune, writer
from backends.compress.corpus import Conversations, Passage, Prompt, continued, looping, windows
from backends.compress.distill import Schedule, batch_at
from backends.compress.skeleton import Skeleton
from backends.compress.stream import Stream
from backends.compress.student import divergence
from backends.draft_recipe import DraftOptions
from backends.engine.draft_weights import four_bits
from backends.engine.gptq_weights import GptqLayout
from backends.engine.packed_files import PackedFiles
from backends.engine.text import TextCodec
from backends.engine.weights import SafetensorsSource
from backends.quant_config import read_quantization
from backends.registry import Registry, load_decoder, load_model
from gainz_ui.commands import draft as command
from gainz_ui.services.catalog import examine
from gainz_ui.services.store import Store
from tests.stopped import end_alike

FIXTURE = Path(__file__).parent / "fixtures" / "llama-fp16"
SIZE = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=0, eos_token_id=1)
QUICK = dict(layers=2, head_ids=128, tokens=2500, steps=40, window=32, streams=16, rate=5e-3, threads=1, precision="float32")
TEMPLATE = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}")


def silent(_) -> None:
    """Nobody watches."""


def teacher(noop: int | None = None, **changes) -> LlamaForCausalLM:
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**SIZE | changes)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn_like(weight) * (4.0 if "lm_head" in name else 0.6) / weight.shape[1] ** 0.5)
        model.model.embed_tokens.weight.mul_(8)
        if noop is not None:
            model.model.layers[noop].self_attn.o_proj.weight.zero_()
            model.model.layers[noop].mlp.down_proj.weight.zero_()
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """models/ with the teacher in it."""
    folder = tmp_path_factory.mktemp("models")
    write(folder / "parent", teacher())
    return folder


def write(folder: Path, model) -> Path:
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(FIXTURE / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def made(models) -> Path:
    """A trained 4-bit draft beside its parent."""
    command.make(Store(models), "parent", "draft", DraftOptions(**QUICK), None, False, silent, Cancel())
    return models / "draft"


# ---------------------------------------------------------------------------------------------- which layers
def begun(folder: Path) -> Stream:
    """Over texts that the model says itself: of those it is sure, and every layer that does something matters."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    starts = [torch.randint(2, 512, (1, 4), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    words = [model.generate(start, do_sample=False, max_new_tokens=36, min_new_tokens=36)[0].tolist() for start in starts]
    skeleton = Skeleton(SafetensorsSource(ModelDir.of(folder)), torch.device("cpu"))
    skeleton.fill()
    stream = Stream(skeleton, words, "float32", Cancel())
    stream.begin()
    return stream


@pytest.mark.parametrize("method", ["greedy", "block"])
def test_a_layer_that_does_nothing_goes_first(tmp_path, method):
    choice = prune.choose(begun(write(tmp_path / "m", teacher(noop=2))), 3, method, silent)
    assert choice.kept == (0, 1, 3) and choice.method == method
    assert choice.loss == pytest.approx(choice.whole_loss, abs=1e-5)


@pytest.mark.parametrize("method", ["greedy", "block", "first"])
def test_the_loss_is_the_cross_entropy_of_the_model_without_those_layers(tmp_path, method):
    stream = begun(write(tmp_path / "m", teacher()))
    choice = prune.choose(stream, 2, method, silent)
    model = teacher()
    model.model.layers = torch.nn.ModuleList([model.model.layers[layer] for layer in choice.kept])
    with torch.no_grad():
        losses = [model(window, labels=window, use_cache=False).loss for window in stream.windows]
    assert choice.loss == pytest.approx(float(torch.stack(losses).mean()), abs=1e-4)
    assert len(choice.order) == (0 if method == "first" else 2)
    assert method != "greedy" or choice.order[-1][1] == choice.loss


@pytest.mark.parametrize("keep", [0, 4, 9])
def test_layers_that_cannot_be_kept_are_refused_with_the_range(models, keep):
    with pytest.raises(InvalidRequest, match="from 1 to 3"):
        prune.choose(begun(models / "parent"), keep, "block", silent)


def test_a_draft_that_reads_states_keeps_the_first_layers(models):
    stream = begun(models / "parent")
    choice = prune.choose(stream, 2, "first", silent)
    block = prune.choose(stream, 2, "block", silent)
    assert choice.kept == (0, 1) and not choice.order and choice.whole_loss == pytest.approx(block.whole_loss)
    assert DraftOptions(reads="states").chooses == "first" and DraftOptions().chooses == "auto"
    assert DraftOptions(reads="states", choose="block").chooses == "block"


def test_a_pruned_config_keeps_the_kinds_of_the_layers_that_stay():
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    found = prune.pruned_config({"num_hidden_layers": 4, "layer_types": kinds, "other": [1, 2]}, (1, 2))
    assert found == {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "other": [1, 2]}


def test_without_training_it_is_a_model_of_its_own_that_others_load(models, tmp_path):
    shutil.copytree(models / "parent", tmp_path / "parent")
    seen = []
    options = DraftOptions(layers=2, minutes=0, threads=1, precision="float32")
    manifest = command.make(Store(tmp_path), "parent", "small", options, None, False, seen.append, Cancel())
    assert any("perplexity" in progress.note for progress in seen if progress.stage == "write")     # before it is made
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32).eval()
    assert len(theirs.model.layers) == 2 and theirs.dtype == torch.float32
    ours = teacher()
    ours.model.layers = torch.nn.ModuleList([ours.model.layers[layer] for layer in manifest["pruned"]["kept"]])
    for index, layer in enumerate(ours.model.layers):
        layer.self_attn.layer_idx = index
    ids = torch.arange(2, 30)[None]
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits, ours(ids).logits, atol=2e-2)                      # float16 weights
    assert examine(Registry.scan(), "small", tmp_path / "small").backend == "fp16"
    assert Store(tmp_path).verify("small").ok


# ---------------------------------------------------------------------------------------------- what it learns from
def test_what_is_said_does_not_depend_on_how_much_is_said_at_once(models):
    decoder = load_decoder(models / "parent", kernels="ref", context=96, streams=8)
    prompts = [Prompt(number, (5, 6, 7 + number), 20, Sampling(temperature=1.0), lambda said: said[-1] < 40) for number in range(8)]
    alone = {prompt.number: said for prompt, said in continued(decoder, prompts, 1, 3, Cancel())}
    together = {prompt.number: said for prompt, said in continued(decoder, prompts, 8, 3, Cancel())}
    assert alone == together and len({tuple(said) for said in alone.values()}) == 8
    assert all(len(said) == 20 or said[-1] < 40 for said in alone.values())
    assert decoder.stats()["pages_used"] == 0


def test_a_conversation_is_made_of_the_models_own_question_and_answer(models, monkeypatch):
    model = load_model(models / "parent", kernels="ref", context=256, streams=8)
    monkeypatch.setattr(corpus, "QUESTION", 12)
    monkeypatch.setattr(corpus, "ANSWER", 16)
    text = TextCodec(model.text.tokenizer, template=TEMPLATE, eos_ids=model.text.eos_ids)
    speech = Conversations(text)
    assert (text.decode(speech.opening), speech.between, speech.closing) == ("<user>", "</>\n<assistant>", "</>")
    count = 0
    for passage in speech.passages(model.decoder, range(4), 4, 0, Cancel()):
        count += 1
        start = passage.tokens[:passage.begin]
        question = text.decode(start).removeprefix("<user>").removesuffix("</>\n<assistant>")
        assert list(start) == text.chat([Message("user", question)]) and 0 < len(passage.tokens) - passage.begin <= 16
    assert count == 4


def test_windows_know_which_words_are_the_teachers_own():
    found = windows([Passage((1, 2, 3), 2), Passage((4, 5, 6, 7), 0)], 3)
    assert [window.tokens for window in found] == [(1, 2, 3), (4, 5, 6)]
    assert [window.places for window in found] == [[1], [0, 1]]


def test_an_answer_that_turns_in_circles_ends():
    assert looping([9] * 4 + [1, 2, 3, 4] * 3) and not looping(list(range(24)))
    assert not looping([1, 2, 3, 4] * 2)


# ---------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("cap", [None, 5.0])
def test_the_divergence_and_its_slope_are_those_of_the_definition(cap):
    draw = torch.Generator().manual_seed(3)
    student, goal, head, own = (torch.randn(*shape, generator=draw) for shape in ((700, 8), (700, 8), (20, 8), (20, 8)))
    student.requires_grad_(True)
    capped = lambda x: x if cap is None else cap * torch.tanh(x / cap)  # noqa: E731
    p, q = (capped(rows @ matrix.T).log_softmax(-1) for rows, matrix in ((goal, head), (student, own)))
    wanted = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    slope, = torch.autograd.grad(wanted, student)
    found = divergence(student, goal, own, head, cap)
    (3 * found).backward()
    assert torch.allclose(found, wanted, rtol=1e-5) and torch.allclose(student.grad, 3 * slope, atol=1e-7)


def test_every_window_comes_once_before_any_comes_twice():
    places = [number for step in range(5) for number in batch_at(10, 4, step, 7)]
    assert sorted(places[:10]) == sorted(places[10:]) == list(range(10)) and places[:10] != places[10:]


def test_the_rate_rises_and_falls():
    schedule = Schedule(100, 0, 4, 1.0, 0)
    rates = [schedule.rate_at(schedule.progress(step, 0)) for step in range(101)]
    assert max(rates) == pytest.approx(1.0) and rates.index(max(rates)) == 5 and rates[-1] == pytest.approx(0.05)
    assert Schedule(0, 60, 4, 1.0, 0).progress(12, 30) == 0.5


def test_training_lowers_the_loss_and_brings_draft_and_teacher_together(made):
    """Over whole distributions: which token is the first of all is luck with a teacher of random weights."""
    manifest = json.loads((made / "manifest.json").read_text())
    curve = manifest["taught"]["curve"]
    assert curve[-1]["loss"] < 0.9 * curve[1]["loss"]
    assert curve[-1]["overlap"] > curve[0]["overlap"] and 0 < manifest["overlap"] < 1
    assert "--steps=40" in manifest["command"] and manifest["parent"]["name"] == "parent"


def test_a_run_that_was_stopped_ends_as_one_that_was_not(models, made, tmp_path):
    end_alike(models, tmp_path, made.name, DraftOptions(**QUICK))


def test_the_time_of_stopped_runs_counts_up_to_their_last_part(tmp_path, monkeypatch):
    now = SimpleNamespace(clock=100.0, cpu=7.0)
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: now.clock, process_time=lambda: now.cpu))
    stopped = writer.Parts(tmp_path, "key", 90.0)
    now.clock, now.cpu = 130.0, 57.0
    stopped.save("first", {"a": torch.zeros(1)}, {})
    now.clock = 5000.0                                      # killed, and begun again later, in another process
    again = writer.Parts(tmp_path, "key")
    now.clock, now.cpu = 5002.0, 3.0
    assert again.worked() == (42.0, 60.0)
    assert writer.Parts(tmp_path, "another key").worked() == (0.0, 3.0)


def test_options_out_of_range_are_refused_by_name():
    for field, value in (("layers", 0), ("minutes", -1.0), ("bits", 5), ("choose", "best"), ("window", 8)):
        with pytest.raises(InvalidRequest, match=field):
            DraftOptions(**{field: value})


def test_a_family_without_a_fused_decoder_gets_a_whole_model(tmp_path):
    torch.manual_seed(1)
    shape = dict(vocab_size=512, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1)
    write(tmp_path / "parent", GPT2LMHeadModel(GPT2Config(**shape)).float())
    options = DraftOptions(**QUICK | dict(layers=1, steps=3, tokens=300))
    manifest = command.make(Store(tmp_path), "parent", "draft", options, None, False, silent, Cancel())
    assert manifest["bits"] == 16.0 and any("whole model" in note for note in manifest["notes"])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert len(theirs.transformer.h) == 1 and examine(Registry.scan(), "draft", tmp_path / "draft").backend == "fp16"


def test_a_window_longer_than_the_model_was_trained_for_is_refused(models):
    with pytest.raises(InvalidRequest, match="trained for 256"):
        command.make(Store(models), "parent", "long", DraftOptions(**QUICK | dict(window=512)), None, False, silent, Cancel())


# ---------------------------------------------------------------------------------------------- its folder
def by_hand(folder: Path, parent: Path, ids: list[int]) -> LlamaForCausalLM:
    """The draft put together by transformers; the head's rows in 4 bits, as they are read."""
    model_dir = ModelDir.of(folder)
    source = PackedFiles(model_dir, GptqLayout(read_quantization(model_dir)))
    model = LlamaForCausalLM(LlamaConfig(**SIZE | {"num_hidden_layers": 2})).float().eval()
    theirs = AutoModelForCausalLM.from_pretrained(parent, dtype=torch.float32).state_dict()
    lent = {name: theirs[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    lent["lm_head.weight"][ids] = four_bits(lent["lm_head.weight"][ids]).dequantize()
    model.load_state_dict({name: source.tensor(name).float() for name in source.names()} | lent)
    return model


def test_a_draft_computes_what_the_same_model_built_by_hand_does(models, made):
    ids = json.loads((made / "head_ids.json").read_text())
    decoder = load_decoder(made, kernels="ref", dtype="float32", kv_type="float32")
    slot, tokens = decoder.open([3]), [3, 77, 200, 11, 45]
    assert decoder.reserve(slot, 5)
    rows = decoder.extend([Step(slot, tokens, 5)])[0]
    with torch.no_grad():
        wanted = by_hand(made, models / "parent", ids)(torch.tensor([tokens])).logits[0]
    other = sorted(set(range(512)) - set(ids))
    assert rows.shape == (5, 512) and torch.isinf(rows[:, other]).all()
    assert torch.allclose(rows[:, ids], wanted[:, ids], atol=1e-3)


def test_a_draft_is_an_ordinary_model_of_the_catalog_with_its_parents_vocabulary(models, made):
    entry = examine(Registry.scan(), "draft", made)
    assert (entry.backend, entry.reason, entry.bits) == ("draft", "", 4.0) and "parent" in entry.format
    draft, parent = load_model(made, kernels="ref"), load_model(models / "parent", kernels="ref")
    assert draft.info.vocab_fingerprint == parent.info.vocab_fingerprint and draft.info.vocab_size == parent.info.vocab_size
    assert any("parent" in note for note in draft.info.notes)
    assert Store(models).verify("draft").ok
    ids = json.loads((made / "head_ids.json").read_text())
    assert len(ids) == 128 and parent.text.vocab.eos_ids <= set(ids) and parent.text.special_ids <= set(ids)


def copied(models: Path, made: Path, folder: Path) -> Path:
    shutil.copytree(models / "parent", folder / "parent")
    return Path(shutil.copytree(made, folder / "draft"))


def test_a_parent_that_is_missing_or_shorter_is_said_in_the_catalog(models, made, tmp_path):
    draft = copied(models, made, tmp_path)
    weights = tmp_path / "parent" / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"x")
    entry = examine(Registry.scan(), "draft", draft)
    assert entry.code == "draft_parent" and "model.safetensors differs" in entry.reason
    shutil.rmtree(tmp_path / "parent")
    assert "'parent', which is not here" in examine(Registry.scan(), "draft", draft).reason
    with pytest.raises(DraftParent, match="not here"):
        load_model(draft, kernels="ref")


def test_a_parent_of_the_same_size_with_other_embeddings_is_found_out_at_load(models, made, tmp_path):
    draft = copied(models, made, tmp_path)
    other = teacher()
    with torch.no_grad():
        other.model.embed_tokens.weight[7, 3] += 1
    other.save_pretrained(tmp_path / "parent")
    with pytest.raises(DraftParent, match="embeddings or head differ"):
        load_model(draft, kernels="ref")


def test_no_draft_is_made_of_a_draft(models, made):
    with pytest.raises(NotSupported):
        command.make(Store(models), "draft", "again", DraftOptions(**QUICK), None, False, silent, Cancel())


def test_four_bits_are_within_half_a_step_or_nearer_on_the_whole():
    rows = torch.randn(64, 40, generator=torch.Generator().manual_seed(1))        # a ragged last group
    found, apart = four_bits(rows), lambda values: (values - rows).square().sum()  # noqa: E731
    low, high = rows[:, :32].amin(1, keepdim=True), rows[:, :32].amax(1, keepdim=True)
    step = (high - low) / 15
    plain = torch.cat([low + ((rows[:, :32] - low) / step).round() * step, rows[:, 32:]], 1)
    assert found.bits == 4 and int(found.codes.max()) <= 15
    whole = torch.cat([found.dequantize()[:, :32], rows[:, 32:]], 1)
    assert apart(whole) < 0.97 * apart(plain), "narrower ranges were tried"
    single = four_bits(torch.arange(16.0).repeat(2)[None])                        # exactly 16 levels
    assert torch.equal(single.dequantize(), torch.arange(16.0).repeat(2)[None])
