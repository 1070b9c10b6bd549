"""Our own HTTP routes over a studio without an engine: schema, statuses, streams, disconnects, health, metrics."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from backends import base
from backends.base import TEXT_TOKENS, GainzError, InvalidRequest, Message, Progress, Sampling
from gainz_ui.api import errors, native
from gainz_ui.api.security import BODY_LIMIT, DROP_SECONDS, Guard
from gainz_ui.services.startup import Startup
from gainz_ui.services.tasks import Tasks
from gainz_ui.settings import Settings
from tests.api_fakes import FULL, INFO, FakeStudio


@contextmanager
def running(studio, *, key="", pool=None, tasks=None, origins=(), extend=lambda app: None):
    """The routes on loopback under uvicorn, as in the real server; yields base URL and startup."""
    startup = Startup(Settings(), studio, None, tasks or Tasks())
    app = FastAPI(docs_url=None, redoc_url=None)
    errors.install(app, studio.meter.failed)
    app.include_router(native.router(studio, startup))
    extend(app)
    if pool:
        @app.get("/pool")
        def blocked() -> str:           # a plain function: it takes a thread of the loop's pool
            return "free"
    app.add_middleware(Guard, host="127.0.0.1", key=key, origins=origins)
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))

    async def serve():
        if pool:
            import anyio.to_thread
            anyio.to_thread.current_default_thread_limiter().total_tokens = pool
            from concurrent.futures import ThreadPoolExecutor
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(pool))
        await server.serve(sockets=[made])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{made.getsockname()[1]}"
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield url, startup
    finally:
        server.should_exit = True
        thread.join(10)
        made.close()


@pytest.fixture(scope="module")
def site():
    studio = FakeStudio()
    with running(studio) as (url, startup), httpx.Client(base_url=url, timeout=20) as client:
        yield studio, client, startup


@pytest.fixture
def studio(site):
    return site[0].renew()


@pytest.fixture
def client(site):
    return site[1]


def lines(response) -> list[dict]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


# ---------------------------------------------------------------------------------------------- /generate
def test_the_answer_has_what_the_contract_names(studio, client):
    answer = client.post("/generate", json={"prompt": "Hello", "max_tokens": 3}).json()
    assert answer["text"] == "w0 w1 w2 "
    assert (answer["prompt_tokens"], answer["completion_tokens"], answer["finish_reason"]) == (3, 3, "length")
    assert answer["timing"]["ttft_seconds"] == 0.01 and answer["model"] == "tiny"


def test_a_stream_adds_up_to_the_whole(studio, client):
    body = {"prompt": "Hello", "max_tokens": 9}
    whole = client.post("/generate", json=body).json()
    response = client.post("/generate", json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *pieces, end = lines(response)
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [i for piece in pieces for i in piece["ids"]] == list(range(9))
    assert end["done"] is True and end["text"] == ""
    for key in ("finish_reason", "prompt_tokens", "completion_tokens", "model"):
        assert end[key] == whole[key]


def test_every_sampling_field_arrives(studio, client):
    sent = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "frequency_penalty": 0.2,
            "presence_penalty": 0.3, "logit_bias": {"5": -1.5}, "seed": 7, "max_tokens": 2, "min_tokens": 1, "stop": ["x"],
            "stop_ids": [4], "ignore_eos": True, "logprobs": 1, "prompt_logprobs": 0}
    missing = set(Sampling.__dataclass_fields__) - {"n"} - set(sent)
    assert not missing
    response = client.post("/generate", json={"prompt": "a", **sent, "time_limit": 5.0, "draft": {"name": "lookup", "length": 4}})
    assert response.status_code == 200
    request = studio.requests[-1]
    assert request.sampling == Sampling(0.5, 3, 0.9, 0.1, 1.1, 0.2, 0.3, ((5, -1.5),), 7, 2, 1, ("x",), (4,), True, 1, 0)
    assert request.time_limit == 5.0 and (request.draft.name, request.draft.length) == ("lookup", 4)
    raw = list(b"w1 ")
    assert response.json()["logprobs"][1] == {"id": 1, "text": "w1 ", "bytes": raw, "logprob": -0.5,
                                              "top": [{"id": 1, "text": "w1 ", "bytes": raw, "logprob": -0.5}]}


def test_prompts_as_chat_and_as_ids(studio, client):
    client.post("/generate", json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})
    assert studio.requests[-1].prompt == (Message("user", "Hi"),)
    client.post("/generate", json={"prompt": [1, 2], "max_tokens": 1})
    assert studio.requests[-1].prompt == (1, 2)


BAD = [
    ({}, "prompt"), ({"prompt": "a", "messages": []}, "prompt"), ({"messages": []}, "messages"),
    ({"messages": [{"role": "bogus", "content": "a"}]}, "messages.0.role"), ({"prompt": 5}, "prompt"), ({"prompt": "a", "n": 2}, "n"),
    ({"prompt": "a", "max_token": 5}, "max_token"), ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**12}, "max_tokens"), ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 2.5}, "max_tokens"), ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "temperature": -1}, "temperature"), ({"prompt": "a", "temperature": 1e6}, "temperature"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature"), ({"prompt": "a", "temperature": float("inf")}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"), ({"prompt": "a", "top_p": -1}, "top_p"), ({"prompt": "a", "top_p": 2}, "top_p"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"), ({"prompt": "a", "logit_bias": {"x": 1.0}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"-1": 1.0}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"--5": 1.0}}, "logit_bias"), ({"prompt": "a", "stop": ["s"] * 10_000}, "stop"),
    ({"prompt": "a", "stop": ""}, "stop"), ({"prompt": "a", "seed": 10**40}, "seed"), ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "time_limit": 0}, "time_limit"), ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages.0.x"), ({"prompt": "a", "draft": {"name": "d", "length": 0}}, "draft_length"),
]


@pytest.mark.parametrize("body,field", BAD, ids=[f"{field}-{i}" for i, (_, field) in enumerate(BAD)])
def test_sv_07_a_bad_value_is_a_400_that_names_the_field(studio, client, body, field):
    response = client.post("/generate", content=json.dumps(body), headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400 and error["field"] == field and error["remedy"], response.text
    assert not studio.requests


@pytest.mark.parametrize("content,kind,code", [
    (b'{"prompt": "a"', "application/json", "invalid_json"), (b"[1]", "application/json", "invalid_request"),
    (b'{"prompt": "a"}', "text/plain", "invalid_request"), (b"", "application/json", "invalid_request"),
    (b"[" * 100_000, "application/json", "invalid_json"), (b'{"prompt": "\xff"}', "application/json", "invalid_json"),
    (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "application/json", "invalid_json")])
def test_a_body_that_is_no_json_object_is_a_400_with_a_hint(client, content, kind, code):
    response = client.post("/generate", content=content, headers={"content-type": kind})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]
    assert response.json()["error"]["code"] == code and response.json()["error"]["remedy"]


@pytest.mark.parametrize("body,words", [
    ({"max_tokens": -1}, "max_tokens must be from 0 to 2147483647."), ({"seed": 2**64}, "from -9223372036854775808 to 18446744073709551615."),
    ({"logit_bias": {"-1": 1.0}}, "A token id of logit_bias must be from 0 to 2147483647."), ({"temperature": 101}, "from 0 to 100."),
    ({"stop_ids": [-1]}, "A token id of stop_ids"), ({"logit_bias": {"1": 101.0}}, "A bias of logit_bias must be from -100 to 100.")])
def test_bounds_are_said_in_whole_numbers(client, body, words):
    assert words in client.post("/generate", json={"prompt": "a", **body}).json()["error"]["message"]


def test_get_for_post_says_how(client):
    response = client.get("/generate")
    assert response.status_code == 405 and response.headers["allow"] == "POST" and "POST" in response.json()["error"]["message"]


def test_errors_before_the_first_token_have_their_own_status(studio, client):
    assert client.post("/generate", json={"prompt": "a", "model": "absent"}).status_code == 404
    studio.present = {}
    response = client.post("/generate", json={"prompt": "a"})
    assert response.status_code == 409 and response.json()["error"]["code"] == "model_not_loaded"
    studio.present = {"tiny": None}
    studio.fail = FULL
    for stream in (False, True):
        response = client.post("/generate", json={"prompt": "a", "stream": stream})
        assert response.status_code == 429 and response.json()["error"]["evidence"] == {"waiting": "256"}
        assert response.headers["retry-after"] == "1"
    studio.fail, studio.break_after = None, 0
    assert client.post("/generate", json={"prompt": "a", "stream": True}).status_code == 500


def test_an_error_in_the_middle_ends_the_stream_with_it(studio, client):
    studio.break_after = 2
    *pieces, end = lines(client.post("/generate", json={"prompt": "a", "stream": True}))
    assert [piece["text"] for piece in pieces] == ["w0 ", "w1 "]
    assert end["error"]["code"] == "step_failed" and end["finish_reason"] == "error" and end["completion_tokens"] == 2
    assert client.post("/generate", json={"prompt": "a"}).status_code == 500


def test_every_typed_error_has_a_status():
    for kind in GainzError.registry.values():
        assert any(parent in errors.STATUS for parent in kind.__mro__ if parent is not GainzError), kind
    assert errors.status(base.ContextTooLong("x")) == 400 and errors.status(base.ChecksumMismatch("x")) == 502


# ---------------------------------------------------------------------------------------------- clients that leave
@pytest.mark.parametrize("stream,prefill", [(True, 0.0), (False, 0.0), (True, 5.0), (False, 5.0)])
def test_sv_01_a_client_that_leaves_stops_the_work(studio, client, stream, prefill):
    studio.pace, studio.prefill = 0.02, prefill
    url = httpx.URL(client.base_url)
    body = json.dumps({"prompt": "a", "max_tokens": 2000, "stream": stream}).encode()
    with socket.create_connection((url.host, url.port)) as raw:
        raw.sendall(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(body) + body)
        deadline = time.monotonic() + 5
        while studio.running == 0 or studio.steps == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)
    gone = studio.steps
    deadline = time.monotonic() + 1
    while studio.running and time.monotonic() < deadline:
        time.sleep(0.005)
    assert studio.running == 0
    assert studio.steps - gone <= 3 if not prefill else True       # the step under way, and one that raced the news
    studio.pace = studio.prefill = 0
    assert client.post("/generate", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_sv_03_streams_do_not_starve_the_pool():
    studio = FakeStudio()
    studio.pace = 0.01
    with running(studio, pool=4) as (url, _):
        async def one(client):
            response = await client.post("/generate", json={"prompt": "a", "max_tokens": 60, "stream": True})
            return response.status_code, "".join(piece["text"] for piece in lines(response))

        async def poll(client, stop):
            slowest = 0.0
            while not stop.is_set():
                for path in ("/pool", "/health"):
                    began = time.monotonic()
                    assert (await client.get(path)).status_code == 200
                    slowest = max(slowest, time.monotonic() - began)
                await asyncio.sleep(0.02)
            return slowest

        async def drive():
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                stop = asyncio.Event()
                polling = asyncio.create_task(poll(client, stop))
                answers = await asyncio.gather(*(one(client) for _ in range(8)))
                stop.set()
                return answers, await polling

        answers, slowest = asyncio.run(drive())
    wanted = "".join(studio.words[i % 32] for i in range(60))
    assert answers == [(200, wanted)] * 8
    assert slowest < 0.5, "an answer takes longer than that"


# ---------------------------------------------------------------------------------------------- /health and /metrics
def test_sv_11_health_follows_the_engine(studio, client):
    assert client.get("/health").status_code == 200
    studio.pace = 0.05
    thread = threading.Thread(target=client.post, args=("/generate",), kwargs={"json": {"prompt": "a", "max_tokens": 20}})
    thread.start()
    assert client.get("/health").status_code == 200 and thread.is_alive(), "it does not wait for the answer"
    thread.join()
    for status in ("starting", "loading", "dead", "stuck", "stopping"):
        studio.status, studio.reason = status, "because"
        response = client.get("/health")
        assert response.status_code == 503 and response.json()["status"] == status and response.json()["reason"] == "because"


def test_health_tells_how_far_the_start_is_and_why_it_failed():
    studio, tasks, hold = FakeStudio(), Tasks(), threading.Event()
    studio.present = {}
    with running(studio, tasks=tasks) as (url, startup):
        def work(report, cancel):
            report(Progress("fetch", 5, 10, "x"))
            hold.wait(10)
            raise base.FetchFailed("The starter model could not be fetched.")
        with studio.not_ready("fetching the starter model"):
            startup.task = tasks.start("starter", "x", work)
            time.sleep(0.1)
            response = httpx.get(url + "/health")
            assert response.status_code == 503 and response.json()["reason"] == "fetching the starter model"
            assert response.json()["progress"] == {"stage": "fetch", "done": 5, "total": 10, "note": "x"}
        response = httpx.get(url + "/health")                  # between two steps of the start it is not ready either
        assert response.status_code == 503 and response.json()["status"] == "starting"
        hold.set()
        startup.task.wait(5)
        response = httpx.get(url + "/health")
        assert response.status_code == 503 and response.json()["error"]["code"] == "fetch_failed"
        studio.present = {"tiny": INFO}          # somebody loaded a model by hand: it serves
        assert httpx.get(url + "/health").status_code == 200


def test_metrics_tell_what_the_studio_knows(studio, client):
    studio.mark()
    text = client.get("/metrics").text
    assert "gainz_models_loaded 1.0" in text and 'gainz_memory_bytes{of="engine"} 2.0' in text
    assert 'gainz_tokens_total{model="tiny"} 7.0' in text and 'gainz_pages{model="tiny",state="used"} 3.0' in text


# ---------------------------------------------------------------------------------------------- the guard
@pytest.fixture(scope="module")
def locked():
    studio = FakeStudio()
    with running(studio, key="secret", origins=("https://friend.example",)) as (url, _), httpx.Client(base_url=url) as client:
        yield client


def test_the_key_is_asked_for_on_every_route_but_health(locked):
    app_routes = [("GET", "/metrics"), ("POST", "/generate"), ("GET", "/generate"), ("GET", "/"), ("GET", "/nowhere")]
    for method, path in app_routes:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic !!"}, {"authorization": "bearer"}):
            assert locked.request(method, path, headers=headers).status_code == 401, (method, path, headers)
    assert locked.get("/health").status_code == 200
    for headers in ({"authorization": "Bearer secret"}, {"authorization": "bearer secret"}, {"x-api-key": "secret"}):
        assert locked.post("/generate", json={"prompt": "a", "max_tokens": 1}, headers=headers).status_code == 200
    assert locked.get("/metrics", auth=("anyone", "secret")).status_code == 200
    assert locked.get("/", headers={"accept": "text/html"}).headers["www-authenticate"].startswith("Basic")


@pytest.mark.parametrize("host,status", [("evil.example", 403), ("evil.example:7860", 403), ("localhost", 200), ("127.0.0.1:1", 200),
                                         ("[::1]:7860", 200), ("192.168.1.5", 200), ("", 403), ("[::1", 403),
                                         ("LOCALHOST:7860", 200), ("localhost.evil.example", 403), ("127.0.0.1:1.evil.example", 403),
                                         ("me@127.0.0.1", 403), ("127.0.0.1:", 200)])
def test_another_name_for_this_machine_is_refused(client, host, status):
    assert client.get("/health", headers={"host": host}).status_code == status


def test_other_sites_are_refused_and_allowed_ones_are_named(client, locked):
    json_body = {"prompt": "a", "max_tokens": 1}
    for headers in ({"origin": "https://evil.example"}, {"origin": "null"}, {"origin": "http://[::1"}, {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}):
        assert client.post("/generate", json=json_body, headers=headers).status_code == 403
        assert "access-control-allow-origin" not in client.get("/health", headers=headers).headers
    same = f"http://{client.base_url.host}:{client.base_url.port}"
    assert client.post("/generate", json=json_body, headers={"origin": same}).status_code == 200
    friend = {"origin": "https://friend.example"}
    preflight = locked.options("/generate", headers={**friend, "access-control-request-method": "POST"})
    assert preflight.status_code == 204 and preflight.headers["access-control-allow-origin"] == "https://friend.example"
    assert locked.post("/generate", json=json_body, headers={**friend, "authorization": "Bearer secret"}).status_code == 200


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(client):
    big = b'{"prompt": "' + b"a" * BODY_LIMIT + b'"}'
    headers = {"content-type": "application/json"}
    assert client.post("/generate", content=big, headers=headers).status_code == 413
    chunks = (big[i:i + 65536] for i in range(0, len(big), 65536))
    begun = time.monotonic()
    assert client.post("/generate", content=chunks, headers=headers).status_code == 413
    assert time.monotonic() - begun < DROP_SECONDS, "the last chunk was the one too many: there is no rest to wait for"
    small = iter([b'{"prompt": "a", ', b'"max_tokens": 1}'])
    assert client.post("/generate", content=small, headers=headers).status_code == 200


def test_every_answer_carries_the_policy(client):
    for path in ("/health", "/nowhere"):
        headers = client.get(path).headers
        assert "default-src 'self'" in headers["content-security-policy"] and headers["x-content-type-options"] == "nosniff"


def test_the_server_fetches_no_addresses_for_others(client):
    for path in ("/gradio_api/file=http://127.0.0.1/x", "/gradio_api/file%3Dhttps://x.example/", "/gradio_api/proxy=http://x.example/"):
        assert client.get(path).status_code == 403


def test_a_text_that_nobody_bounded_ends_and_a_chat_ends_by_itself(studio, client):
    for body, most in (({"prompt": "a"}, TEXT_TOKENS), ({"prompt": "a", "max_tokens": None}, None), ({"prompt": "a", "max_tokens": 3}, 3),
                       ({"messages": [{"role": "user", "content": "Hi"}]}, None)):
        assert client.post("/generate", json=body).status_code == 200 and studio.requests[-1].sampling.max_tokens == most, body


def test_a_fault_of_ours_is_a_500_that_is_counted(studio):
    def extend(app):
        @app.get("/broken")
        def broken():
            raise ZeroDivisionError

    with running(studio, extend=extend) as (url, _):
        answer = httpx.get(url + "/broken")
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert studio.meter.errors()["", "internal_error"] == 1


def test_to_request_refuses_what_the_values_refuse():
    with pytest.raises(InvalidRequest):
        native.to_request(native.GenerateBody(prompt="a", min_tokens=5, max_tokens=2))
