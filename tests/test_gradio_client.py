"""Gradio's client against our names (cases GR-09, GR-05): the frozen list, each name called, streams, errors, leaving."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager

import gradio as gr
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from backends.base import Progress
from gainz_ui import api_names, server
from gainz_ui.services.jobs import Jobs
from gainz_ui.services.startup import Startup
from gainz_ui.services.store import Store
from gainz_ui.services.tasks import Tasks
from gainz_ui.settings import Settings
from tests.api_fakes import FULL, INFO, FakeStudio

FROZEN = {"/batch", "/benchmark", "/chat", "/compare", "/generate", "/load", "/models", "/monitor", "/quantize", "/unload"}       # README and other people's scripts call these


@contextmanager
def serving(folder, page=None, after=lambda: None, **more):
    """The whole application over a studio without an engine. ``page``: makes the Blocks; else one of only the public names.
    ``after``: called when the server has been told to end."""
    settings = Settings(models=folder / "models", outputs=folder / "outputs", logs=folder / "logs", **more)
    studio, tasks = FakeStudio(settings), Tasks()
    store = Store(settings.models)
    house = server.House(settings, studio, store, tasks, Startup(settings, studio, store, tasks), Jobs(settings.models))

    def bare(house):
        with gr.Blocks(analytics_enabled=False) as demo:
            api_names.register(house.studio, house.jobs)
        return demo

    with server.bind("127.0.0.1", 0) as bound:
        app = server.build_app(house, page or bare)
        made = server.make_server(app, house)
        thread = threading.Thread(target=made.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        while not made.started:
            time.sleep(0.02)
        yield studio, f"http://127.0.0.1:{bound.getsockname()[1]}"
        made.handle_exit(15, None)
        after()
        thread.join(20)
        assert not thread.is_alive(), "the server does not stop while a client is connected"
        assert studio.closed.wait(5)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("site")) as (studio, url):
        yield studio, Client(url, verbose=False), url


@pytest.fixture
def studio(site):
    studio, fresh = site[0], FakeStudio()
    for name in ("pace", "prefill", "fail", "break_after", "present"):
        setattr(studio, name, getattr(fresh, name))
    studio.requests.clear()
    return studio


@pytest.fixture
def client(site):
    return site[1]


def test_gr_09_the_names_are_the_frozen_ones(client):
    named = client.view_api(return_format="dict")["named_endpoints"]
    assert set(named) == FROZEN == set(api_names.NAMES)
    assert client.view_api(return_format="dict")["unnamed_endpoints"] == {}


def test_gr_09_the_real_page_has_the_frozen_names_and_no_doubles(tmp_path):
    house = server.furnish(Settings(models=tmp_path / "m", outputs=tmp_path / "o", logs=tmp_path / "l"))
    try:
        demo = server._page(house)
        public = [dependency["api_name"] for dependency in demo.config["dependencies"] if dependency["api_visibility"] == "public"]
        assert sorted("/" + name for name in public) == sorted(FROZEN)
    finally:
        house.studio.close()


def test_an_unknown_name_is_an_error_and_not_another_function(client):
    with pytest.raises(ValueError, match="/nonsense"):
        client.predict("a", api_name="/nonsense")


def test_generate_gives_the_whole_answer_at_the_end(studio, client):
    answer = client.predict("The capital of France is", 3, api_name="/generate")
    assert answer["text"] == "w0 w1 w2 " and answer["finish_reason"] == "length" and answer["model"] == "tiny"
    assert (answer["prompt_tokens"], answer["completion_tokens"]) == (3, 3)
    assert answer["timing"]["ttft_seconds"] == 0.01


def test_monitor_tells_figures_and_no_content(studio, client):
    studio.meter.ended({"id": "7", "model": "tiny", "backend": "fake", "finish": ["stop"], "ttft_s": 0.5, "decode_tps": 20.0, "prompt_tokens": 4})
    told = client.predict(api_name="/monitor")
    assert told["ttft"]["p50"] == 0.5 and told["tpot"]["p99"] == 0.05 and told["recent"][0]["id"] == "7"
    assert told["models"][0]["pages_used"] == 3 and told["queue_limit"] == 256
    assert not {"prompt", "text", "answers"} & set(told["recent"][0])


def test_generate_streams_what_is_there_so_far(studio, client):
    studio.pace = 0.02
    seen = [piece["text"] for piece in client.submit("a", 30, api_name="/generate")]
    assert len(seen) >= 4
    assert all(later.startswith(earlier) for earlier, later in zip(seen, seen[1:]))
    assert seen[-1] == "".join(studio.words[i % 32] for i in range(30))


def test_every_sampling_field_arrives_and_unknown_names_are_refused(studio, client):
    client.predict("a", 2, 0.5, 0.9, 7, ["x"], None, top_k=3, stop_ids=[4], logit_bias={"5": -1}, ignore_eos=True,
                   draft="lookup", draft_length=3, time_limit=5, api_name="/generate")
    request = studio.requests[-1]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed, sampling.stop) == (2, 0.5, 0.9, 7, ("x",))
    assert (sampling.top_k, sampling.stop_ids, sampling.logit_bias, sampling.ignore_eos) == (3, (4,), ((5, -1.0),), True)
    assert (request.draft.name, request.draft.length, request.time_limit) == ("lookup", 3, 5)
    with pytest.raises(TypeError, match="topk"):
        client.predict("a", topk=3, api_name="/generate")
    with pytest.raises(AppError, match="draft_length is given without a draft"):
        client.predict("a", draft_length=3, api_name="/generate")


@pytest.mark.parametrize("name,given,field", [
    ("/generate", {"prompt": None}, "prompt"), ("/generate", {"prompt": 5}, "prompt"), ("/generate", {"prompt": "a", "stop": 5}, "stop"),
    ("/generate", {"prompt": "a", "stop_ids": "x"}, "stop_ids"), ("/generate", {"prompt": "a", "logit_bias": "x"}, "logit_bias"),
    ("/generate", {"prompt": "a", "ignore_eos": "yes"}, "ignore_eos"), ("/generate", {"prompt": "a", "draft": 5}, "draft"),
    ("/generate", {"prompt": "a", "max_tokens": "5"}, "max_tokens"), ("/generate", {"prompt": "a", "time_limit": "x"}, "time_limit"),
    ("/generate", {"prompt": "a", "model": ["a"]}, "model"), ("/load", {"name": ["a"]}, "name"), ("/load", {"name": "a", "options": 5}, "options"),
    ("/benchmark", {"a": "a", "b": "b", "pairs": "x"}, "pairs"), ("/benchmark", {"a": "a", "b": "b", "seed": "x"}, "seed"),
    ("/chat", {"message": None}, "message"), ("/chat", {"message": "a", "system": 5}, "system"), ("/chat", {"message": "a", "history": "x"}, "history"),
    ("/chat", {"message": "a", "history": [5]}, "history"),
    ("/chat", {"message": "a", "history": [{"role": "bogus", "content": "x"}]}, "role")])
def test_a_value_of_the_wrong_kind_is_refused_by_its_name(studio, client, name, given, field):
    with pytest.raises(AppError, match=field):
        client.predict(api_name=name, **given)
    assert not studio.requests


def test_one_stop_as_a_text_is_one_stop(studio, client):
    client.predict("a", 2, stop="xyz", api_name="/generate")
    assert studio.requests[-1].sampling.stop == ("xyz",)


def test_without_stream_only_the_whole_answer_comes(studio, client):
    studio.pace = 0.02
    (only,) = client.submit("a", 30, stream=False, api_name="/generate")
    assert only["finish_reason"] == "length" and only["completion_tokens"] == 30


def test_chat_brings_history_and_system(studio, client):
    answer = client.predict("And you?", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "Be brief.",
                            max_tokens=2, api_name="/chat")
    assert answer["text"] == "w0 w1 "
    assert [(turn.role, turn.content) for turn in studio.requests[-1].prompt] == [
        ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "And you?")]
    with pytest.raises(AppError, match="history"):
        client.predict("a", [{"role": "user", "text": "x"}], api_name="/chat")


def test_models_load_unload(studio, client):
    (entry,) = client.predict(api_name="/models")
    assert entry["folder"] == "models/tiny" and entry["name"] == "tiny" and entry["loaded"] is True and entry["reason"] == ""
    assert entry["bytes"] == entry["size"]              # as `models --json` calls it
    assert client.predict("tiny", api_name="/unload") == {"unloaded": "tiny"}
    with pytest.raises(AppError, match="No model is loaded"):
        client.predict("a", api_name="/generate")
    loaded = client.predict("tiny", {}, api_name="/load")
    assert loaded["name"] == "tiny" and loaded["decoder"] == "fused"
    with pytest.raises(AppError, match="no model 'absent'"):
        client.predict("absent", api_name="/load")


def test_compare_yields_all_answers_as_they_grow(studio, client):
    studio.present, studio.pace = {"tiny": INFO, "small": INFO}, 0.02
    seen = list(client.submit("Hi", ["tiny", "small"], 30, options={"top_p": 0.9, "top_k": 3}, api_name="/compare"))
    last = seen[-1]
    assert len(seen) >= 2 and last["mode"] == "at once" and last["reference"] == "tiny"
    assert [(answer["model"], answer["state"], answer["tokens"]) for answer in last["answers"]] == [("tiny", "done", 30), ("small", "done", 30)]
    assert last["answers"][1]["parts_at_token"] is None and last["answers"][0]["text"].startswith("w0 w1 w2 ")
    assert {request.sampling.seed for request in studio.requests} == {last["seed"]} and studio.requests[0].sampling.top_p == 0.9
    with pytest.raises(AppError, match="2 to 4 different models"):
        client.predict("Hi", ["tiny"], api_name="/compare")
    with pytest.raises(AppError, match="no model 'absent'"):
        client.predict("Hi", ["tiny", "absent"], api_name="/compare")


@pytest.mark.parametrize(("given", "words"), [
    (dict(models=5), "models takes a list"), (dict(options=3), "options takes an object"), (dict(system=7), "must be text"),
    (dict(prompt=7), "must be text"), (dict(prompt=["a"], plain=True), "prompt must be text"), (dict(seed=1.5), "seed"),
    (dict(draft_length=4), "draft_length is given without a draft"), (dict(options={"logit_bias": {"a": 1}}), "maps token ids to numbers"), (dict(options={"heat": 1}), "heat")])
def test_a_value_of_the_wrong_kind_is_one_clear_error(studio, client, given, words):
    studio.present = {"tiny": INFO, "small": INFO}
    with pytest.raises(AppError, match=words):
        client.predict(**{"prompt": "Hi", "models": ["tiny", "small"], **given}, api_name="/compare")


def test_leaving_a_comparison_stops_it(studio, client):
    studio.present, studio.pace = {"tiny": INFO, "small": INFO}, 0.02
    job = client.submit("Hi", ["tiny", "small"], 5000, api_name="/compare")
    deadline = time.monotonic() + 10
    while (studio.running < 2 or not job.outputs()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert studio.running == 2
    job.cancel()
    deadline = time.monotonic() + 5
    while studio.running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert studio.running == 0


def test_quantize_tells_how_far_it_is_and_gives_the_manifest(site, studio, client, monkeypatch):
    def run(jobs, command, arguments, progress, cancel, need=0):
        progress(Progress("quantize", 3, 30, "layer 3"))
        time.sleep(0.6)
        return {"name": arguments[arguments.index("--out") + 1], "given": arguments, "files": [{"path": "model.safetensors", "size": 1}]}

    monkeypatch.setattr(Jobs, "run", run)
    seen = list(client.submit("tiny", "awq", options={"samples": 8, "mse": False}, api_name="/quantize"))
    assert {"stage": "quantize", "done": 3, "total": 30, "note": "layer 3"} in seen
    assert seen[-1]["stage"] == "done" and seen[-1]["name"] == "tiny-awq-4bit-g64"
    assert seen[-1]["given"] == ["--model", "tiny", "--out", "tiny-awq-4bit-g64", "--method=awq", "--no-mse", "--samples=8"]
    with pytest.raises(AppError, match="AWQ files hold 4-bit weights"):
        client.predict("tiny", "awq", 3, api_name="/quantize")
    with pytest.raises(AppError, match="Groups of 128 do not divide"):
        client.predict("tiny", "gptq", 4, 128, api_name="/quantize")
    with pytest.raises(AppError, match="There is no file /nowhere"):
        client.predict("tiny", text="/nowhere", api_name="/quantize")
    with pytest.raises(AppError, match="Unknown option 'sample'"):
        client.predict("tiny", options={"sample": 1}, api_name="/quantize")


def test_errors_say_what_and_what_to_do(studio, client):
    with pytest.raises(AppError, match="max_tokens must be from 0"):
        client.predict("a", -1, api_name="/generate")
    studio.fail = FULL
    with pytest.raises(AppError, match="Too many requests.*Try again in a moment"):
        client.predict("a", api_name="/generate")
    studio.fail, studio.break_after = None, 1
    with pytest.raises(AppError, match="The step failed"):
        client.predict("a", 5, api_name="/generate")


def test_sv_02_a_client_hears_the_end_of_its_answer_when_the_server_ends(tmp_path):
    ended = []
    with serving(tmp_path, after=lambda: ended.append(job.result(timeout=10))) as (studio, url):
        studio.pace = 0.02
        job = Client(url, verbose=False).submit("a", 5000, api_name="/generate")
        while studio.steps < 10:
            time.sleep(0.02)
    assert ended[0]["finish_reason"] == "cancelled" and ended[0]["text"].startswith("w0 w1 w2 ")


@pytest.mark.parametrize("prefill", [0.0, 30.0])
def test_cancelling_a_job_stops_the_work(studio, client, prefill):
    studio.pace, studio.prefill = 0.02, prefill
    job = client.submit("a", 5000, api_name="/generate")
    deadline = time.monotonic() + 10
    while studio.running == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    job.cancel()
    deadline = time.monotonic() + 3
    while studio.running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert studio.running == 0


def test_gr_05_long_answers_do_not_hold_up_the_rest(studio, client):
    studio.pace = 0.02
    jobs = [client.submit("a", 5000, api_name="/generate") for _ in range(5)]
    deadline = time.monotonic() + 10
    while studio.running < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert studio.running == 5                       # no limit of Gradio's: the engine admits
    began = time.monotonic()
    client.predict(api_name="/models")
    assert time.monotonic() - began < 10                # an answer takes a hundred
    for job in jobs:
        job.cancel()
    deadline = time.monotonic() + 5
    while studio.running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert studio.running == 0


def test_the_page_and_its_files_obey_the_guard(site):
    _, _, url = site
    import httpx
    assert httpx.get(url + "/config", headers={"host": "evil.example"}).status_code == 403
    assert httpx.post(url + "/gradio_api/upload", files={"files": b"x"}, headers={"origin": "https://evil.example"}).status_code == 403
    page = httpx.get(url + "/")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]


def test_gr_03_with_a_key_page_and_client_need_it(tmp_path):
    import httpx
    with serving(tmp_path, api_key="secret") as (studio, url):
        for path in ("/", "/config", "/gradio_api/info", "/gradio_api/startup-events", "/gradio_api/heartbeat/x", "/metrics",
                     "/gradio_api/queue/status", "/openapi.json", "/theme.css", "/gradio_api/app_id"):
            assert httpx.get(url + path).status_code == 401, path
        for path in ("/gradio_api/upload", "/gradio_api/call/generate", "/gradio_api/queue/join", "/gradio_api/cancel",
                     "/gradio_api/reset", "/generate"):
            assert httpx.post(url + path, json={}).status_code == 401, path
        assert "secret" not in httpx.get(url + "/config", auth=("me", "secret")).text
        client = Client(url, headers={"Authorization": "Bearer secret"}, verbose=False)
        studio.present = {"tiny": INFO, "small": INFO}
        for call in (lambda: client.predict("a", 2, api_name="/generate"), lambda: client.predict("a", max_tokens=2, api_name="/chat"),
                     lambda: client.predict("a", ["tiny", "small"], 2, api_name="/compare")):
            assert call() and studio.requests[-1].key == "settings"         # the label of the key, as over HTTP
        assert client.predict("a", 2, api_name="/generate")["text"] == "w0 w1 "


@pytest.mark.parametrize("path", ["/gradio_api/file=../app.py", "/gradio_api/file=/etc/passwd", "/gradio_api/file=%2e%2e/app.py",
                                  "/gradio_api/file=app.py", "/gradio_api/file=models/x/config.json", "/gradio_api/file=.env",
                                  "/gradio_api/file=logs/requests.jsonl"])
def test_gr_01_no_file_of_this_machine_is_served(site, path):
    host, port = site[2].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:        # a client library would tidy the path up
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        status = int(raw.makefile("rb").readline().split()[1])
    assert status in (403, 404)
