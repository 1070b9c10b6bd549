"""Embeddings: equal to transformers' own last hidden states, whatever else is computed, and ended in every way they can end."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from backends.base import Cancel, Sampling
from backends.engine.embed import EmbedJob, EmbedQueue
from backends.engine.loop import Engine
from backends.errors import Cancelled, ContextTooLong, InvalidRequest, ModelNotLoaded, NotSupported, OutOfMemory, StepFailed
from backends.registry import load_model
from tests.toys import ask, drain, toy_model

FOLDER = "tests/fixtures/llama-fp16"
TEXTS = ("The quick brown fox", "jumps over the lazy dog. " * 12, "a")


@pytest.fixture(scope="module")
def model():
    made = load_model(FOLDER, kernels="ref", dtype="float32", context=256)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(model):
    """The mean of transformers' last hidden state over each text's tokens."""
    torch_model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    out = []
    with torch.no_grad():
        for text in TEXTS:
            ids = torch.tensor([list(model.tokenize(text))])
            out.append(torch_model.model(ids).last_hidden_state[0].double().mean(0).numpy())
    return out


def test_they_are_the_mean_of_transformers_last_hidden_states(model, reference):
    found = model.embed(TEXTS, Cancel())
    assert found.tokens == tuple(len(model.tokenize(text)) for text in TEXTS)
    for vector, wanted in zip(found.vectors, reference, strict=True):
        np.testing.assert_allclose(vector, wanted, rtol=1e-4, atol=1e-4)


def test_chunks_and_running_answers_change_nothing(model, reference):
    engine = Engine(budget=16, mixed=5)
    own, model.engine = model.engine, None
    engine.attach(model)
    try:
        got = ask(engine, model, "Once upon a time", Sampling(max_tokens=40, ignore_eos=True))
        job = engine.embed(model, TEXTS, Cancel())
        drain(engine)
        alone = ask(engine, model, "Once upon a time", Sampling(max_tokens=40, ignore_eos=True))
        drain(engine)
        assert got.ids() == alone.ids()
        for vector, wanted in zip(job.result().vectors, reference, strict=True):
            np.testing.assert_allclose(vector, wanted, rtol=1e-4, atol=1e-4)
        assert model.decoder.stats()["pages_used"] == 0
    finally:
        engine.detach(model)
        model.engine = own


def test_what_does_not_fit_is_refused_before_it_waits(model):
    with pytest.raises(ContextTooLong) as caught:
        model.embed(["word " * 400], Cancel())
    assert caught.value.field == "input"
    with pytest.raises(InvalidRequest):
        model.embed([(10**6,)], Cancel())
    gone = Cancel()
    gone.set()
    with pytest.raises(Cancelled):
        model.embed(["a"], gone)


def test_a_decoder_without_states_says_so():
    model = toy_model()
    engine = Engine()
    engine.attach(model)
    with pytest.raises(NotSupported):
        engine.embed(model, ["a"], Cancel())


class Pages:
    """A decoder of which only the room and the states matter."""

    def __init__(self, room=10, fault=None):
        self.room, self.fault, self.open_slots = room, fault, 0

    def open(self, tokens, *, reuse):
        assert not reuse
        self.open_slots += 1
        return type("Slot", (), {"length": 0})()

    def reserve(self, slot, n):
        return slot.length + n <= self.room

    def states(self, slot, tokens):
        if self.fault:
            raise self.fault
        slot.length += len(tokens)
        return torch.tensor([[float(token)] for token in tokens])

    def release(self, slot):
        self.open_slots -= 1


def test_jobs_end_in_every_way_and_give_their_pages_back():
    pages = Pages()
    queue = EmbedQueue(pages)
    first, second, third = (EmbedJob(prompts, Cancel()) for prompts in ([[1, 2, 3], [4]], [[5] * 20], [[6]]))
    for job in (first, second, third):
        queue.add(job)
    while not first.ended.is_set():
        assert queue.step(2, True)
    assert first.result().vectors == ((2.0,), (4.0,)) and first.result().tokens == (3, 1)
    while not second.ended.is_set():
        assert queue.step(8, True)
    with pytest.raises(OutOfMemory):
        second.result()
    pages.fault = RuntimeError("kernel")
    queue.step(8, True)
    with pytest.raises(StepFailed):
        third.result()
    assert not queue.step(8, True) and pages.open_slots == 0
    late = EmbedJob([[1]], Cancel())
    queue.add(late)
    queue.close(ModelNotLoaded("gone"))
    with pytest.raises(ModelNotLoaded):
        late.result()


def test_it_waits_for_pages_while_others_may_give_some_back():
    queue = EmbedQueue(Pages(room=1))
    job = EmbedJob([[1, 2]], Cancel())
    queue.add(job)
    assert not queue.step(8, False) and not job.ended.is_set()
    waiter = threading.Thread(target=lambda: pytest.raises(OutOfMemory, job.result))
    waiter.start()
    queue.step(8, True)
    waiter.join(5)
    assert not waiter.is_alive()
