"""The frame: public names and nothing else public, header and banner in words, the script ahead of everything, downloads."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import gradio as gr
import pytest

from backends.base import Event, Progress, Sampling
from gainz_ui import api_names, header, html, shell
from gainz_ui.early import EarlyScript
from gainz_ui.services.answers import Answers
from gainz_ui.services.chat import Chat
from gainz_ui.services.jobs import Jobs
from gainz_ui.services.tasks import Tasks
from gainz_ui.settings import Settings
from gainz_ui.tabs.chat_flow import Asked, Flow
from gainz_ui.tabs.snippets import Address, call_snippets, chat_snippets, snippets
from tests.fakes.studio import FakeStudio


@pytest.fixture(scope="module")
def blocks():
    studio = FakeStudio()
    return shell.build(studio, Settings(), None, Tasks(), doctor=lambda: None, api=lambda: api_names.register(studio, Jobs(Settings().models)))


def test_only_the_frozen_names_are_public(blocks):
    described = blocks.get_api_info()
    assert tuple(sorted(described["named_endpoints"])) == api_names.NAMES and described["unnamed_endpoints"] == {}


def test_no_listener_needs_a_script_to_be_evaluated(blocks):
    """The content policy forbids eval: a listener with ``js`` or an HTML component would not work."""
    assert [fn.js for fn in blocks.fns.values() if fn.js] == []
    assert [block for block in blocks.blocks.values() if type(block).__name__ == "HTML"] == []


def test_what_generates_has_no_limit_of_gradios(blocks):
    limits = {
        fn.name: fn.concurrency_limit
        for fn in blocks.fns.values()
        if fn.name in {"send", "again", "edit", "go_on", "come_back", "load"}
    }
    assert limits and set(limits.values()) == {None}


def test_an_idle_queue_looks_at_most_a_hundred_times_a_second(blocks):
    assert min(blocks._queue.sleep_when_free, blocks._queue.progress_update_sleep_when_free) >= 0.01


def test_gradios_client_follows_nothing_but_what_shows_it(blocks):
    """Each component that it follows is looked for in the whole page at every event."""
    silent = [dependency for dependency in blocks.get_config_file()["dependencies"] if dependency["show_progress"] == "hidden"]
    followed = {blocks.blocks[part].elem_id for dependency in silent for part in dependency["show_progress_on"]}
    assert len(silent) > 80 and followed == {"gz-chatbot"}


def test_a_page_that_had_no_chat_leaves_one_that_was_begun_meanwhile_alone():
    async def updates():
        return [update async for update in Flow(None, {}, None).come_back(None, None)]
    assert asyncio.run(updates()) == [gr.skip()]


def test_an_ended_answer_waits_for_the_page_that_has_it():
    """What was sent to a page that is being left is lost with it."""
    chat, answers, names = Chat().say("user", "Why?"), Answers(), ("chat", "chatbot", "system", "stats", "notice", "send", "stop", "continue", "retry")
    flow = Flow(SimpleNamespace(answers=answers), {name: name for name in names}, None)
    said = Event(text="Because.", finish="stop")
    answer = answers.begin(chat.id, lambda cancel: iter([said]), Asked(chat, None, Sampling(), 3))
    while answer.running:
        answer.wait(answer.version, 1.0)

    def comes_back(kept: Chat) -> Chat:
        async def last():
            return [update async for update in flow.come_back(gr.Request(), kept.to_json())][-1]
        return Chat.of(asyncio.run(last())["chat"])

    assert [comes_back(chat).turns[-1].content for _ in range(2)] == ["Because."] * 2
    assert comes_back(comes_back(chat)).turns[-1].content == "Because." and answers.get(chat.id) is None


def test_tabs_are_found_in_their_order():
    assert [tab.title for tab in shell.scan()][:2] == ["tab_chat", "tab_models"] and shell.scan()[-1].title == "tab_doctor"


def snapshot(**changes):
    studio = FakeStudio()
    return SimpleNamespace(**{**vars(studio.snapshot()), **changes})


def test_the_header_says_what_is_loaded_and_what_goes_on():
    loading = SimpleNamespace(name="big<model>", progress=Progress("read", 3, 4), seconds=1.0)
    text = header.header("en", snapshot(loading=(loading,), running=2, waiting=1, status="loading"), [])
    assert "Loading big&lt;model&gt; 75 %" in text and "2 running, 1 waiting" in text and "18 GB free" in text
    models = tuple(
        SimpleNamespace(name=f"m{i}", format="GGUF", backend="gguf", kernels="ref", weights_bytes=1) for i in range(4)
    )
    text = header.header("zh", snapshot(models=models, status="ready"), [])
    assert "m0" in text and "m1" in text and "m2<" not in text and "+2" in text and "引擎就绪" in text


def test_the_banner_speaks_only_of_trouble():
    assert header.banner("en", snapshot(status="ready")) == ""
    text = header.banner("en", snapshot(status="dead", reason="code -9\n<killed>"))
    assert "code -9&#10;&lt;killed&gt;" in text and "\n" not in text and 'role="alert"' in text


def test_html_of_ours_stays_on_one_line_and_is_escaped():
    made = [
        html.notice("bad", "a\n\nb", ["<x>\n"]),
        html.facts([("k\n", "<v>")]),
        html.file("n", "l1\n\n<l2>", "text/plain"),
        html.empty("t\n", ["l"]),
    ]
    assert all("\n" not in text and "<x>" not in text and "<v>" not in text and "<l2>" not in text for text in made)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1200, "1.2 kB"), (98_362_432, "98 MB"), (1.25e9, "1.2 GB"), (24e9, "24 GB")],
)
def test_sizes(count, text):
    assert html.size(count) == text


def ask(app, method: str = "GET") -> list[dict]:
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(app({"type": "http", "method": method, "path": "/"}, None, send))
    return sent


def answering(kind: bytes, *pieces: bytes):
    async def app(scope, receive, send):
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind), (b"content-length", b"1")]}
        )
        for i, piece in enumerate(pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": i < len(pieces) - 1})
    return app


def test_the_script_stands_first_in_the_document():
    start, body = ask(EarlyScript(answering(b"text/html; charset=utf-8", b"<html><he", b"ad><script src=x>"), default="zh"))
    assert (
        body["body"].startswith(b"<html><head><script>")
        and b"'zh' !== 'auto'" in body["body"]
        and body["body"].endswith(b"<script src=x>")
    )
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()


def test_other_answers_pass_piece_by_piece():
    sent = ask(EarlyScript(answering(b"text/event-stream", b"<head>", b"b")))
    assert [message.get("body") for message in sent] == [None, b"<head>", b"b"]


# ---------------------------------------------------------------------------------------------- snippets
def test_the_code_for_a_chat_is_code_and_says_what_was_asked():
    from backends.base import Message, Request, Sampling

    request = Request(
        (
            Message("system", "Be brief."),
            Message("user", "Hi"),
            Message("assistant", "Hello"),
            Message("user", 'It\'s "x"\n```'),
        ),
        Sampling(temperature=0.5, top_k=7, stop=("\n",), logit_bias=((5, -1.0),)),
    )
    python, curl = chat_snippets(request, "m", Address("http://h:1"))
    seen = {}

    class Client:
        def __init__(self, address):
            seen["address"] = address

        def submit(self, message, **arguments):
            seen.update(arguments, message=message)
            return [{"text": "ok"}]

    import sys
    module = SimpleNamespace(Client=Client)
    saved = sys.modules.get("gradio_client")
    sys.modules["gradio_client"] = module
    try:
        exec(compile(python, "snippet", "exec"), {})
    finally:
        sys.modules.pop("gradio_client") if saved is None else sys.modules.__setitem__("gradio_client", saved)
    assert seen["message"] == 'It\'s "x"\n```' and seen["system"] == "Be brief." and seen["api_name"] == "/chat"
    assert (
        [turn["content"] for turn in seen["history"]] == ["Hi", "Hello"]
        and seen["temperature"] == 0.5
        and seen["stop"] == ["\n"]
    )
    assert seen["top_k"] == 7 and seen["logit_bias"] == {"5": -1.0} and seen["model"] == "m"

    import shlex
    words = shlex.split(curl.replace("\\\n", " "))
    body = json.loads(words[words.index("-d") + 1])
    assert words[1] == "http://h:1/generate" and body["messages"][-1]["content"] == 'It\'s "x"\n```' and body["top_k"] == 7
    from gainz_ui.api.native import GenerateBody, to_request
    assert to_request(GenerateBody(**body)).sampling == request.sampling
    assert "````python" in snippets(python, curl), "the fence is longer than the one inside"


def test_the_code_for_a_call_names_its_arguments():
    python, curl = call_snippets("load", {"name": "m", "options": {"context": 5}}, Address("http://h:1"))
    assert "name='m', options={'context': 5}, api_name=\"/load\"" in python
    assert "http://h:1/gradio_api/call/load" in curl and '"context": 5' in curl


def test_the_code_brings_the_key_where_one_is_asked_for_and_never_shows_it():
    from gainz_ui.tabs.snippets import address_of
    page = SimpleNamespace(headers={"host": "h:1", "authorization": "Basic c2VjcmV0"})
    for python, curl in (call_snippets("models", {}, address_of(page)), ):
        assert 'headers={"Authorization": "Bearer " + os.environ["GAINZ_API_KEY"]}' in python
        assert curl.count('-H "Authorization: Bearer $GAINZ_API_KEY"') == 2 and "c2VjcmV0" not in python + curl
    assert address_of(SimpleNamespace(headers={"host": "h:1"})) == Address("http://h:1")


# ---------------------------------------------------------------------------------------------- tasks
def test_the_same_work_twice_is_one_task_and_outcomes_are_kept():
    import threading
    from backends.base import Cancelled, DiskFull
    tasks, gate = Tasks(), threading.Event()
    first = tasks.start("load", "m", lambda report, cancel: gate.wait(5))
    assert tasks.start("load", "m", lambda report, cancel: None) is first and tasks.running("load") == [first]
    gate.set()
    assert first.wait(5) and first.outcome() is True and tasks.running() == [] and tasks.latest("load") is first

    def fails(report, cancel):
        raise DiskFull("full")

    failed = tasks.start("pull", "r", fails)
    assert failed.wait(5) and failed.state == "failed"
    with pytest.raises(DiskFull):
        failed.outcome()

    def stops(report, cancel):
        while True:
            cancel.raise_if_set("It")
            gate.wait(0.01)

    stopped = tasks.start("load", "n", stops)
    tasks.close()
    assert stopped.wait(5) and stopped.state == "cancelled" and isinstance(stopped.error, Cancelled)
