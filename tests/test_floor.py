"""Whose turn it is: requests together, a measurement alone, and neither starves the other."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from backends.base import Cancel, Cancelled, Event, QueueFull, Timing
from gainz_ui.services.floor import Floor

LAST = Event(-1, timing=Timing())


def answer():
    return iter((Event(text="a", ids=(1,)), LAST))


def until(truth, seconds=5):
    end = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_requests_run_side_by_side_and_leave_by_every_door():
    floor = Floor()
    for leave in (list, lambda events: events.close(), lambda events: None):
        one, two = floor.admitted(lambda _: answer(), Cancel()), floor.admitted(lambda _: answer(), Cancel())
        assert floor._running == 2
        leave(one), leave(two)
        del one, two
        assert floor._running == 0

    def refuse(_):
        raise QueueFull("full")

    with pytest.raises(QueueFull):
        floor.admitted(refuse, Cancel())
    assert floor._running == 0


def test_a_measurement_waits_for_what_runs_and_holds_back_what_comes():
    floor, order = Floor(), []
    running = floor.admitted(lambda _: answer(), Cancel())

    def measure():
        with floor.alone("A against B", Cancel()):
            order.append("measured")
            until(lambda: floor._waiting == 1)

    def ask():
        events = floor.admitted(lambda waited: (order.append("asked"), answer())[1], Cancel())
        list(events)

    measuring = threading.Thread(target=measure)
    measuring.start()
    until(lambda: floor.held == "A against B")
    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: floor._waiting == 1)
    assert order == []
    list(running)
    measuring.join(5), asking.join(5)
    assert order == ["measured", "asked"] and floor._running == 0 and floor.held == ""


def test_those_who_waited_go_before_the_next_pair():
    floor, order = Floor(), []
    inside = threading.Event()

    def ask():
        for _ in floor.admitted(lambda _: answer(), Cancel()):
            order.append("answer")

    def pairs():
        for number in range(2):
            with floor.alone("pairs", Cancel()):
                order.append(number)
                inside.set()
                until(lambda: floor._waiting == 1 or order[-1] == 1)

    measuring = threading.Thread(target=pairs)
    measuring.start()
    inside.wait(5)
    asking = threading.Thread(target=ask)
    asking.start()
    measuring.join(5), asking.join(5)
    assert order == [0, "answer", "answer", 1]


def test_who_waits_can_leave():
    floor, cancel = Floor(), Cancel()
    with floor.alone("busy", Cancel()):
        with pytest.raises(QueueFull, match="0.05 s"):
            floor.admitted(lambda _: answer(), Cancel(), limit=0.05)
        cancel.set()
        events = list(floor.admitted(lambda _: answer(), cancel))
        assert events[0].finish == "cancelled" and events[-1].last and events[-1].error is None
        with pytest.raises(Cancelled):
            with floor.inside(cancel):
                pass
        assert floor._waiting == 0
    kept = floor.admitted(lambda _: answer(), Cancel())
    with pytest.raises(Cancelled):
        with floor.alone("never", cancel):
            pass
    assert floor.held == "" and next(kept) == replace(LAST, index=0, timing=None, text="a", ids=(1,))
