"""The queue: places and estimates are told, and nobody waits longer than allowed."""

from __future__ import annotations

import time

import pytest

from backends.base import Request, Sampling
from backends.engine.loop import Engine
from backends.errors import InvalidRequest, QueueFull
from gainz_ui.api.errors import respond
from tests.toys import ask, drain, toy_model


def places(got) -> list[tuple[float, float]]:
    return [(event.progress.done, event.progress.total) for event in got.events if event.progress is not None and event.progress.stage == "queue"]


def test_places_are_told_when_they_change():
    model = toy_model(streams=1)
    engine = Engine()
    engine.attach(model)
    asked = [ask(engine, model, (1, 2, i), Sampling(max_tokens=3, ignore_eos=True)) for i in range(3)]
    drain(engine)
    assert [got.check().finish() for got in asked] == ["length"] * 3
    assert [places(got) for got in asked] == [[], [(1, 2)], [(2, 2), (1, 1)]]      # who has its turn at once hears nothing


def test_who_waits_too_long_is_told_and_the_others_go_on():
    model = toy_model(streams=1)
    engine = Engine()
    engine.attach(model)
    first = ask(engine, model, (1, 2), Sampling(max_tokens=30, ignore_eos=True))
    engine.step()
    late = ask(engine, model, (3, 4), Sampling(max_tokens=3), queue_limit=0.001)
    time.sleep(0.01)
    engine.step()
    assert late.done and late.last.error.code == "queue_full" and "turn" in late.last.error.cause and late.finish() == "error"
    drain(engine)
    assert first.check().finish() == "length"


def test_a_full_queue_says_when_to_try_again():
    model = toy_model(streams=2)
    engine = Engine(queue=4)
    engine.attach(model)
    lane = engine._lanes[0]
    for _ in range(3):
        lane.queue.served(6.0)
    for i in range(4):
        ask(engine, model, (1, 2, i))
    with pytest.raises(QueueFull) as caught:
        ask(engine, model, (9,))
    assert caught.value.evidence == {"waiting": 4, "limit": 4, "seconds": 12.0}        # four before it, two at a time, six seconds each
    assert respond(caught.value).headers["retry-after"] == "12"
    assert respond(QueueFull("x")).headers["retry-after"] == "1"


def test_the_limit_has_a_range():
    with pytest.raises(InvalidRequest):
        Request("a", queue_limit=0)
