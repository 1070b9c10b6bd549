"""Models that nobody asks give their memory back and come back when they are asked for; whoever comes meanwhile waits and is served."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

from backends import estimate as sizing
from backends.base import Cancel, MemoryEstimate, Request, Sampling
from backends.host import EngineHost
from backends.registry import Registry
from gainz_ui.services.idle import Idle
from gainz_ui.services.studio import Studio
from gainz_ui.settings import Settings

sys.path.insert(0, str(Path(__file__).parent / "fakes"))
from toy_backends.toy import ToyOptions  # noqa: E402


def ask(tokens: int = 3) -> Request:
    return Request("hi", Sampling(max_tokens=tokens))


def text(events) -> str:
    return "".join(event.text for event in events)


def until(truth, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.01)


@pytest.fixture
def host(tmp_path):
    made = EngineHost(logs=tmp_path / "logs", package="toy_backends", engine="toy_engine:ToyEngine", pace=0.002)
    yield made
    made.close()


@pytest.fixture
def toy(host, tmp_path):
    def load(name: str):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "toy.json").write_text("{}")
        return host.load(name, tmp_path / name, "toy", ToyOptions(), lambda _: None, Cancel())
    return load


def test_a_resting_model_has_no_process_and_answers_as_before(host, toy):
    model = toy("a")
    wanted = text(model.generate(ask(), Cancel()))
    assert host.rest("a") and host.resting() == ("a",) and host.state == "idle" and host.beat().rss == 0
    assert set(host.models()) == {"a"} and not host.rest("a")
    events = list(model.generate(ask(), Cancel()))
    assert text(events) == wanted and events[0].progress is not None and events[-1].error is None
    assert host.resting() == () and host.state == "ready"
    assert host.rest("a") and model.tokenize("hi") and host.resting() == ()
    assert host.rest("a")
    host.unload("a")
    assert host.models() == {} and host.resting() == () and not host.rest("a")


def test_one_rests_while_the_other_answers(host, toy):
    one, two = toy("a"), toy("b")
    events = one.generate(ask(200), Cancel())
    next(events)
    assert not host.rest("a") and host.rest("b")            # what answers does not rest
    assert set(host.idle()) == set()
    assert text(events).count("a:") == 199
    assert text(two.generate(ask(2), Cancel())) == "b:0 b:1 "


def test_it_rests_only_after_so_long(host, toy):
    toy("a")
    assert not host.rest("a", 60.0)
    looked = Idle(host, 0.0)
    assert looked.look() == ["a"] == list(host.resting())


def test_who_comes_while_it_goes_to_rest_waits_and_is_served(host, toy):
    toy("b")                                                # keeps the process, so that only the model comes and goes
    model, wrong = toy("a"), []
    wanted = text(model.generate(ask(), Cancel()))

    def work() -> None:
        for n in range(15):
            time.sleep(0.01 * (n % 3))
            events = list(model.generate(ask(), Cancel()))
            if text(events) != wanted or events[-1].error is not None:
                wrong.append(events)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    rests = 0
    while any(thread.is_alive() for thread in threads):
        rests += host.rest("a")
        time.sleep(0.001)
    assert wrong == [] and rests > 0
    until(lambda: host._models["a"].users == 0)             # nothing is held for ever


def test_a_reload_that_fails_is_told_to_who_asked(host, toy, tmp_path):
    model = toy("a")
    assert host.rest("a")
    shutil.move(tmp_path / "a", tmp_path / "elsewhere")
    last = list(model.generate(ask(), Cancel()))[-1]
    assert last.error is not None and host._models["a"].users == 0 and host.missing() == ("a",)
    shutil.move(tmp_path / "elsewhere", tmp_path / "a")
    assert host.missing() == ()
    assert text(model.generate(ask(2), Cancel())) == "a:0 a:1 "


def test_the_setting_puts_models_to_rest_and_the_page_can_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sizing, "estimate", lambda model, options, free=None: MemoryEstimate(1, 1, 1, 1 << 40, 1000, 1000))
    (tmp_path / "models" / "a").mkdir(parents=True)
    (tmp_path / "models" / "a" / "toy.json").write_text("{}")
    settings = Settings(models=tmp_path / "models", outputs=tmp_path / "outputs", logs=tmp_path / "logs", drain=0.2, idle_unload=0.5)
    host = EngineHost(settings.logs, package="toy_backends", engine="toy_engine:ToyEngine", pace=0.002)
    studio = Studio(settings, Registry.scan("toy_backends"), host)
    try:
        studio.load("a")
        until(lambda: studio.snapshot().resting == ("a",))
        assert studio.snapshot().status == "ready" and studio.snapshot().healthy and list(studio.loaded()) == ["a"]
        assert text(studio.submit(ask(2))) == "a:0 a:1 "
        assert studio.snapshot().resting == ()
        until(lambda: studio.snapshot().resting == ("a",))
        studio.unload("a")
        assert studio.loaded() == {}
    finally:
        studio.close()
