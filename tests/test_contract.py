"""One contract for every registered local backend, through `load_model` on small checkpoints: what a user may rely on
whatever the format of the weights. A backend without a checkpoint here fails the first test."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path

import pytest

from backends.base import Cancel, ContextTooLong, Message, Request, Sampling
from backends.registry import Registry, load_model
from tests.test_gguf_backend import made as made_gguf

FIXTURES = Path(__file__).parent / "fixtures"
CHECKPOINTS = {"fp16": "llama-fp16", "gptq": "qwen2-autogptq-4bit-g64-actorder", "awq": "llama-autoawq-gemm-g64",
               "gguf": None}
BORROWERS = {"draft"}               # no model by itself, but part of another one: tests/test_draft.py holds it
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PROMPTS = ("The sea was calm", "In the beginning", "One, two, three,", "A letter from home", "It rained")
TEXT = "The small ship went out in the morning and came home in the evening, heavy with fish and with tired men. " * 4


def test_every_local_backend_is_held_to_the_contract():
    assert {backend.name for backend in Registry.scan().backends if backend.local} == {*CHECKPOINTS, *BORROWERS}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Each checkpoint with a chat template beside it, which the fixtures lack."""
    home, out = tmp_path_factory.mktemp("contract"), {}
    for backend, name in CHECKPOINTS.items():
        if name is None:
            out[backend] = made_gguf(home, "llama", "Q8_0", max_position_embeddings=512)[0]
            continue
        out[backend] = Path(shutil.copytree(FIXTURES / name, home / name))
        (home / name / "chat_template.jinja").write_text(TEMPLATE)
    return out


def loaded(path, **more):
    return load_model(path, kernels="ref", dtype="float32", threads=1, **{"context": 256, "streams": 4, **more})


@pytest.fixture(scope="module", params=sorted(CHECKPOINTS))
def model(request, places):
    made = loaded(places[request.param])
    assert made.info.backend == request.param
    yield made
    made.close()


def answer(model, prompt, cancel=None, **sampling):
    """(ids of each choice, texts, finishes, last event)."""
    wanted = Sampling(**{"max_tokens": 12, "ignore_eos": True, **sampling})
    return gathered(model.generate(Request(prompt, wanted), cancel or Cancel()))


def gathered(stream):
    ids, texts, finishes, last = {}, {}, {}, None
    for event in stream:
        assert last is None, "nothing comes after the last event"
        if event.last:
            last = event
        elif event.progress is None:
            assert event.index not in finishes, "nothing comes after a choice has ended"
            ids.setdefault(event.index, []).extend(event.ids)
            texts[event.index] = texts.get(event.index, "") + event.text
            if event.finish:
                finishes[event.index] = event.finish
    assert last is not None and last.error is None
    return ids, texts, finishes, last


def test_completes_a_text(model):
    ids, texts, finishes, last = answer(model, PROMPTS[0])
    assert len(ids[0]) == 12 and finishes == {0: "length"}
    assert last.usage.completion_tokens == 12 and last.usage.prompt_tokens == len(model.tokenize(PROMPTS[0]))
    assert last.timing.ttft_seconds > 0 and texts[0].strip() in model.detokenize(model.tokenize(PROMPTS[0]) + tuple(ids[0]))


def test_answers_a_chat(model):
    turns = (Message("user", "How are you?"),)
    prompt = model.tokenize(turns)
    assert "How are you?" in model.detokenize(prompt)
    ids, _, _, last = answer(model, turns)
    assert len(ids[0]) == 12 and last.usage.prompt_tokens == len(prompt)
    assert ids == answer(model, prompt)[0], "a chat is its template's tokens"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_batch_gives_each_what_it_gets_alone(model, temperature):
    """Five on four streams: the last waits for a place."""
    sampling = {"temperature": temperature, "seed": 11}
    alone = [answer(model, prompt, **sampling)[0][0] for prompt in PROMPTS]
    wanted = Sampling(max_tokens=12, ignore_eos=True, **sampling)
    streams = [model.generate(Request(prompt, wanted), Cancel()) for prompt in PROMPTS]
    assert [gathered(stream)[0][0] for stream in streams] == alone
    assert len({tuple(ids) for ids in alone}) > 1


