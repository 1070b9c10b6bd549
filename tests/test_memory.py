"""The real engine behind the pipe, on the tiny checkpoints: memory comes back, death is survived, texts stay the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from backends.base import Cancel, EngineDied, Message, Request, Sampling
from backends.fp16 import Fp16Options
from backends.host import EngineHost

FIXTURES = Path(__file__).parent / "fixtures"
OPTIONS = Fp16Options(context=256, streams=2, dtype="float32", kernels="ref", threads=1, device="cpu")


@pytest.fixture
def fresh(tmp_path):
    """An engine process that has loaded nothing yet: where its memory is measured."""
    made = EngineHost(logs=tmp_path / "logs")
    yield made
    made.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    made = EngineHost(logs=tmp_path_factory.mktemp("engine"))
    yield made
    made.close()


@pytest.fixture
def host(running):
    """One for all that is about answers."""
    yield running
    for name in list(running.models()):
        running.unload(name)


def load(host, fixture: str, name: str | None = None):
    return host.load(name or fixture, FIXTURES / fixture, "fp16", OPTIONS, lambda _: None, Cancel())


def ask(tokens: int = 8, prompt="the cat", **more) -> Request:
    return Request(prompt, Sampling(max_tokens=tokens, ignore_eos=True, **more))


def text(events) -> str:
    return "".join(event.text for event in events)


def ids(events) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.ids)


def test_the_same_answer_on_both_sides_of_the_pipe(host):
    from backends.registry import load_model
    outside = load(host, "llama-fp16")
    inside = load_model(FIXTURES / "llama-fp16", context=256, streams=2, dtype="float32", kernels="ref", threads=1, device="cpu")
    try:
        for request in (ask(24), ask(24, seed=5, temperature=1.0)):
            mine, theirs = list(inside.generate(request, Cancel())), list(outside.generate(request, Cancel()))
            assert ids(mine) == ids(theirs) and text(mine) == text(theirs) and mine[-1].usage == theirs[-1].usage
        assert outside.tokenize("the cat") == inside.tokenize("the cat")
        assert outside.detokenize(outside.tokenize("the cat", special=False)) == "the cat"
        assert outside.info.vocab_fingerprint == inside.info.vocab_fingerprint
    finally:
        inside.close()


def test_two_models_at_once_answer_as_alone(host):
    llama, qwen = load(host, "llama-fp16"), load(host, "qwen2-fp16")
    alone = [ids(model.generate(ask(30), Cancel())) for model in (llama, qwen)]
    assert alone[0] != alone[1] and len(alone[0]) == 30
    found = {}
    threads = [threading.Thread(target=lambda i=i, m=m: found.__setitem__(i, ids(m.generate(ask(30), Cancel()))))
               for i, m in enumerate((llama, qwen, llama, qwen))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(4)] == alone * 2


def test_cancel_ends_within_two_steps_and_frees_the_pages(host):
    model, cancel = load(host, "llama-fp16"), Cancel()
    answer = model.generate(ask(240), cancel)
    for _ in range(3):
        next(answer)
    cancel.set()
    rest = list(answer)
    assert rest[-2].finish == "cancelled" and rest[-1].usage.completion_tokens < 60
    steps = host.stats()["steps"]
    time.sleep(0.2)
    stats = host.stats()
    assert stats["steps"] == steps and stats["running"] == 0 and stats["queue"] == 0


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_killed_in_mid_answer_the_next_request_works_and_says_the_same(host):
    model = load(host, "llama-fp16")
    before = ids(model.generate(ask(16), Cancel()))
    answer = model.generate(ask(240), Cancel())
    next(answer)
    os.kill(host._link.pid, signal.SIGKILL)
    error = list(answer)[-1].error
    assert isinstance(error, EngineDied) and error.evidence["signal"] == "SIGKILL"
    assert ids(model.generate(ask(16), Cancel())) == before


def test_a_chat_without_a_template_is_refused_across_the_pipe(host):
    from backends.base import NoChatTemplate
    model = load(host, "llama-fp16")
    assert not model.info.chat_template
    with pytest.raises(NoChatTemplate):
        model.generate(ask(4, (Message("user", "hello"),)), Cancel())


def test_ten_loads_beside_one_that_stays_give_the_memory_back(fresh, tmp_path):
    load(fresh, "llama-fp16", "stays")
    child, resident = psutil.Process(fresh._link.pid), []
    for cycle in range(10):
        model = load(fresh, ("qwen2-fp16", "llama-fp16")[cycle % 2], "guest")
        assert len(ids(model.generate(ask(16), Cancel()))) == 16
        fresh.unload("guest")
        resident.append(child.memory_info().rss)
    assert max(resident[2:]) <= resident[1] * 1.05, [rss >> 20 for rss in resident]
    assert "still refer to it" not in (tmp_path / "logs" / "engine.log").read_text()      # the weak reference died each time
    assert set(fresh.models()) == {"stays"}
    assert len(ids(fresh.model("stays").generate(ask(4), Cancel()))) == 4


def test_the_estimate_is_not_below_what_a_load_takes(fresh):
    from backends.base import ModelDir
    from backends.estimate import estimate
    expected = estimate(ModelDir.of(FIXTURES / "llama-fp16"), OPTIONS)
    info = load(fresh, "llama-fp16").info
    assert info.weights_bytes <= expected.weights * 1.02 and info.peak_bytes <= expected.total


def starter() -> Path | None:
    """The starter's file in models/, or the one that STARTER_GGUF names."""
    named = os.environ.get("STARTER_GGUF")
    found = [Path(named)] if named else sorted((Path(__file__).parents[1] / "models").rglob("SmolLM2-135M-Instruct*.gguf"))
    return found[0] if found else None


@pytest.mark.slow
@pytest.mark.starter
@pytest.mark.skipif(starter() is None, reason="the starter model is not in models/")
def test_ten_loads_of_the_starter_in_turn_with_another_format_give_the_memory_back(fresh):
    from backends.base import LocalOptions
    load(fresh, "llama-fp16", "stays")
    child, resident = psutil.Process(fresh._link.pid), []
    for cycle in range(10):
        if cycle % 2:
            model = load(fresh, "qwen2-fp16", "guest")
        else:
            options = LocalOptions(context=1024, streams=2, device="cpu", threads=1)
            model = fresh.load("guest", starter(), "gguf", options, lambda _: None, Cancel())
        assert len(ids(model.generate(ask(32, "The capital of France is"), Cancel()))) == 32
        fresh.unload("guest")
        resident.append(child.memory_info().rss)
    assert max(resident[2:]) <= resident[1] * 1.05, [rss >> 20 for rss in resident]
