"""Drafts that read their verifier's hidden states: which rows they are given, and that the text stays what it was."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backends.base import Cancel, DraftJob, DraftSpec, ModelDir, NotSupported, Request, Sampling, Step
from backends.engine.draft_weights import borrowed_digest
from backends.engine.drafters import ModelDrafter
from backends.engine.kept import Kept
from backends.engine.loop import Engine
from backends.engine.state_places import StatePlaces
from backends.engine.weights import SafetensorsSource
from backends.registry import load_model
from backends.speculative import judge

PARENT = Path(__file__).parent / "fixtures" / "llama-fp16"
TEXT = [5, 9, 200, 31, 77, 140, 8, 61]


def write_draft(folder: Path, join: torch.Tensor, keep: float) -> Path:
    """The parent's first layer, its outputs times ``keep``, and ``join``."""
    shutil.copytree(PARENT, folder / "parent")
    draft, tensors = folder / "draft", {}
    draft.mkdir()
    for name, value in load_file(PARENT / "model.safetensors").items():
        if name.startswith("model.layers.0.") or name == "model.norm.weight":
            tensors[name] = value * keep if "o_proj" in name or "down_proj" in name else value
    tensors["gainz_join.weight"] = join.half()
    save_file(tensors, draft / "model.safetensors")
    parent = ModelDir.of(PARENT, "parent")
    config = parent.config | {"num_hidden_layers": 1, "gainz_draft": {
        "parent": "parent", "files": [], "digest": borrowed_digest(SafetensorsSource(parent)), "head_ids": None,
        "borrows": {"weights": 1, "bits": 16.0}, "reads": "states"}}
    (draft / "config.json").write_text(json.dumps(config))
    return draft


@pytest.fixture(params=["ref", "cpu"])
def kernels(request):
    return request.param


def loaded(folder: Path, kernels: str, **options):
    return load_model(folder, kernels=kernels, threads=1, context=256, streams=4, dtype="float32", **options)


@pytest.fixture
def pair(tmp_path, kernels):
    """A draft whose layer adds nothing and to which the states are everything: it repeats what they say."""
    width = ModelDir.of(PARENT, "parent").config["hidden_size"]
    draft = write_draft(tmp_path, 100 * torch.eye(width), 0.0)
    return loaded(tmp_path / "parent", kernels), loaded(draft, kernels)


def test_what_was_kept_is_cut_and_found_by_its_place():
    kept, rows = Kept(3), torch.arange(20.0)[:, None]
    for begin, end in ((3, 4), (4, 9), (9, 10), (10, 12)):
        kept.add(rows, begin, end - begin)
    assert (kept.first, kept.end) == (3, 12)
    assert kept.rows(5, 11).tolist() == rows[5:11].tolist() and kept.rows(3, 4).tolist() == [[3.0]]
    kept.cut(7)
    assert kept.end == 7 and kept.rows(3, 7).tolist() == rows[3:7].tolist()
    kept.add(rows, 7, 1)
    assert kept.rows(6, 8).tolist() == rows[6:8].tolist()
    kept.cut(0)
    assert (kept.first, kept.end) == (3, 3)


def test_rows_of_a_kind_that_numpy_lacks_are_kept_too():
    kept, rows = Kept(0), torch.arange(80.0).bfloat16()[:, None]
    for place in range(80):
        kept.add(rows, place, 1)
    assert kept.rows(3, 80).tolist() == rows[3:80].tolist()


def test_the_older_half_goes_where_it_would_be_too_much(monkeypatch):
    monkeypatch.setattr("backends.engine.kept.MOST_BYTES", 4 * 100)
    kept, rows = Kept(0), torch.arange(400.0)[:, None]
    for place in range(400):
        kept.add(rows, place, 1)
        assert kept.rows(kept.first, kept.end).tolist() == rows[kept.first:place + 1].tolist()
    assert kept.first > 0 and kept.end == 400 and kept.end - kept.first >= 50