def test_a_prefix_is_reused_and_changes_nothing(model, places):
    long = TEXT[:200]
    first = answer(model, long)
    again = answer(model, long)
    assert again[0] == first[0]
    assert again[3].usage.cached_tokens > 0 and again[3].usage.cached_tokens % 16 == 0
    other = answer(model, long + " And then")
    assert other[3].usage.cached_tokens > 0
    fresh = loaded(places[model.info.backend], prefix_cache=False)
    assert answer(fresh, long + " And then")[0] == other[0]
    fresh.close()


def test_a_seed_repeats_and_another_one_differs(model):
    runs = [answer(model, PROMPTS[1], temperature=1.0, seed=seed) for seed in (5, 5, 6)]
    assert runs[0][0] == runs[1][0] != runs[2][0]
    assert runs[0][3].seed == 5
    free = answer(model, PROMPTS[1], temperature=1.0)
    assert answer(model, PROMPTS[1], temperature=1.0, seed=free[3].seed)[0] == free[0], "the seed drawn is told"
    assert len(answer(model, PROMPTS[1], temperature=1.0, seed=5, n=2)[0]) == 2


def test_stops_at_a_token_and_at_a_text(model):
    whole, text, _, _ = answer(model, PROMPTS[2], max_tokens=24)
    third = whole[0][2]
    at = whole[0].index(third)
    ids, _, finishes, _ = answer(model, PROMPTS[2], max_tokens=24, stop_ids=(third,))
    assert ids[0] == whole[0][:at + 1] and finishes == {0: "stop"}
    visible = text[0].strip()
    if len(visible) > 4:
        stop = visible[2:4]
        _, texts, finishes, _ = answer(model, PROMPTS[2], max_tokens=24, stop=(stop,))
        assert finishes == {0: "stop"} and stop not in texts[0] and text[0].startswith(texts[0])


def test_cancel_ends_it_and_gives_its_room_back(model):
    cancel = Cancel()
    stream = model.generate(Request(PROMPTS[3], Sampling(max_tokens=200, ignore_eos=True)), cancel)
    seen, finish = 0, None
    for event in stream:
        seen += len(event.ids)
        if seen >= 3:
            cancel.set()
        finish = event.finish or finish
    assert finish == "cancelled" and 3 <= seen < 200
    assert model.decoder.stats()["pages_used"] == 0
    assert answer(model, PROMPTS[3])[2] == {0: "length"}, "and the next one runs"


def test_what_does_not_fit_is_refused_before_anything_runs(model):
    steps = model.decoder.stats()["steps"]
    with pytest.raises(ContextTooLong):
        model.generate(Request(PROMPTS[0], Sampling(max_tokens=1000)), Cancel())
    assert model.decoder.stats()["steps"] == steps


def test_logprobs_are_those_of_the_tokens(model):
    wanted = Sampling(max_tokens=4, ignore_eos=True, logprobs=2)
    seen = [item for event in model.generate(Request(PROMPTS[4], wanted), Cancel()) for item in event.logprobs]
    assert len(seen) == 4 and all(item.logprob <= 0 and len(item.top) >= 2 for item in seen)
    assert all(item.top[0][0] == item.id for item in seen), "greedy takes the most probable"


@pytest.mark.parametrize("backend", sorted(CHECKPOINTS))
def test_unloading_gives_everything_back(places, backend):
    made = loaded(places[backend], context=64)
    answer(made, PROMPTS[0], max_tokens=2)
    decoder = weakref.ref(made.decoder)
    made.close()
    made.close()
    del made
    gc.collect()
    assert decoder() is None, "something still holds the weights"
