"""One contract for models of other servers, whatever serves them: a server of ours with the traps of real ones (always), and a real
server of another project on loopback (`make servers`: llama-cpp-python's, in an environment of its own, on the starter's weights)."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from backends.base import Cancel, Message, NotSupported, RemoteFailed, RemoteRefused, Request, Sampling
from backends.reach import Reach
from backends.registry import Registry
from backends.remote import RemoteOptions, load
from tests.remote_server import DONE, Server, chunk, counted
from tests.test_remote import HERE, ask, folder

PYTHON, WEIGHTS = os.environ.get("GAINZ_LLAMA_PYTHON", ""), os.environ.get("GAINZ_LLAMA_GGUF", "")
QUESTION = (Message("system", "You are a helpful assistant."), Message("user", "What is the capital of France? Answer in one word."))
WORDS = ["Paris", " is", " the", " capital", " of", " France", ", of", " course", ".", " Ünd", " 你好", " 🎉"]


def test_every_backend_of_another_server_is_held_to_the_contract():
    assert {backend.name for backend in Registry.scan().backends if not backend.local} == {"remote"}


class Ours:
    """Answers every question with the same words, as many as are asked for."""

    counts = True

    def __init__(self) -> None:
        self.server = Server(self.say)
        self.url, self.models = self.server.url, ["far"]

    def say(self, handler) -> None:
        body = self.server.asked[-1]
        if isinstance(body.get("prompt"), list):
            return handler.fail(422, '{"error": {"message": "prompt: input should be a valid string"}}')
        if len(str(body.get("prompt"))) > 2000:
            return handler.fail(400, '{"error": {"message": "maximum context length is 512 tokens"}}')
        most, stops, chat = body.get("max_tokens") or len(WORDS), body.get("stop") or [], "messages" in body
        handler.begin()
        said, finish, count = "", "length", 0
        for word in WORDS[:most]:
            count += 1
            if any(stop in said + word for stop in stops):
                finish = "stop"
                break
            said += word
            raw = chunk(word, chat=chat)
            for cut in (raw[:len(raw) // 2], b"", raw[len(raw) // 2:], b": ping\n\n"):
                handler.piece(cut)
            time.sleep(0.01)
        for raw in (chunk(finish=finish, chat=chat), counted(completion_tokens=count), DONE):
            handler.piece(raw)
        handler.wfile.write(b"0\r\n\r\n")

    def close(self) -> None:
        self.server.close()


class Llama:
    """llama-cpp-python's server as a process of its own."""

    counts = False                      # it streams no usage

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        command = [PYTHON, "-m", "llama_cpp.server", "--model", WEIGHTS, "--port", str(port), "--n_ctx", "512", "--n_threads", "1",
                   "--logits_all", "true", "--interrupt_requests", "false"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, "llama_cpp.server does not start"
            try:
                self.models = [row["id"] for row in httpx.get(f"{self.url}/models", timeout=5).json()["data"]]
                return
            except httpx.HTTPError:
                time.sleep(0.2)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


REAL = pytest.param(Llama, marks=[pytest.mark.slow, pytest.mark.skipif(
    not (PYTHON and Path(WEIGHTS).is_file()), reason="needs a server of another project: make servers")])


@pytest.fixture(scope="module", params=[Ours, REAL])
def served(request):
    made = request.param()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(served, tmp_path_factory):
    made = load(folder(tmp_path_factory.mktemp("remote"), served.url, served.models[0]), RemoteOptions(), lambda _: None, Cancel(), HERE)
    yield made
    made.close()


def test_it_answers_a_chat(model, served):
    texts, finishes, last = ask(model, QUESTION, max_tokens=8)
    assert last.error is None and "Paris" in texts[0] and finishes[0] in ("stop", "length")
    assert last.timing.ttft_seconds > 0 and last.timing.total_seconds >= last.timing.ttft_seconds
    assert (last.usage is not None) is served.counts, "counts are absent where the server tells none"


def test_it_completes_a_text(model):
    texts, finishes, last = ask(model, "Paris is the capital of", max_tokens=6)
    assert last.error is None and texts[0].strip() and finishes == {0: "length"}


def test_it_comes_in_pieces(model):
    seen = [event.text for event in model.generate(Request(QUESTION, Sampling(max_tokens=6)), Cancel()) if event.text]
    assert len(seen) >= 2


def test_greedy_answers_repeat(model):
    assert ask(model, QUESTION, max_tokens=8)[0] == ask(model, QUESTION, max_tokens=8)[0]


def test_a_stop_string_does_not_show(model):
    whole = ask(model, QUESTION, max_tokens=8)[0][0]
    stop = whole[2:4]
    texts, finishes, last = ask(model, QUESTION, max_tokens=8, stop=(stop,))
    assert last.error is None and stop not in texts[0] and finishes == {0: "stop"} and whole.startswith(texts[0])


def test_cancel_ends_it_and_the_next_one_runs(model):
    cancel, finishes = Cancel(), []
    for event in model.generate(Request("Once upon a time", Sampling(max_tokens=200)), cancel):
        if event.text:
            cancel.set()
        finishes += [event.finish] if event.finish else []
    assert finishes[-1] in ("cancelled", "length") and event.last and event.error is None
    assert ask(model, QUESTION, max_tokens=4)[2].error is None


def test_what_it_refuses_is_told_in_its_own_words(model):
    """Neither takes token ids as a prompt; one calls that its own failure."""
    _, finishes, last = ask(model, (1, 2, 3), max_tokens=4)
    assert isinstance(last.error, (RemoteRefused, RemoteFailed)) and "valid string" in last.error.cause and finishes == {0: "error"}


def test_what_does_not_fit_is_an_error_and_never_an_answer(model):
    """One says so, the other has said 200 by then and breaks off."""
    texts, finishes, last = ask(model, "one two three " * 600, max_tokens=4)
    assert isinstance(last.error, (RemoteRefused, RemoteFailed)) and (texts, finishes) == ({0: ""}, {0: "error"})


def test_no_token_is_no_question(model):
    """max_tokens 0 means "as many as fit" to some servers."""
    texts, finishes, last = ask(model, QUESTION, max_tokens=0)
    assert (texts, finishes, last.error) == ({0: ""}, {0: "length"}, None)


def test_what_it_would_ignore_is_refused_here(model):
    with pytest.raises(NotSupported):
        ask(model, QUESTION, prompt_logprobs=1)


def test_answers_beside_each_other_are_their_own(model):
    prompts = [QUESTION, "Paris is the capital of", QUESTION, "Paris is the capital of"]
    asked = [ask(model, prompt, max_tokens=5) for prompt in prompts[:2]]
    alone = [texts for texts, _, last in asked]
    assert [last.error for _, _, last in asked] == [None] * 2
    streams = [model.generate(Request(prompt, Sampling(max_tokens=5)), Cancel()) for prompt in prompts]
    seen = [list(stream) for stream in streams]
    together = ["".join(event.text for event in events) for events in seen]
    assert [events[-1].error for events in seen] == [None] * 4
    assert together == [alone[0][0], alone[1][0]] * 2


def test_unloaded_it_is_gone(served, tmp_path):
    made = load(folder(tmp_path, served.url, served.models[0]), RemoteOptions(), lambda _: None, Cancel(), Reach(private=True))
    made.close()
    with pytest.raises(Exception, match="unloaded"):
        ask(made, QUESTION)


@pytest.mark.slow
@pytest.mark.skipif(not (PYTHON and Path(WEIGHTS).is_file()), reason="needs a server of another project: make servers")
def test_a_server_that_is_killed_in_the_middle_is_an_error(tmp_path):
    served = Llama()
    made = load(folder(tmp_path, served.url, served.models[0]), RemoteOptions(retries=0), lambda _: None, Cancel(), HERE)
    stream = made.generate(Request("Once upon a time", Sampling(max_tokens=300)), Cancel())
    next(event for event in stream if event.text)
    served.process.kill()
    assert isinstance([event for event in stream if event.last][0].error, RemoteFailed)
    served.process.wait(20)
    made.close()
