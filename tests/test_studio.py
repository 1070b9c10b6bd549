"""The facade over a host of a few lines: catalog, load rules, requests, records, how things stand."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from backends import estimate as sizing
from backends.base import (
    BrokenFile, Cancel, Cancelled, EngineDied, EngineStopping, GainzError, InvalidRequest, MemoryEstimate,
    MissingRequirement, ModelNotFound, ModelNotLoaded, NameRefused, OutOfMemory, QueueFull, Request, Sampling, UnknownFormat)
from backends.host import EngineHost
from backends.registry import Registry
from gainz_ui.services.records import Records, safe_name
from gainz_ui.services.signals import Signal
from gainz_ui.services.studio import Studio
from gainz_ui.settings import Settings

sys.path.insert(0, str(Path(__file__).parent / "fakes"))
FITS = MemoryEstimate(1, 1, 1, 1 << 40, 1000, 1000)


@pytest.fixture
def settings(tmp_path):
    return Settings(models=tmp_path / "models", outputs=tmp_path / "outputs", logs=tmp_path / "logs", drain=0.2)


@pytest.fixture
def studio(settings, monkeypatch):
    monkeypatch.setattr(sizing, "estimate", lambda model, options, free=None: FITS)
    for name in ("a", "b"):
        add(settings, name, **{"toy.json": "{}"})
    host = EngineHost(settings.logs, package="toy_backends", engine="toy_engine:ToyEngine", pace=0.002, queue=4)
    made = Studio(settings, Registry.scan("toy_backends"), host)
    yield made
    made.close()


def add(settings: Settings, name: str, **files: str) -> Path:
    folder = settings.models / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(text)
    return folder


def ask(tokens: int = 3, prompt: str = "secret words", **more) -> Request:
    return Request(prompt, Sampling(max_tokens=tokens), **more)


def text(events) -> str:
    return "".join(event.text for event in events)


def lines(settings: Settings) -> list[dict]:
    return [json.loads(line) for line in (settings.logs / "requests.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------------------------- catalog
def test_catalog_lists_everything_with_the_reason(studio, settings):
    add(settings, "odd", **{"notes.txt": ""})
    add(settings, "half", **{"toy.json": "{}", "weights.part": ""})
    add(settings, "short", **{"toy.json": "{}", "manifest.json": '{"files": [{"path": "toy.json", "size": 9}], "revision": "r1"}'})
    add(settings, "lost", **{"toy.json": "{}", "manifest.json": '{"files": [{"path": "more.json", "size": 9}]}'})
    add(settings, "torn", **{"config.json": "{"})
    add(settings, ".hidden", **{"toy.json": "{}"})
    (settings.models / "README.txt").write_text("")
    (settings.models / "c.gguf.part").write_text("")
    entries = {entry.name: entry for entry in studio.catalog()}
    assert list(entries) == ["a", "b", "c.gguf", "half", "lost", "odd", "short", "torn"]
    assert [name for name, entry in entries.items() if entry.ready] == ["a", "b"]
    assert all("unfinished" in entries[name].reason for name in ("c.gguf", "half", "lost", "short"))
    assert "toy.json has 2 bytes" in entries["short"].reason and entries["short"].revision == "r1"
    assert entries["odd"].code == "unknown_format" and entries["torn"].code == "broken_file"
    assert entries["a"].backend == "toy" and entries["a"].format == "toy" and entries["a"].size == 2
    for name, kind in (("half", UnknownFormat), ("odd", UnknownFormat), ("torn", BrokenFile)):
        with pytest.raises(kind):
            studio.load(name)


def test_a_file_beside_a_folder_of_its_name_keeps_its_ending(studio, settings):
    (settings.models / "a.gguf").write_text("")
    (settings.models / "z.gguf").write_text("")
    assert [entry.name for entry in studio.catalog()] == ["a", "a.gguf", "b", "z"]


@pytest.mark.parametrize("name", ["../a", "a/b", "..", "", "a\\b"])
def test_a_name_that_is_a_path_is_refused(studio, name):
    with pytest.raises(NameRefused):
        studio.entry(name)


def test_unknown_names_list_the_known_ones(studio):
    for act in (studio.entry, studio.load, studio.unload, studio.model, studio.options_for):
        with pytest.raises(ModelNotFound, match="a, b"):
            act("nothing")
    with pytest.raises(ModelNotLoaded):
        studio.model("a")
    with pytest.raises(ModelNotLoaded, match="No model"):
        studio.submit(ask())


# ---------------------------------------------------------------------------------------------- load and unload
def test_the_last_loaded_model_answers_where_none_is_named(studio):
    studio.load("a"), studio.load("b")
    assert text(studio.submit(ask(1))) == "b:0 " and text(studio.submit(ask(1), "a")) == "a:0 "
    studio.unload("b")
    assert text(studio.submit(ask(1))) == "a:0 " and list(studio.loaded()) == ["a"]


def test_a_draft_answers_where_none_is_named_only_if_nothing_else_is_there(studio):
    toy, = studio.registry.backends
    studio.load("a")
    studio.registry = Registry((replace(toy, helper=True),))
    studio.load("b")
    assert text(studio.submit(ask(1))) == "a:0 " and studio.entry("b").helper
    studio.unload("a")
    assert text(studio.submit(ask(1))) == "b:0 "


def test_a_second_load_only_reloads_for_other_options_and_says_so(studio):
    seen = []
    first = studio.load("a", {"streams": 2})
    assert studio.load("a", {"streams": 2}, seen.append) == first
    assert [report.note for report in seen] == ["already loaded with these options"]
    again = studio.load("a", {"streams": 3}, seen.append)
    assert dict(again.options)["streams"] == 3 and "streams 2 → 3" in seen[1].note
    assert text(studio.submit(ask(1), "a")) == "a:0 "


def test_a_reload_that_could_not_fit_leaves_what_works(studio, monkeypatch):
    studio.load("a", {"streams": 2})
    monkeypatch.setattr(sizing, "estimate", lambda *_: MemoryEstimate(600, 500, 100, 1000, 64, 32))
    with pytest.raises(OutOfMemory):
        studio.load("a", {"streams": 3})
    assert text(studio.submit(ask(1), "a")) == "a:0 "


def test_a_reload_with_an_impossible_option_never_gives_up_what_works(studio):
    studio.load("a", {"streams": 2})
    answer, seen = studio.submit(ask(100_000), "a"), []
    next(answer)
    with pytest.raises(MissingRequirement, match="no such device"):
        studio.load("a", {"fault": "option"}, seen.append)
    assert next(answer).text and not any(report.stage == "unload" for report in seen)      # the running answer went on
    answer.close()
    assert dict(studio.loaded()["a"].options)["streams"] == 2 and text(studio.submit(ask(1))) == "a:0 "


@pytest.mark.parametrize("fault,kind", [("memory", OutOfMemory), ("raise", GainzError), ("die", EngineDied)])
def test_a_reload_that_fails_half_way_has_the_old_one_back(studio, fault, kind):
    studio.load("a", {"streams": 2}), studio.load("b")
    with pytest.raises(kind) as caught:
        studio.load("a", {"fault": fault})
    assert "comes back" in caught.value.evidence["kept"]
    assert dict(studio.loaded()["a"].options) == {**dict(studio.loaded()["a"].options), "streams": 2, "fault": ""}
    assert text(studio.submit(ask(1), "a")) == "a:0 "
    assert text(studio.submit(ask(1))) == "b:0 "                   # and at its place among the others


def test_a_cancelled_reload_has_the_old_one_back(studio):
    studio.load("a", {"streams": 2})
    cancel = Cancel()
    with pytest.raises(Cancelled):
        studio.load("a", {"load_ms": 20_000}, lambda report: cancel.set() if report.stage == "read" else None, cancel)
    assert dict(studio.loaded()["a"].options)["streams"] == 2 and text(studio.submit(ask(1))) == "a:0 "


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_second_load_brings_a_dead_engine_back(studio):
    studio.load("a")
    os.kill(studio.host._link.pid, signal.SIGKILL)
    while studio.snapshot().status != "dead":
        time.sleep(0.01)
    assert studio.load("a").name == "a" and studio.snapshot().status == "ready"


def test_the_same_name_loaded_from_two_sides_is_loaded_once(studio):
    found = []
    threads = [threading.Thread(target=lambda: found.append(studio.load("a", {"load_ms": 200}))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1]


def test_what_cannot_fit_is_refused_before_anything_starts(studio, monkeypatch):
    monkeypatch.setattr(sizing, "estimate", lambda *_: MemoryEstimate(600, 500, 100, 1000, 64, 32))
    with pytest.raises(OutOfMemory) as caught:
        studio.load("a")
    assert caught.value.evidence["needed"] == 1200 and caught.value.evidence["free"] == 1000
    assert "32 tokens" in caught.value.remedy and studio.host.state == "idle" and studio.loaded() == {}


def test_options_are_those_of_the_backend(studio):
    assert studio.options_for("a").__name__ == "ToyOptions" and studio.estimate("a", {"streams": 2}) == FITS
    with pytest.raises(InvalidRequest, match="stream"):
        studio.load("a", {"stream": 1})
    with pytest.raises(InvalidRequest, match="streams"):
        studio.load("a", {"streams": 0})


def test_a_load_shows_in_the_snapshot_and_can_be_cancelled(studio):
    cancel, told = Cancel(), []
    studio.changed.subscribe(lambda: told.append(len(studio.snapshot().loading)))

    def progress(report):
        if report.stage == "read" and report.done > 2:
            seen = studio.snapshot()
            assert seen.loading[0].name == "a" and seen.status == "loading" and not seen.healthy and "loading a" in seen.reason
            cancel.set()

    with pytest.raises(Cancelled):
        studio.load("a", {"load_ms": 20_000}, progress, cancel)
    assert told[0] == 1 and told[-1] == 0 and studio.loaded() == {}


# ---------------------------------------------------------------------------------------------- requests and records
def test_every_request_leaves_a_line_without_its_content(studio, settings):
    studio.load("a")
    list(studio.submit(ask(3, id="r1")))
    with pytest.raises(InvalidRequest):
        studio.submit(ask(3, "refuse", id="r2"))
    stopped = studio.submit(ask(100_000, id="r3"))
    next(stopped)
    stopped.close()
    first, second, third = lines(settings)
    assert (first["id"], first["model"], first["completion_tokens"], first["finish"], first["error"]) == ("r1", "a", 3, ["length"], None)
    assert first["total_s"] > 0 and (second["id"], second["error"]) == ("r2", "invalid_request")
    assert (third["id"], third["finish"]) == ("r3", ["cancelled"])
    assert "secret" not in (settings.logs / "requests.jsonl").read_text() + (settings.logs / "engine.log").read_text()


def test_content_is_written_only_when_asked_for(studio, settings):
    studio.records = Records(settings.logs, settings.outputs, content=True)
    studio.load("a")
    list(studio.submit(ask(2)))
    assert lines(settings)[0]["prompt"] == "secret words" and lines(settings)[0]["answers"] == ["a:0 a:1 "]


def test_ids_are_given_and_differ(studio, settings):
    studio.load("a")
    list(studio.submit(ask(1))), list(studio.submit(ask(1)))
    first, second = (line["id"] for line in lines(settings))
    assert first != second and len(first) == 16


def test_the_queue_is_bounded(studio):
    studio.load("a")
    running = [studio.submit(ask(100_000)) for _ in range(4)]
    with pytest.raises(QueueFull):
        studio.submit(ask())
    for answer in running:
        answer.close()


def test_the_settings_time_limit_is_everyones(studio, monkeypatch):
    seen = []
    studio.settings = replace(studio.settings, time_limit=7.0)
    studio.load("a")
    host = studio.host
    real = host.answer
    monkeypatch.setattr(host, "answer", lambda loaded, request, cancel: seen.append(request.time_limit) or real(loaded, request, cancel))
    list(studio.submit(ask(1))), list(studio.submit(ask(1, time_limit=2.0)))
    assert seen == [7.0, 2.0]


def test_the_log_turns_over_and_keeps_five(tmp_path):
    records = Records(tmp_path, tmp_path, rotate=100)
    for number in range(20):
        records.line({"number": number, "padding": "x" * 100})
    records.close()
    kept = sorted(path.name for path in tmp_path.glob("requests*.jsonl"))
    assert kept == [f"requests.{n}.jsonl" for n in range(1, 6)]
    assert json.loads((tmp_path / "requests.1.jsonl").read_text())["number"] == 19


def test_a_log_that_cannot_be_written_costs_no_answer(studio, settings, caplog):
    settings.logs.mkdir(exist_ok=True)
    (settings.logs / "requests.jsonl").mkdir()
    studio.load("a")
    assert text(studio.submit(ask(2))) == "a:0 a:1 " and "cannot be written" in caplog.text


@pytest.mark.parametrize("name", ["../x", "a/b", "a\\b", ".hidden", "", "CON", "com1.txt", "x..y", "a.", "a\0b", "a\nb", "x" * 200])
def test_a_name_that_leaves_its_folder_is_refused(tmp_path, name):
    records = Records(tmp_path / "logs", tmp_path / "outputs")
    for kind, file in ((name, "x"), ("exports", name)):
        with pytest.raises(NameRefused):
            records.write_output(kind, file, "x")
    assert not (tmp_path / "outputs").exists() or not any((tmp_path / "outputs").rglob("*"))


def test_results_are_written_whole(tmp_path):
    records = Records(tmp_path, tmp_path / "outputs")
    path = records.write_output("exports", "对话 1.json", {"text": "é"})
    assert path == tmp_path / "outputs" / "exports" / "对话 1.json" and json.loads(path.read_text()) == {"text": "é"}
    assert records.output("exports", "对话 1.json") == path and records.outputs_of("exports") == [path]
    assert safe_name("对话 1.json") == "对话 1.json" and records.outputs_of("nothing") == []


# ---------------------------------------------------------------------------------------------- how things stand
def test_status_from_idle_to_stopping(studio):
    assert (studio.snapshot().status, studio.snapshot().healthy) == ("idle", True)
    with studio.not_ready("fetching the starter model"):
        held = studio.snapshot()
        assert (held.status, held.healthy, held.reason) == ("starting", False, "fetching the starter model")
    studio.load("a")
    ready = studio.snapshot()
    assert (ready.status, ready.healthy, [info.name for info in ready.models]) == ("ready", True, ["a"])
    assert ready.memory.engine > 1 << 20 and ready.memory.total > ready.memory.available > 0 and ready.queue_limit == 256
    studio.close()
    assert studio.snapshot().status == "stopping"
    with pytest.raises(EngineStopping):
        studio.submit(ask())


def test_a_folder_of_everything_is_no_model(studio, settings):
    """A link to somebody's home must not be walked for minutes."""
    folder = add(settings, "home")
    for n in range(5001):
        (folder / f"f{n}").touch()
    entry = studio.entry("home")
    assert entry.code == "broken_file" and "5000" in entry.reason and not entry.ready


