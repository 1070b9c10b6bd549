"""The program as a person starts it: one process, the real page, the real engine, a tiny real model; and how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.soak import ended

ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "tests" / "fixtures" / "llama-fp16"
BODY = {"prompt": "The quick brown fox", "max_tokens": 24, "ignore_eos": True}


class Program:
    """``python app.py serve`` on a free port, its stderr kept."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "app.py", "serve", "--port", "0", "--models", str(folder / "models"), "--outputs", str(folder / "outputs"),
                   "--logs", str(folder / "logs"), *arguments]
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
        self.said: list[str] = []
        self.port: int | None = None
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()
        self._until(lambda: self.port is not None, 60)
        self.url = f"http://127.0.0.1:{self.port}"
        self._until(self._answers, 60)
        self.seconds = time.monotonic() - self.began

    def _listen(self) -> None:
        with self.process.stderr as lines:
            for line in lines:
                self.said.append(line.rstrip())
                if match := re.search(r"Gainz is at http://127\.0\.0\.1:(\d+)", line):
                    self.port = int(match[1])

    def _until(self, met, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not met():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            httpx.get(self.url + "/health", timeout=5)
        except httpx.TransportError:
            return False
        return True

    def ready(self, seconds: float = 120) -> dict:
        self._until(lambda: httpx.get(self.url + "/health").status_code == 200, seconds)
        return httpx.get(self.url + "/health").json()

    def engine(self) -> psutil.Process:
        """The child that has torch mapped."""
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if "torch" in "".join(item.path for item in child.memory_maps()))

    def stop(self) -> float:
        """Seconds from SIGTERM to the end."""
        try:
            return ended(self.process)
        finally:
            self.process.stdout.close()
            self.listener.join(5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("app")
    (made / "models").mkdir()
    shutil.copytree(FIXTURE, made / "models" / "tiny")
    return made


@pytest.fixture(scope="module")
def program(folder):
    made = Program(folder, "--drain", "2")
    yield made
    made.stop()


def metric(program: Program, name: str) -> float:
    """Summed over its labels."""
    text = httpx.get(program.url + "/metrics").text
    return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))


