"""The benchmark against a Gainz that serves: by Gradio's client, and with that Gainz as a remote side. Tiny models, real engines."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import gradio as gr
import pytest
from gradio_client import Client

from backends.base import Cancel
from gainz_ui import api_names, server
from gainz_ui.services.bench.asking import AT_MOST
from gainz_ui.services.bench.configs import Config
from gainz_ui.services.bench.protocol import Design
from gainz_ui.services.bench.run import Ask, bench
from gainz_ui.services.bench.workloads import from_file
from gainz_ui.services.studio import Studio
from gainz_ui.settings import Settings

MODEL = Path(__file__).parent / "fixtures" / "llama-fp16"
TEMPLATE = "You are a helpful assistant who answers short and well.{% for m in messages %} {{ m.role }}: {{ m.content }}{% endfor %} assistant:"


def folders(home: Path) -> Settings:
    """With the model, and a template of chats whose words come before what is asked."""
    (home / "models" / MODEL.name).mkdir(parents=True)
    for path in MODEL.iterdir():
        (home / "models" / MODEL.name / path.name).symlink_to(path)
    (home / "models" / MODEL.name / "chat_template.jinja").write_text(TEMPLATE)
    return Settings(models=home / "models", outputs=home / "outputs", logs=home / "logs")


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """(house, address) of a Gainz with one tiny model in memory."""
    made = server.furnish(folders(tmp_path_factory.mktemp("there")))

    def page(house):
        with gr.Blocks(analytics_enabled=False) as demo:
            api_names.register(house.studio, house.jobs)
        return demo

    with server.bind("127.0.0.1", 0) as bound:
        running = server.make_server(server.build_app(made, page), made)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        made.studio.load(MODEL.name, {"context": 512, "streams": 1})
        while not running.started:
            time.sleep(0.02)
        yield made, f"http://127.0.0.1:{bound.getsockname()[1]}"
        running.handle_exit(15, None)
        thread.join(20)


@pytest.fixture(scope="module")
def client(house):
    return Client(house[1], verbose=False)


def kept(house) -> list[dict]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in house[0].studio.records.outputs_of("bench")]


def test_by_gradios_client(house, client):
    seen = list(client.submit(MODEL.name, f"{MODEL.name},kv_type=int8", "prose-en-short-8", 6, api_name="/benchmark"))
    assert {"calibrate", "measure"} <= {piece["stage"] for piece in seen}
    report = seen[-1]
    assert report["stage"] == "done" and len(report["pairs"]) == 6 and report["cause"] == "kv_type" and report["interval"]
    assert [one["name"] for one in kept(house)] == [report["name"]]


def test_a_client_that_leaves_stops_it_and_what_is_done_is_kept(house, client):
    before, job = len(kept(house)), client.submit(MODEL.name, MODEL.name, "prose-en-short-8", 5000, api_name="/benchmark")
    for piece in job:
        if piece["stage"] == "measure" and piece["done"] >= 2:
            job.cancel()
            break
    end = time.monotonic() + 20
    while len(kept(house)) == before:
        assert time.monotonic() < end, "nothing was kept"
        time.sleep(0.05)
    report = max(kept(house), key=lambda one: len(one["pairs"]) * one["cancelled"])
    assert report["cancelled"] and 2 <= len(report["pairs"]) < 5000


def test_here_against_another_gainz(house, tmp_path):
    """The same model on both sides reads the same tokens, and nothing of a cold question is in a cache."""
    settings = folders(tmp_path / "here")
    (settings.models / "far").mkdir()
    (settings.models / "far" / "manifest.json").write_text(json.dumps({"remote": {"address": f"{house[1]}/v1", "model": MODEL.name}}))
    (tmp_path / "mine.txt").write_text("\n".join(f"What is the name of the river number {n} in this country?" for n in range(6)))
    sides, found, studio = (Config(MODEL.name), Config("far")), {}, Studio(settings)
    try:
        for mode in ("cold", "warm"):
            design = Design(from_file(tmp_path / "mine.txt", 8), pairs=8, mode=mode)
            found[mode] = bench(studio, Ask(sides, design), "test", lambda _: None, Cancel())
    finally:
        studio.close()
    for mode, report in found.items():
        assert len(report["pairs"]) == 8 and report["units"] == 6 and report["interval"] and report["cause"] == "model"
        assert report["b"]["resolved"]["path"] == "remote" and report["b"]["decode"] > 0 and report["b"]["memory"]["weights"] is None
        for pair in report["pairs"]:
            assert pair["a"]["tokens"] == pair["b"]["tokens"] == 8
            assert abs(pair["a"]["prompt_tokens"] - pair["b"]["prompt_tokens"]) <= 1, mode
            assert mode == "warm" or pair["a"]["cached"] == 0 and pair["b"]["cached"] <= AT_MOST
    assert found["warm"]["pairs"][-1]["b"]["cached"] > AT_MOST, "the second round of questions"