def test_a_loaded_model_whose_files_are_gone_is_told(studio, settings):
    studio.load("a")
    assert studio.snapshot().missing == ()
    (settings.models / "a" / "toy.json").unlink()
    (settings.models / "a").rmdir()
    assert studio.snapshot().missing == ("a",) and text(studio.submit(ask(2))) == "a:0 a:1 "


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_dead_engine_is_unhealthy_until_it_is_back(studio, settings):
    studio.load("a")
    answer = studio.submit(ask(100_000))
    next(answer)
    os.kill(studio.host._link.pid, signal.SIGKILL)
    assert isinstance(list(answer)[-1].error, EngineDied)
    dead = studio.snapshot()
    assert (dead.status, dead.healthy, list(studio.loaded())) == ("dead", False, ["a"]) and "memory" in dead.reason
    assert lines(settings)[0]["error"] == "engine_died"
    assert text(studio.submit(ask(2))) == "a:0 a:1 " and studio.snapshot().healthy


def test_a_stuck_engine_is_unhealthy_and_can_be_restarted(studio, monkeypatch):
    monkeypatch.setattr("gainz_ui.services.studio.STUCK_SECONDS", 0.3)
    studio.load("a")
    answer = studio.submit(ask(3, "hang"))
    deadline = time.monotonic() + 3
    while (seen := studio.snapshot()).status != "stuck" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert seen.status == "stuck" and not seen.healthy and "no step" in seen.reason
    studio.restart()
    assert isinstance(list(answer)[-1].error, EngineDied)


def test_a_snapshot_is_cheap_while_the_engine_works(studio):
    studio.load("a")
    answers = [studio.submit(ask(100_000)) for _ in range(4)]
    time.sleep(0.6)
    took = []
    for _ in range(50):
        began = time.perf_counter()
        snapshot = studio.snapshot()
        took.append(time.perf_counter() - began)
    assert sorted(took)[25] < 0.005 and snapshot.running == 4
    for answer in answers:
        answer.close()


def test_a_listener_that_fails_does_not_silence_the_others(caplog):
    signal_, heard = Signal(), []
    signal_.subscribe(lambda: 1 / 0)
    leave = signal_.subscribe(lambda: heard.append(1))
    signal_.emit()
    leave(), leave()
    signal_.emit()
    assert heard == [1] and signal_.version == 2 and "ZeroDivisionError" in caplog.text
