"""Batches from the page and from Gradio's client: the same rows in outputs/batch/, and going on under the same name."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import gradio as gr
import httpx
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from gainz_ui.i18n import tr
from gainz_ui.services.records import Records
from gainz_ui.services.tasks import Tasks
from gainz_ui.tabs import batch as tab
from tests.api_fakes import FakeStudio
from tests.test_batch import lines, task
from tests.test_gradio_client import serving


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batch")
    with serving(folder) as (studio, url):
        studio.records = Records(folder / "logs", folder / "outputs")
        yield studio, Client(url, verbose=False), url, folder


def test_batch_by_gradios_client(site):
    studio, client, _, folder = site
    tasks = [task(i) for i in range(5)]
    seen = list(client.submit(tasks, "tiny", "mine", api_name="/batch"))
    assert seen[-1]["state"] == "done" and seen[-1]["done"] == 5 and [row["task_id"] for row in seen[-1]["rows"]] == [f"t{i}" for i in range(5)]
    asked = len(studio.requests)
    assert client.predict(tasks, "tiny", "mine", api_name="/batch")["resumed"] == 5 and len(studio.requests) == asked
    assert (folder / "outputs" / "batch" / "mine.results.jsonl").is_file()
    for given, words in (([task(1), task(1)], "stands on line 1"), ([{"prompt": "a"}], "no task_id"), (["x"], "list of objects"), ([task(9)], "other tasks")):
        with pytest.raises(AppError, match=words):
            client.predict(given, "tiny", "mine", api_name="/batch")
    with pytest.raises(AppError, match="no plain name"):
        client.predict(tasks, "tiny", "../escape", api_name="/batch")


def test_leaving_stops_it(site):
    studio, client, _, _ = site
    studio.pace = 0.05
    try:
        job = client.submit([task(i, max_tokens=200) for i in range(9)], "tiny", "left", api_name="/batch")
        while not studio.running or not job.outputs():
            time.sleep(0.01)
        job.cancel()
        deadline = time.monotonic() + 5
        while studio.running and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not studio.running
    finally:
        studio.pace = 0.0


def test_an_endpoint_that_there_is_not_is_a_404(site):
    _, _, url, _ = site
    for path in ("/gradio_api/call/nonsense", "/gradio_api/run/nonsense"):
        answer = httpx.post(url + path, json={"data": []})
        assert answer.status_code == 404 and answer.json()["error"]["remedy"], path


# ---------------------------------------------------------------------------------------------- the tab
@pytest.fixture
def running(tmp_path):
    studio = FakeStudio()
    studio.records = Records(tmp_path / "logs", tmp_path / "outputs")
    parts = {name: name for name in ("run", "pause", "resume", "cancel", "work", "files")}
    return tab.Running(SimpleNamespace(studio=studio, tasks=Tasks()), parts), tmp_path


def drive(running, file, **given) -> list[dict]:
    async def collect():
        values = {"file": str(file) if file else None, "model": "tiny", "name": "", "attempts": 3, "limit": 0, "skip": False, **given}
        return [update async for update in running.start(None, *values.values())]
    return asyncio.run(collect())


def test_the_tab_runs_a_file_and_offers_its_results(running):
    made, folder = running
    (folder / "jobs.jsonl").write_bytes(lines(*(task(i) for i in range(4))))
    *_, last = drive(made, folder / "jobs.jsonl")
    assert tr("en", "batch_done") in last["work"]["value"] and "4 of 4" in last["work"]["value"]
    results = folder / "outputs" / "batch" / "jobs.results.jsonl"
    assert len(results.read_bytes().splitlines()) == 4 and last["files"].value is not None


def test_the_tab_says_what_is_wrong(running):
    made, folder = running
    (folder / "bad.jsonl").write_bytes(lines(task(1)) + b"{\n")
    for file, given, words in ((None, {}, "No file"), (folder / "bad.jsonl", {}, "line 2"), (folder / "bad.jsonl", {"model": None}, "No model")):
        (update,) = drive(made, file, **given)
        assert words in update["work"]["value"] and update["files"].visible is False, "results of an earlier file do not stand under an error"
    (update,) = drive(made, folder / "bad.jsonl")
    assert "1 line cannot be run" in update["work"]["value"] and "the page" in update["work"]["value"]
    *_, last = drive(made, folder / "bad.jsonl", skip=True)
    assert "1 of 1" in last["work"]["value"]


def test_another_file_clears_what_was_said_unless_it_runs(running):
    made, folder = running
    work, files = made.cleared()
    assert work["visible"] is False and files.visible is False
    going = threading.Event()
    made.page.tasks.start(tab.batches.KIND, "x", lambda report, cancel: going.wait(10))
    assert made.cleared() == (gr.skip(), gr.skip())
    going.set()


def test_pause_and_cancel_reach_what_runs(running, monkeypatch):
    made, folder = running
    monkeypatch.setattr(tab, "PERIOD", 0.02)
    made.page.studio.pace = 0.02
    (folder / "long.jsonl").write_bytes(lines(*(task(i) for i in range(200))))
    states = []

    async def watch():
        last = None
        async for update in made.start(None, str(folder / "long.jsonl"), "tiny", "", 3, 0, False):
            last, now = update, made.batches["long"].standing()
            states.append(now.state)
            if now.done >= 3 and "paused" not in states and now.state == "running":
                made._each(lambda one: one.pause())()
            elif now.state == "paused" and states.count("paused") == 3:
                made._each(lambda one: one.resume())()
            elif states.count("paused") >= 3 and now.state == "running":
                made._each(lambda one: one.cancel.set())()
        return last

    last = asyncio.run(watch())
    assert made.batches["long"].standing().state == "cancelled" and tr("en", "batch_cancelled")[:9] in last["work"]["value"]
    assert "paused" in states


@pytest.mark.parametrize("words", ["en", "zh"])
def test_every_state_has_its_words(words):
    for state, key in tab.STATES.items():
        now = SimpleNamespace(done=1, failed=1, total=2, running=0, rate=0.5, tokens_per_second=9.0, seconds_left=3.0, state=state, error=None)
        shown = tab.render(words, "x", now)
        assert tr(words, key) in shown and json.dumps("{") not in shown
