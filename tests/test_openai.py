"""OpenAI's API over a studio without an engine: fields, shapes, streams, tools, errors. tests/test_openai_client.py asks a real one."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
import time

import httpx
import pytest

from backends.base import Message
from gainz_ui.api import openai_routes, openapi
from gainz_ui.api.openai_tools import Held, Plan, parse
from tests.api_fakes import FULL, INFO, FakeStudio
from tests.test_api import running

HELLO = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


def extend(studio):
    def add(app):
        app.include_router(openai_routes.router(studio))
        openapi.install(app)
    return add


@pytest.fixture(scope="module")
def site():
    studio = FakeStudio()
    with running(studio, extend=extend(studio)) as (url, _), httpx.Client(base_url=url, timeout=20) as client:
        yield studio, client


@pytest.fixture
def studio(site):
    return site[0].renew()


@pytest.fixture
def client(site):
    return site[1]


def chat(client, **body):
    return client.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "max_tokens": 3, **body})


def chunks(response) -> list[dict]:
    *pieces, done = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(piece) for piece in pieces]


def content(pieces, index=0) -> str:
    return "".join(choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"] if choice["index"] == index)


# ---------------------------------------------------------------------------------------------- fields
def test_every_field_arrives(studio, client):
    answer = chat(client, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.3,
                  logit_bias={"5": -1.5}, seed=7, min_tokens=1, stop="x", stop_ids=[4], ignore_eos=True, logprobs=True, top_logprobs=2,
                  n=2, draft={"name": "lookup", "length": 4}, time_limit=5.0, user="me", metadata={"a": "b"}, store=False,
                  chat_template_kwargs={"enable_thinking": False})
    assert answer.status_code == 200, answer.text
    (request,) = studio.requests
    s = request.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty, s.frequency_penalty, s.presence_penalty) == (
        0.5, 0.9, 3, 0.1, 1.1, 0.2, 0.3)
    assert (s.logit_bias, s.seed, s.min_tokens, s.stop, s.stop_ids, s.ignore_eos, s.logprobs, s.n, s.max_tokens) == (
        ((5, -1.5),), 7, 1, ("x",), (4,), True, 2, 2, 3)
    assert (request.draft.name, request.draft.length, request.time_limit) == ("lookup", 4, 5.0)
    assert request.template == (("enable_thinking", False),) and request.prompt == (Message("user", "Hi"),)


def test_defaults_are_openais(studio, client):
    client.post("/v1/chat/completions", json={"messages": HELLO})
    client.post("/v1/completions", json={"prompt": "a"})
    one, other = (request.sampling for request in studio.requests)
    assert (one.temperature, one.top_p, one.max_tokens, other.max_tokens) == (1.0, 1.0, None, 16)
    chat(client, max_tokens=None, max_completion_tokens=5)
    assert studio.requests[-1].sampling.max_tokens == 5


@pytest.mark.parametrize("body,field", [
    ({"messages": []}, "messages"), ({"messages": None}, "messages"), ({"unheard_of": 1}, "unheard_of"), ({"functions": []}, "functions"),
    ({"n": 10**6}, "n"), ({"max_tokens": 10**12}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"), ({"top_p": 2}, "top_p"), ({"logit_bias": {"-1": 1.0}}, "logit_bias"),
    ({"stop": ["s"] * 10_000}, "stop"), ({"repeat_penalty": 0}, "repeat_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop_token_ids": [1]}, "stop_token_ids"), ({"store": True}, "store"), ({"service_tier": "flex"}, "service_tier"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"stream_options": {}}, "stream_options"),
    ({"max_completion_tokens": 4}, "max_completion_tokens"), ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"), ({"tool_choice": "auto"}, "tool_choice"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"), ({"parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"tools": [WEATHER, WEATHER]}, "tools"), ({"tools": [WEATHER], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"), ({"time_limit": 0}, "time_limit"), ({"stream": 1}, "stream"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "bogus", "content": "a"}]}, "messages.0.role"), ({"messages": [{"role": "user"}]}, "messages"),
    ({"draft": {"name": "lookup", "len": 4}}, "draft.len"), ({"stop": ["a", 5]}, "stop.1")])
def test_a_field_that_cannot_be_honoured_is_a_400_that_names_it(studio, client, body, field):          # SV-07, SV-13
    answer = chat(client, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error"), answer.text
    assert error["message"] and error["remedy"]
    assert not studio.requests


HALF = "\udc00"


@pytest.mark.parametrize("path,body,field", [
    ("/v1/chat/completions", {"model": HALF}, "model"), ("/v1/chat/completions", {"draft": {"name": HALF}}, "draft.name"),
    ("/v1/chat/completions", {"stop": ["a", HALF]}, "stop.1"), ("/v1/chat/completions", {"user": HALF}, "user"),
    ("/v1/chat/completions", {"messages": [{"role": HALF, "content": "x"}]}, "messages.0.role"),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": HALF}}]}, "tools.0.function.name"),
    ("/v1/chat/completions", {"metadata": {"a" + HALF: "x"}}, "metadata.a\ufffd"), ("/v1/chat/completions", {HALF: 1}, "\ufffd"),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\udc00"}'}}]}]},
     "arguments.a"),
    ("/v1/completions", {"prompt": "x", "model": HALF}, "model"), ("/v1/embeddings", {"input": ["x", HALF]}, "input.1"),
    ("/generate", {"prompt": "x", "draft": HALF}, "draft"), ("/tokenize", {"prompt": HALF}, "prompt"),
    ("/detokenize", {"tokens": [1], "model": HALF}, "model"), ("/tokenize", {"x" * 10**5: HALF}, "x" * 254 + "…")],
    ids=lambda value: value[:20] if isinstance(value, str) and value.isascii() else "")
def test_half_of_a_surrogate_pair_is_refused_wherever_it_stands(studio, client, path, body, field):
    body = {"messages": HELLO, **body} if "chat" in path else body
    answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["field"] == field and "half of a surrogate pair" in error["message"], answer.text
    assert not studio.requests


def test_a_message_without_content_is_refused(studio, client):
    for given in (None, []):
        answer = chat(client, messages=[{"role": "user", "content": given}])
        assert answer.status_code == 400 and answer.json()["error"]["field"] == "messages"
    called = {"role": "assistant", "content": [], "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert chat(client, messages=[*HELLO, called]).status_code == 200


@pytest.mark.parametrize("path,body,words", [
    ("/v1/chat/completions", {"messages": HELLO, "n_predict": 5}, "Unknown field 'n_predict'; max_tokens was probably meant."),
    ("/v1/chat/completions", {"messages": HELLO, "draft": {"name": "lookup", "len": 4}},
     "Unknown field 'draft.len'; draft.length was probably meant."),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages.0.content.0: Images are not understood by this server"),
    ("/v1/completions", {"prompt": "a", "maxTokens": 5}, "max_tokens was probably meant"),
    ("/v1/embeddings", {"input": {}}, "input must be a text or a list, not an object.")])
def test_a_refusal_says_what_was_probably_meant(studio, client, path, body, words):
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"] and not studio.requests, answer.text


def test_ten_thousand_prompts_are_refused_with_the_cap(studio, client):                               # SV-13
    answer = client.post("/v1/completions", json={"prompt": ["a"] * 10_000})
    assert answer.status_code == 400 and "128" in answer.json()["error"]["message"] and not studio.requests
    assert client.post("/v1/embeddings", json={"input": ["a"] * 3000}).json()["error"]["param"] == "input"


def test_parts_and_tool_turns_become_messages(studio, client):
    call = {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    turns = [{"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]},
             {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None, "annotations": None, "function_call": None},
             {"role": "tool", "content": "rain", "tool_call_id": "abc"}]
    assert chat(client, messages=turns).status_code == 200
    first, second, third = studio.requests[-1].prompt
    assert first.content == "Hi there" and third.extra == (("tool_call_id", "abc"),)
    ((_, (made,)),) = second.extra
    assert made["function"]["arguments"] == {"city": "Bonn"} and second.content == ""


# ---------------------------------------------------------------------------------------------- answers
def test_a_chat_answer_has_openais_shape(studio, client):
    answer = chat(client, logprobs=True, top_logprobs=1).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-") and answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "w0 w1 w2 ", "refusal": None} and choice["finish_reason"] == "length"
    raw = list(b"w1 ")
    assert choice["logprobs"]["content"][1] == {"token": "w1 ", "logprob": -0.5, "bytes": raw,
                                                "top_logprobs": [{"token": "w1 ", "logprob": -0.5, "bytes": raw}]}
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 0}}
    assert (answer["timings"]["predicted_n"], answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"]) == (3, 4, 2)
    assert answer["seed"] == 7


def test_several_prompts_and_choices_are_counted_on(studio, client):
    body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 2}
    answer = client.post("/v1/completions", json=body).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(i, "w0 w1 ") for i in range(6)]
    assert answer["usage"]["completion_tokens"] == 12 and answer["usage"]["prompt_tokens"] == 9
    assert sorted(map(str, (request.prompt for request in studio.requests))) == ["a", "b", "c"]
    pieces = chunks(client.post("/v1/completions", json={**body, "stream": True}))
    texts = {}
    for piece in pieces:
        for choice in piece["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {i: "w0 w1 " for i in range(6)}
    assert sum(choice["finish_reason"] is not None for piece in pieces for choice in piece["choices"]) == 6


def test_echo_puts_the_prompt_before_the_answer(studio, client):
    for stream in (False, True):
        response = client.post("/v1/completions", json={"prompt": "Once ", "max_tokens": 1, "echo": True, "logprobs": 0, "stream": stream})
        text = "".join(choice["text"] for piece in chunks(response) for choice in piece["choices"]) if stream else \
            response.json()["choices"][0]["text"]
        assert text == "Once w0 " and studio.requests[-1].sampling.prompt_logprobs == 0


@pytest.mark.parametrize("options,wanted", [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)])
def test_sv_04_usage_comes_only_when_asked_for(studio, client, options, wanted):
    whole = chat(client).json()
    pieces = chunks(chat(client, stream=True, **({"stream_options": options} if options is not None else {})))
    assert content(pieces) == whole["choices"][0]["message"]["content"]
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({piece["id"] for piece in pieces}) == 1
    counted = [piece for piece in pieces if piece.get("usage")]
    if not wanted:
        assert not counted and "usage" not in pieces[0] and pieces[-1]["choices"][0]["finish_reason"] == "length"
        assert pieces[-1]["timings"]["predicted_n"] == 3
        return
    assert counted == pieces[-1:] and pieces[-1]["choices"] == []
    assert pieces[-1]["usage"] == whole["usage"] and whole["usage"]["total_tokens"] == 6
    assert all(piece["usage"] is None for piece in pieces[:-1])


def test_an_error_in_the_middle_is_told_in_the_stream(studio, client):
    studio.break_after = 1
    response = chat(client, stream=True)
    assert response.status_code == 200
    pieces = chunks(response)
    assert pieces[-1]["error"]["code"] == "step_failed" and content(pieces[:-1]) == "w0 "
    assert chat(client).status_code == 500


def test_errors_before_the_first_token_have_their_own_status(studio, client):
    answer = chat(client, model="absent")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    studio.present = {}
    answer = client.post("/v1/chat/completions", json={"messages": HELLO})
    assert answer.status_code == 409 and answer.headers["x-should-retry"] == "false" and answer.json()["error"]["remedy"]
    studio.present, studio.fail = {"tiny": INFO}, FULL
    answer = chat(client, stream=True)
    assert answer.status_code == 429 and answer.headers["retry-after"] and answer.json()["error"]["type"] == "rate_limit_error"


def test_embeddings_are_of_length_one_and_in_both_encodings(studio, client):
    body = {"input": ["ab", "abcdefghijkl"], "model": "tiny"}
    answer = client.post("/v1/embeddings", json=body).json()
    assert [item["index"] for item in answer["data"]] == [0, 1] and answer["usage"] == {"prompt_tokens": 14, "total_tokens": 14}
    assert answer["data"][1]["embedding"] == pytest.approx([3 / 13, 12 / 13, 4 / 13]) and "mean" in answer["pooling"]
    packed = client.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()["data"][1]["embedding"]
    assert struct.unpack("<3f", base64.b64decode(packed)) == pytest.approx([3 / 13, 12 / 13, 4 / 13])
    for given in ([], "", ["a", ""]):
        assert client.post("/v1/embeddings", json={"input": given}).json()["error"]["param"] == "input"
    assert client.post("/v1/embeddings", json={"input": [1, 2]}).json()["usage"]["prompt_tokens"] == 2


def test_tokens_there_and_back(client):
    assert client.post("/tokenize", json={"prompt": "a b c"}).json() == {"tokens": [1, 2, 3, 4], "count": 4, "model": "tiny"}
    assert client.post("/tokenize", json={"content": "a b", "add_special": False}).json()["tokens"] == [2, 3]
    assert client.post("/detokenize", json={"tokens": [0, 1]}).json() == {"content": "w0 w1 ", "model": "tiny"}
    assert client.post("/tokenize", json={}).json()["error"]["param"] == "prompt"
    for bad in ([-1], [32]):
        assert client.post("/detokenize", json={"tokens": bad}).json()["error"]["param"] == "tokens"


def test_models_are_listed_loaded_first(client):
    listed = client.get("/v1/models").json()
    assert [(one["id"], one["object"], one["loaded"]) for one in listed["data"]] == [("tiny", "model", True)]
    assert client.get("/v1/models/tiny").json()["id"] == "tiny"
    answer = client.get("/v1/models/absent")
    assert answer.status_code == 404 and "tiny" in answer.json()["error"]["remedy"]


@pytest.mark.parametrize("path", openai_routes.POSTS)
def test_get_for_post_says_how(client, path):
    for method in ("GET", "OPTIONS"):
        answer = client.request(method, path)
        assert answer.status_code == 405 and answer.headers["allow"] == "POST" and "POST" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/tiny", "/openapi.json"])
def test_head_is_answered_where_get_is_and_nothing_else(client, path):
    head = client.head(path)
    assert head.status_code == 200 and not head.content and head.headers["content-type"] == client.get(path).headers["content-type"]
    for method in ("OPTIONS", "POST", "DELETE"):
        answer = client.request(method, path)
        assert answer.status_code == 405 and answer.headers["allow"] == "GET, HEAD" and "GET" in answer.json()["error"]["message"]


def test_sv_03_models_answer_while_streams_run():
    """A pool of four threads and eight streams of 0.6 s and more: the list of models waits for none of them (measured on a quiet machine:
    under 200 ms all along; the bound leaves room for a busy one)."""
    studio = FakeStudio()
    studio.pace = 0.01
    with running(studio, pool=4, extend=extend(studio)) as (url, _):
        async def drive():
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                body = {"messages": HELLO, "max_tokens": 60, "stream": True}
                asking = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(8)]
                slowest = 0.0
                while not all(one.done() for one in asking):
                    began = time.monotonic()
                    assert (await client.get("/v1/models")).status_code == 200
                    slowest = max(slowest, time.monotonic() - began)
                    await asyncio.sleep(0.02)
                return [await one for one in asking], slowest

        answers, slowest = asyncio.run(drive())
    wanted = "".join(studio.words[i % 32] for i in range(60))
    assert [content(chunks(answer)) for answer in answers] == [wanted] * 8 and slowest < 0.5


@pytest.mark.parametrize("stream", [True, False])
def test_sv_01_a_client_that_leaves_stops_the_work(studio, client, stream):
    studio.pace = 0.02
    url = httpx.URL(client.base_url)
    body = json.dumps({"messages": HELLO, "max_tokens": 2000, "stream": stream}).encode()
    with socket.create_connection((url.host, url.port)) as raw:
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(body) + body)
        deadline = time.monotonic() + 5
        while studio.steps < 5:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    gone, deadline = studio.steps, time.monotonic() + 2
    while studio.running and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not studio.running and studio.steps - gone <= 3


# ---------------------------------------------------------------------------------------------- schemas and tools
def test_a_format_becomes_a_schema(studio, client):
    chat(client, response_format={"type": "json_object"})
    assert json.loads(studio.requests[-1].schema) == {"type": "object"}
    shape = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat(client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": shape, "strict": True}})
    assert json.loads(studio.requests[-1].schema) == shape
    chat(client, response_format={"type": "text"})
    assert studio.requests[-1].schema is None


def test_tools_reach_the_template_and_a_forced_call_the_grammar(studio, client):
    defined = {"type": "function", "function": {"name": "book", "parameters": {
        "type": "object", "properties": {"day": {"$ref": "#/$defs/Day"}}, "$defs": {"Day": {"enum": ["mo", "tu"]}}}}}
    chat(client, tools=[WEATHER, defined])
    assert dict(studio.requests[-1].template)["tools"][0] == WEATHER and studio.requests[-1].schema is None
    chat(client, tools=[WEATHER], tool_choice="none")
    assert studio.requests[-1].template == ()
    chat(client, tools=[WEATHER, defined], tool_choice={"type": "function", "function": {"name": "book"}}, parallel_tool_calls=False)
    schema = json.loads(studio.requests[-1].schema)
    assert schema["properties"]["name"] == {"const": "book"} and schema["$defs"] == {"Day": {"enum": ["mo", "tu"]}}
    chat(client, tools=[WEATHER, defined], tool_choice="required")
    assert [shape["properties"]["name"]["const"] for shape in json.loads(studio.requests[-1].schema)["anyOf"]] == ["weather", "book"]


CALL = '{"name": "weather", "arguments": {"city": "Bonn"}}'
LLAMA = CALL.replace("arguments", "parameters")


@pytest.mark.parametrize("text,said,calls", [
    (f"<tool_call>\n{CALL}\n</tool_call>", "", 1), (f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>", "Let me see.", 2),
    (f"<tool_call>\n{CALL}", "", 1), (LLAMA, "", 1), (f"<|python_tag|>{LLAMA}; {LLAMA}", "", 2), (f"[TOOL_CALLS] [{CALL}, {CALL}]", "", 2),
    (f"[{CALL}]", "", 1), ('[TOOL_CALLS]weather{"city": "Bonn"}', "", 1), ('weather[ARGS]{"city": "Bonn"}', "", 1),
    ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", 0), ('{"name": "other", "arguments": {}}',) * 2 + (0,),
    ('{"city": "Bonn"}',) * 2 + (0,), ("just text",) * 2 + (0,), ("[1, 2]",) * 2 + (0,), ("",) * 2 + (0,), ("{" * 5000,) * 2 + (0,),
    ('{"name": "weather", "arguments": "{\\"city\\": \\"Bonn\\"}"}', "", 1)])
def test_calls_are_found_in_what_models_write(text, said, calls):
    kept, found = parse(text, {"weather"})
    assert (kept, len(found)) == (said, calls)
    assert all((call.name, json.loads(call.arguments)) == ("weather", {"city": "Bonn"}) for call in found)


@pytest.mark.parametrize("text", [f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", CALL, "a < b <tool", "plain {x}", " [1] no", f" [TOOL_CALLS][{CALL}]"])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_stream_holds_back_only_what_may_be_a_call(text, size):
    held = Held(Plan(({},), frozenset({"weather"})))
    early = "".join(held.push(text[i:i + size]) for i in range(0, len(text), size))
    rest, calls = held.close()
    said, wanted = parse(text, {"weather"})
    assert (early + rest).strip() == said.strip() and [call.arguments for call in calls] == [call.arguments for call in wanted]
    if text.startswith("plain"):
        assert early == text
    if text.startswith("a < b"):
        assert early == "a < b "


def test_calls_in_an_answer_whole_and_streamed(studio, client):
    studio.words = ["Wait", ". <tool", "_call>", CALL, "</tool_call>"] + [""] * 27
    body = {"tools": [WEATHER], "max_tokens": 5}
    (choice,) = chat(client, **body).json()["choices"]
    assert choice["message"]["content"] == "Wait." and choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    pieces = chunks(chat(client, **body, stream=True))
    assert content(pieces).strip() == "Wait."
    (call,) = [call for piece in pieces for choice in piece["choices"] for call in choice["delta"].get("tool_calls", ())]
    assert call["index"] == 0 and json.loads(call["function"]["arguments"]) == {"city": "Bonn"} and len(call["id"]) == 9


# ---------------------------------------------------------------------------------------------- the description
def test_the_description_promises_what_is_kept(client):
    described = client.get("/openapi.json").json()
    assert set(described["paths"]) >= {"/generate", "/health", "/metrics", "/v1/chat/completions", "/v1/models", "/tokenize"}
    for path, operations in described["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            assert operation["responses"]["200"]["content"], path
    assert "HTTPValidationError" not in json.dumps(described)