def test_it_is_given_the_states_of_the_token_before(pair, kernels):
    """The first guess is what the verifier's state of the place before says: the token that was just chosen."""
    target, draft = pair
    drafter = ModelDrafter(draft.decoder, None, StatePlaces(draft.decoder))
    slot = target.decoder.open(TEXT, reuse=False)
    slot.kept = Kept(0)
    target.decoder.reserve(slot, 64)
    text = list(TEXT)
    for _ in range(12):
        rows, = target.decoder.extend([Step(slot, text[slot.length:], 1)])
        text.append(int(rows[0].argmax()))
        guess, = drafter.propose([DraftJob(text, 3, Sampling(temperature=0.0), 0, 1, kept=slot.kept)])
        assert guess[0] == text[-1] and len(guess) == 3
    assert kernels == "ref" or draft.decoder.arch._replay.replays(1), "a recorded pass reads the states of its own batch"


def test_places_it_guessed_itself_are_read_again_with_the_verifiers_states(tmp_path, kernels):
    """After a draft, taken or not, it guesses what a drafter guesses that meets the text for the first time."""
    width = ModelDir.of(PARENT, "parent").config["hidden_size"]
    torch.manual_seed(1)
    draft = loaded(write_draft(tmp_path, torch.randn(width, width) / width ** 0.5, 1.0), kernels)
    target = loaded(tmp_path / "parent", kernels)
    slot = target.decoder.open(TEXT, reuse=False)
    slot.kept = Kept(0)
    target.decoder.reserve(slot, 64)
    used, text, greedy = ModelDrafter(draft.decoder, None, StatePlaces(draft.decoder)), list(TEXT), Sampling(temperature=0.0)
    for turn in range(8):
        rows, = target.decoder.extend([Step(slot, text[slot.length:], 1)])
        text += [int(rows[0].argmax()), *([turn, turn + 1] if turn % 2 else [])]
        target.decoder.extend([Step(slot, text[slot.length:-1], 0)]) if turn % 2 else None
        fresh = ModelDrafter(draft.decoder, None, StatePlaces(draft.decoder))
        job, once = (DraftJob(text, 4, greedy, 0, number, kept=slot.kept) for number in (1, 100))
        assert used.propose([job]) == fresh.propose([once])
        fresh.close()


def answers(engine: Engine, model, requests):
    """Ids of answers that run together."""
    events = [[] for _ in requests]
    for request, sink in zip(requests, events):
        engine.submit(model, request, Cancel(), sink.append)
    while not all(sink and sink[-1].last for sink in events):
        assert engine.step()
    assert not [sink[-1].error for sink in events if sink[-1].error]
    return [[token for event in sink for token in event.ids] for sink in events], [sink[-1].usage for sink in events]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("length", [None, 3])
def test_the_text_stays_what_it_was(tmp_path, kernels, temperature, length):
    """Alone and together, with prefixes that come from the cache, with a draft and with lookup before it."""
    width = ModelDir.of(PARENT, "parent").config["hidden_size"]
    draft = loaded(write_draft(tmp_path, torch.eye(width), 1.0), kernels)
    target, engine = loaded(tmp_path / "parent", kernels), Engine(budget=24, mixed=8)
    engine.attach(target), engine.attach(draft)
    prompts = [tuple(TEXT * 5), tuple(TEXT * 5 + [4, 4]), tuple(TEXT[::-1] * 3)]
    sampling = Sampling(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    plain, _ = answers(engine, target, [Request(prompt, sampling) for prompt in prompts])
    for name in (draft.info.name, f"lookup+{draft.info.name}"):
        spec = DraftSpec(name, length)
        for _ in range(2):
            together, usages = answers(engine, target, [Request(prompt, sampling, spec) for prompt in prompts])
            assert together == plain
        alone = [answers(engine, target, [Request(prompt, sampling, spec)])[0][0] for prompt in prompts]
        assert alone == plain
    assert length is None or all(usage.speculation.lengths[-1][0] > 0 for usage in usages)


def test_it_says_nothing_by_itself_and_serves_only_its_like(pair):
    target, draft = pair
    engine = Engine()
    engine.attach(target), engine.attach(draft)
    with pytest.raises(NotSupported, match="by itself"):
        engine.submit(draft, Request((5, 6), Sampling(max_tokens=2)), Cancel(), lambda event: None)
    with pytest.raises(NotSupported):
        engine.embed(draft, [(5, 6)], Cancel())
    assert judge(target.info, draft.info, lambda: None).code == "states"
    for other in (replace(target.info, hidden=128), replace(target.info, vocab_fingerprint="other"), replace(target.info, capabilities=("draft",))):
        assert judge(other, draft.info, lambda: None).code == "needs_states" and not judge(other, draft.info, lambda: None).fits