def stream(program: Program, body: dict) -> list[dict]:
    with httpx.stream("POST", program.url + "/generate", json={**body, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]


# ---------------------------------------------------------------------------------------------- up
def test_the_page_is_up_before_anything_heavy(program):
    """Under 6 s on a quiet machine of two cores (measured: about 3); the bound here leaves room for a busy one."""
    assert program.seconds < 25
    assert httpx.get(program.url + "/").status_code == 200
    maps = "".join(item.path for item in psutil.Process(program.process.pid).memory_maps())
    assert "torch" not in maps                      # the front never imports it


def test_the_only_model_is_loaded_unasked(program):
    health = program.ready()
    assert health["models"] == ["tiny"] and health["status"] == "ready"


def test_generate_is_greedy_and_its_stream_adds_up(program):
    program.ready()
    whole = httpx.post(program.url + "/generate", json=BODY, timeout=60).json()
    assert whole["completion_tokens"] == 24 and whole["finish_reason"] == "length" and whole["prompt_tokens"] > 0
    assert whole["timing"]["decode_tokens_per_second"] > 0
    *pieces, end = stream(program, BODY)
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert sum(len(piece["ids"]) for piece in pieces) == 24 == end["completion_tokens"]
    assert end["cached_tokens"] < end["prompt_tokens"] == whole["prompt_tokens"]


def test_stops_alike_streamed_and_whole_in_turn(program):                       # GE-20
    """Same text and reason, no token computed beyond the stop, and nothing of one request left in the next."""
    program.ready()
    free = httpx.post(program.url + "/generate", json=BODY, timeout=60).json()["text"]
    stop = max((free[at:at + 4] for at in range(len(free) - 4)), key=free.index)      # what comes first as late as may be
    body = {**BODY, "stop": [stop], "max_tokens": 200}
    seen, before, counted = set(), dict(body), 0
    time.sleep(1.5)                                 # the engine's counters come with its heartbeat
    computed = metric(program, "gainz_tokens_total")
    for _ in range(2):
        whole = httpx.post(program.url + "/generate", json=body, timeout=60).json()
        *pieces, end = stream(program, body)
        seen.add((whole["text"], whole["finish_reason"], whole["completion_tokens"]))
        seen.add(("".join(piece["text"] for piece in pieces), end["finish_reason"], end["completion_tokens"]))
        counted += whole["completion_tokens"] + end["completion_tokens"]
    time.sleep(1.5)
    assert metric(program, "gainz_tokens_total") - computed == counted
    assert body == before
    ((text, reason, tokens),) = seen
    assert text == free[:free.index(stop)] and reason == "stop" and 1 < tokens <= 24


def test_the_context_is_named_when_it_is_exceeded(program):
    program.ready()
    answer = httpx.post(program.url + "/generate", json={"prompt": "a", "max_tokens": 10_000_000}, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_too_long"


@pytest.mark.parametrize("path", ["/chat/completions", "/completion", "/api/generate"])
def test_a_path_without_v1_is_answered_with_the_paths_there_are(program, path):
    answer = httpx.post(program.url + path, json={"prompt": "a"}, timeout=30)
    assert answer.status_code in (404, 405) and "/v1/chat/completions" in answer.json()["error"]["remedy"], answer.text


def test_every_name_of_gradios_client_on_a_real_model(program):
    from gradio_client import Client
    program.ready()
    client = Client(program.url, verbose=False)
    whole = httpx.post(program.url + "/generate", json=BODY, timeout=60).json()
    answer = client.predict(BODY["prompt"], 24, ignore_eos=True, api_name="/generate")
    assert answer["text"] == whole["text"] and answer["completion_tokens"] == 24
    seen = [piece["text"] for piece in client.submit(BODY["prompt"], 24, ignore_eos=True, api_name="/generate")]
    assert seen[-1] == whole["text"]
    (entry,) = client.predict(api_name="/models")
    assert entry["name"] == "tiny" and entry["loaded"]
    assert client.predict("tiny", api_name="/unload") == {"unloaded": "tiny"}
    assert httpx.get(program.url + "/health").json()["status"] == "idle"
    loaded = client.predict("tiny", {"context": 480}, api_name="/load")         # room for all that follows
    assert loaded["name"] == "tiny" and loaded["context"] == 480
    if loaded["chat_template"]:
        assert client.predict("Hi", max_tokens=4, api_name="/chat")["completion_tokens"] <= 4


# ---------------------------------------------------------------------------------------------- trouble
def test_sv_01_a_client_that_leaves_frees_the_engine(program):
    program.ready()
    time.sleep(1)
    before = metric(program, "gainz_tokens_total")
    body = json.dumps({**BODY, "max_tokens": 400, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", program.port)) as raw:
        raw.sendall(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert raw.recv(64).startswith(b"HTTP/1.1 200")
    time.sleep(1)                                   # the engine's counters come with its heartbeat
    made = metric(program, "gainz_tokens_total")
    time.sleep(1)
    assert metric(program, "gainz_tokens_total") == made < before + 400     # it stopped, and before the end
    assert metric(program, "gainz_requests_running") == 0
    assert httpx.post(program.url + "/generate", json=BODY, timeout=60).status_code == 200


def test_a_killed_engine_ends_its_answers_and_comes_back(program):
    program.ready()
    wanted = httpx.post(program.url + "/generate", json=BODY, timeout=60).json()["text"]
    engine, events = program.engine(), []
    with httpx.stream("POST", program.url + "/generate", json={**BODY, "max_tokens": 400, "stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
                if len(events) == 3:
                    engine.kill()
    assert events[-1]["error"]["code"] == "engine_died" and events[-1]["finish_reason"] == "error"
    assert httpx.get(program.url + "/").status_code == 200
    health = httpx.get(program.url + "/health")
    assert health.status_code == 503 and health.json()["status"] == "dead" and health.json()["reason"]
    assert httpx.post(program.url + "/generate", json=BODY, timeout=120).json()["text"] == wanted
    assert program.ready()["status"] == "ready"


def test_a_start_without_a_network_leaves_the_server_up(tmp_path):
    program = Program(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    try:
        program._until(lambda: httpx.get(program.url + "/health").json()["status"] == "failed", 60)
        health = httpx.get(program.url + "/health")
        assert health.status_code == 503 and health.json()["error"]["code"] == "fetch_failed"
        assert httpx.get(program.url + "/").status_code == 200
        program._until(lambda: any(line.startswith("Error: ") for line in program.said), 10)
    finally:
        assert program.stop() < 6


def test_sv_02_sigterm_ends_it_in_time_with_a_page_open_and_an_answer_under_way(program):
    """The last test in here: it ends the program of all of them."""
    program.ready()
    httpx.post(program.url + "/generate", json=BODY, timeout=60)        # whatever came before, the engine has the model
    engine, before, opened = program.engine(), len(program.said), threading.Event()

    def hold_page_open() -> None:
        try:
            with httpx.stream("GET", program.url + "/gradio_api/heartbeat/somebody", timeout=60) as answer:
                for _ in answer.iter_lines():
                    opened.set()
        except httpx.TransportError:
            pass

    def ask() -> None:
        try:
            httpx.post(program.url + "/generate", json={**BODY, "max_tokens": 400}, timeout=60)
        except httpx.TransportError:
            pass

    for work in (hold_page_open, ask):
        threading.Thread(target=work, daemon=True).start()
    assert opened.wait(20)
    assert program.stop() < 5
    assert program.process.returncode == 0
    said = program.said[before:]
    assert not any("Traceback" in line for line in said), said
    assert said[-1] == "Gainz has stopped."
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
