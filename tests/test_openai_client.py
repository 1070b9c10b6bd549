"""The official openai client against the whole program: a real process, a real engine, a tiny real model, its error classes included."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from tests.test_app import FIXTURE, Program

TEMPLATE = ("{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
            "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}[assistant] ")
HELLO = [{"role": "user", "content": "Say something."}]
FOX = "The quick brown fox"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Bonn", "Rome"]}}, "required": ["city"], "additionalProperties": False}}}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openai")
    (folder / "models").mkdir()
    shutil.copytree(FIXTURE, folder / "models" / "tiny")
    (folder / "models" / "tiny" / "chat_template.jinja").write_text(TEMPLATE)
    shutil.copytree(FIXTURE, folder / "models" / "plain")
    made = Program(folder, "--load", "tiny", "--api-key", "secret", "--time-limit", "30")
    made.ready()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def client(program):
    with openai.OpenAI(base_url=program.url + "/v1", api_key="secret", timeout=60, max_retries=0) as made:
        yield made


def post(program, path, **body):
    return httpx.post(program.url + path, json=body, headers={"authorization": "Bearer secret"}, timeout=60)


def test_models(client):
    assert [(one.id, one.loaded) for one in client.models.list()] == [("tiny", True), ("plain", False)]
    assert client.models.retrieve("plain").owned_by == "local"


def test_a_chat_whole_and_streamed_is_the_same_text(client):
    ask = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 20, "temperature": 0.8, "seed": 5}
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert whole.usage.completion_tokens == len(choice.logprobs.content) <= 20 and whole.seed == 5
    assert all(item.logprob <= 0 and len(item.top_logprobs) == 2 for item in choice.logprobs.content)
    made = b"".join(bytes(item.bytes) for item in choice.logprobs.content).decode(errors="ignore")
    assert choice.message.content and choice.message.content in made + " "
    pieces = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.delta.content or "" for piece in pieces for c in piece.choices) == choice.message.content
    assert pieces[-1].usage == whole.usage.model_copy(update={"prompt_tokens_details": pieces[-1].usage.prompt_tokens_details})
    assert pieces[-1].choices == [] and pieces[-1].timings["predicted_n"] == whole.usage.completion_tokens


def test_completions_equal_generate_and_count_drafts(client, program):
    free = post(program, "/generate", prompt=FOX, max_tokens=24, ignore_eos=True).json()
    for extra in ({"ignore_eos": True}, {"ignore_eos": True, "draft": {"name": "lookup", "length": 4}}):
        made = client.completions.create(model="tiny", prompt=FOX, max_tokens=24, temperature=0, extra_body=extra)
        assert made.choices[0].text == free["text"] and made.usage.completion_tokens == 24
    assert made.timings["draft_n"] >= made.timings["draft_n_accepted"] >= 0
    stop = free["text"][6:9]
    made = client.completions.create(model="tiny", prompt=FOX, max_tokens=24, temperature=0, stop=[stop])
    assert made.choices[0].text == free["text"][:free["text"].index(stop)] and made.choices[0].finish_reason == "stop"
    assert made.choices[0].stop_reason == stop


def test_many_prompts_and_choices(client):
    made = client.completions.create(model="tiny", prompt=[FOX, "Once upon"], n=2, max_tokens=5, temperature=1, seed=3)
    alone = client.completions.create(model="tiny", prompt=FOX, n=2, max_tokens=5, temperature=1, seed=3)
    assert [one.text for one in made.choices[:2]] == [one.text for one in alone.choices] and len({one.text for one in made.choices}) > 2
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens


def test_bias_and_penalties_reach_the_model(client, program):
    (token,) = post(program, "/tokenize", prompt="a", add_special=False).json()["tokens"][-1:]
    made = client.completions.create(model="tiny", prompt=FOX, max_tokens=4, temperature=0, logit_bias={str(token): 100})
    ids = post(program, "/detokenize", tokens=[token] * 4).json()["content"]
    assert made.choices[0].text.strip() == ids.strip()


def test_echo_scores_the_prompt(client):
    made = client.completions.create(model="tiny", prompt=FOX, max_tokens=1, temperature=0, echo=True, logprobs=1)
    (choice,) = made.choices
    assert choice.text.startswith(FOX) and choice.logprobs.token_logprobs[0] is None
    assert "".join(choice.logprobs.tokens[:made.usage.prompt_tokens]) == FOX and choice.logprobs.tokens[0]
    assert len(choice.logprobs.tokens) == made.usage.total_tokens and all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    both = client.completions.create(model="tiny", prompt=FOX, max_tokens=0, n=2, echo=True, logprobs=0).choices
    assert [one.text for one in both] == [FOX, FOX] and both[0].logprobs == both[1].logprobs
    assert both[0].logprobs.token_logprobs == choice.logprobs.token_logprobs[:-1]


def test_embeddings_in_both_encodings(client):
    made = client.embeddings.create(model="tiny", input=[FOX, "Something else entirely", FOX])
    vectors = np.array([one.embedding for one in made.data])
    plain = client.embeddings.create(model="tiny", input=FOX, encoding_format="float")
    assert vectors.shape == (3, 256) and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.allclose(vectors[0], vectors[2], atol=1e-5) and np.allclose(vectors[0], plain.data[0].embedding, atol=1e-5)
    assert vectors[0] @ vectors[1] < 0.999 and "mean" in made.pooling


def test_tokens_there_and_back(program):
    ids = post(program, "/tokenize", prompt=FOX).json()
    assert ids["count"] == len(ids["tokens"]) and post(program, "/detokenize", tokens=ids["tokens"]).json()["content"].strip() == FOX
    assert post(program, "/tokenize", messages=HELLO).json()["count"] > ids["count"]


def test_a_schema_shapes_the_answer_drafted_or_not(client):
    pytest.importorskip("llguidance", reason="answers by a schema need llguidance")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["cat", "dog"]}}, "required": ["ok", "kind"],
              "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    ask = {"model": "tiny", "messages": HELLO, "response_format": form, "seed": 1, "max_tokens": 200}
    texts = [client.chat.completions.create(**ask, extra_body=extra).choices[0].message.content
             for extra in ({}, {"draft": "lookup"}, {"temperature": 0})]
    assert texts[0] == texts[1] and all(set(json.loads(text)) == {"ok", "kind"} for text in texts)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**ask, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "cat"}}}})
    assert caught.value.param == "response_format"


def test_a_forced_call_is_a_call(client):
    pytest.importorskip("llguidance", reason="forced calls need llguidance")
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        ask = {"model": "tiny", "messages": HELLO, "tools": [TOOL], "tool_choice": choice, "seed": 2, "max_tokens": 200}
        (call,) = client.chat.completions.create(**ask).choices[0].message.tool_calls
        assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Bonn", "Rome")
        pieces = [one for piece in client.chat.completions.create(**ask, stream=True) for one in piece.choices]
        (streamed,) = [call for one in pieces for call in one.delta.tool_calls or ()]
        assert streamed.function.arguments == call.function.arguments and pieces[-1].finish_reason == "tool_calls"
    turns = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
             {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert client.chat.completions.create(model="tiny", messages=turns, tools=[TOOL], max_tokens=3).usage.completion_tokens <= 3


# ---------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize("body,field", [({"logit_bias": {"517": 1}}, "logit_bias"), ({"logit_bias": {"-1": 1}}, "logit_bias"), ({"stop_ids": [10**6]}, "stop_ids"),
                                        ({"prompt": [-1]}, "prompt"), ({"prompt": [512]}, "prompt")])
def test_sv_08_a_bad_id_is_refused_and_its_neighbour_unharmed(program, body, field):
    ask = {"prompt": FOX, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = post(program, "/v1/completions", **ask).json()["choices"][0]["text"]
    with ThreadPoolExecutor(2) as pool:
        neighbour = pool.submit(post, program, "/v1/completions", **ask)
        answer = post(program, "/v1/completions", **{**ask, **body})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text
        assert neighbour.result().json()["choices"][0]["text"] == alone


def test_sv_03_eight_streams_at_once_each_as_alone(client):
    def ask(i):
        pieces = client.completions.create(model="tiny", prompt=f"{FOX} {i}", max_tokens=30, seed=i, temperature=1, stream=True)
        return "".join(piece.choices[0].text for piece in pieces)

    alone = [ask(i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, i) for i in range(8)]
        while not all(one.done() for one in running):
            assert len(client.models.list().data) == 2
        assert [one.result() for one in running] == alone


def raised(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return caught.value


def test_the_clients_error_classes(client, program):
    chat = client.chat.completions.create
    error = raised(openai.NotFoundError, lambda: chat(model="absent", messages=HELLO))
    assert error.code == "model_not_found" and "tiny" in error.body["remedy"] and error.param == "model"
    error = raised(openai.ConflictError, lambda: chat(model="plain", messages=HELLO))
    assert error.code == "model_not_loaded" and "Load it" in error.body["remedy"]
    error = raised(openai.BadRequestError, lambda: chat(model="tiny", messages=HELLO, extra_body={"surprise": 1}))
    assert error.param == "surprise" and error.type == "invalid_request_error"
    error = raised(openai.BadRequestError, lambda: chat(model="tiny", messages=HELLO, max_tokens=10**6))
    assert error.code == "context_too_long"
    locked = openai.OpenAI(base_url=program.url + "/v1", api_key="wrong", max_retries=0)
    assert raised(openai.AuthenticationError, lambda: locked.models.list()).body["remedy"]
    with pytest.raises(openai.BadRequestError):             # a stream that cannot begin has a status as well
        chat(model="tiny", messages=HELLO, stream=True, logit_bias={"100000": 1})


def test_a_plain_model_takes_no_tools_and_no_chat(client, program):
    post(program, "/gradio_api/call/load", data=["plain", {}])
    program._until(lambda: "plain" in httpx.get(program.url + "/health").json()["models"], 60)
    error = raised(openai.BadRequestError, lambda: client.chat.completions.create(model="plain", messages=HELLO))
    assert error.code == "no_chat_template"


BEGINNERS = [       # what, method, path, body (None: none), key, status
    ("wrong path", "POST", "/v1/chat/completion", {"messages": HELLO}, True, 404), ("wrong model", "POST", "/v1/chat/completions",
     {"model": "gpt-4o", "messages": HELLO}, True, 404), ("empty prompt", "POST", "/v1/chat/completions", {"model": "tiny", "messages": []}, True, 400),
    ("too long", "POST", "/v1/completions", {"model": "tiny", "prompt": "word " * 3000}, True, 400),
    ("negative temperature", "POST", "/v1/chat/completions", {"model": "tiny", "messages": HELLO, "temperature": -1}, True, 400),
    ("huge n", "POST", "/v1/chat/completions", {"model": "tiny", "messages": HELLO, "n": 10**6}, True, 400),
    ("broken JSON", "POST", "/v1/chat/completions", b'{"messages": [', True, 400), ("wrong key", "POST", "/v1/chat/completions",
     {"messages": HELLO}, False, 401), ("GET for POST", "GET", "/v1/chat/completions", None, True, 405),
    ("no JSON header", "POST", "/v1/chat/completions", "messages=hi", True, 400)]


@pytest.mark.parametrize("what,method,path,body,key,status", BEGINNERS, ids=[case[0] for case in BEGINNERS])
def test_a_beginners_request_gets_a_one_line_remedy(program, what, method, path, body, key, status):
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    headers = {"authorization": f"Bearer {'secret' if key else 'other'}"} | ({"content-type": "application/json"} if not isinstance(body, str) else {})
    answer = httpx.request(method, program.url + path, content=content, headers=headers, timeout=30)
    error = answer.json()["error"]
    assert answer.status_code == status and error["message"] and error["remedy"] and "\n" not in error["message"] + error["remedy"]


def test_the_curl_lines_of_the_documentation_work(program):
    text = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8").replace("\\\n", "")
    commands = [shlex.split(line) for line in re.findall(r"^curl .*$", text, re.MULTILINE)]
    assert len(commands) >= 6
    for command in commands:
        url = next(part for part in command if part.startswith("http")).replace("http://127.0.0.1:7860", program.url)
        body = json.loads(command[command.index("-d") + 1]) if "-d" in command else None
        if body:
            body["model"] = "tiny"          # another one was loaded meanwhile, which would be the default
        answer = httpx.request("POST" if body else "GET", url, json=body, headers={"authorization": "Bearer secret"}, timeout=60)
        assert answer.status_code == 200, (command, answer.text)


def test_without_a_model_the_remedy_says_how_to_load_one(program, client):
    for name in httpx.get(program.url + "/health").json()["models"]:
        call = post(program, "/gradio_api/call/unload", data=[name]).json()
        httpx.get(f"{program.url}/gradio_api/call/unload/{call['event_id']}", headers={"authorization": "Bearer secret"}, timeout=30)
    error = raised(openai.ConflictError, lambda: client.chat.completions.create(model="tiny", messages=HELLO))
    assert "--load-on-demand" in error.body["remedy"]
