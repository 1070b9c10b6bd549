"""Models of another server: what is sent, what is made of what comes back, and every way in which a server can fail."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace

import pytest

from backends.base import (
    AddressRefused, BrokenFile, Cancel, Cancelled, DraftSpec, InvalidRequest, Message, ModelDir, ModelNotFound, NotSupported, QueueFull,
    RemoteFailed, RemoteRefused, RemoteUnreachable, Request, Sampling)
from backends.reach import Reach
from backends.registry import Registry
from backends.remote import RemoteOptions, load
from tests.remote_server import DONE, Server, answer, chunk, counted, endless, event, then

HERE = Reach(private=True)
CHAT = (Message("system", "Be brief."), Message("user", "Hello?"))


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


def folder(tmp_path, address, called="far", **more) -> ModelDir:
    place = tmp_path / "away"
    place.mkdir(exist_ok=True)
    (place / "manifest.json").write_text(json.dumps({"remote": {"address": address, "model": called}, **more}))
    return ModelDir.of(place)


@pytest.fixture
def open_(server, tmp_path):
    """Load with these options; everything is closed at the end."""
    made = []

    def go(reach: Reach = HERE, **options):
        made.append(load(folder(tmp_path, server.url), RemoteOptions(**options), lambda _: None, Cancel(), reach))
        return made[-1]

    yield go
    for model in made:
        model.close()


def ask(model, prompt=CHAT, cancel=None, draft=None, time_limit=None, **sampling):
    """(texts, finishes, last event); asserts what every answer keeps."""
    texts, finishes, last = {}, {}, None
    for seen in model.generate(Request(prompt, Sampling(**sampling), draft, time_limit=time_limit), cancel or Cancel()):
        assert last is None, "nothing comes after the last event"
        if seen.last:
            last = seen
        elif seen.progress is None:
            assert seen.index not in finishes, "nothing comes after a choice has ended"
            seen.text.encode()              # whole characters only
            texts[seen.index] = texts.get(seen.index, "") + seen.text
            if seen.finish:
                finishes[seen.index] = seen.finish
    assert last is not None and len(finishes) == sampling.get("n", 1)
    return texts, finishes, last


def idle(model):
    """Until the connection of the last answer is free again."""
    deadline = time.monotonic() + 5
    while model.running and time.monotonic() < deadline:
        time.sleep(0.005)


# ---------------------------------------------------------------------------------------------- what it is
def test_a_folder_with_an_address_is_a_model(server, tmp_path):
    backend, claim = Registry.scan().claim(folder(tmp_path, server.url))
    assert (backend.name, backend.local, backend.missing()) == ("remote", False, ()) and "127.0.0.1" in claim.format


@pytest.mark.parametrize("said", [7, {}, {"address": "http://box"}, {"address": "box", "model": "m"}, {"address": 1, "model": "m"},
                                  {"address": "http://box", "model": ""}])
def test_a_manifest_that_does_not_say_where_is_broken(tmp_path, said):
    place = tmp_path / "away"
    place.mkdir()
    (place / "manifest.json").write_text(json.dumps({"remote": said}))
    with pytest.raises(BrokenFile, match="manifest.json"):
        Registry.scan().claim(ModelDir.of(place))


def test_what_it_cannot_give_is_absent_and_said(open_):
    info = open_().info
    assert info.path == "remote" and info.format == "OpenAI API · vLLM"
    for name in ("weights_bytes", "kv_bytes_per_token", "peak_bytes", "bits", "parameters", "estimate", "revision", "threads"):
        assert getattr(info, name) is None, name
    assert not (info.kernels or info.device or info.dtype or info.kv_type or info.capabilities or info.context or info.lossless)
    assert any("revision" in note and "memory" in note for note in info.notes)


def test_a_model_that_the_server_lacks_is_not_loaded(server, open_):
    server.models = ["near", "nearer"]
    with pytest.raises(ModelNotFound, match="near, nearer"):
        open_()


def test_a_list_that_is_none_and_one_that_is_empty(server, open_):
    server.models = []
    assert "lists no models" in open_().info.notes[0]
    server.models = 404
    with pytest.raises(RemoteFailed, match="no such model or route"):
        open_()


def test_it_has_no_tokenizer_and_says_so(open_):
    model = open_()
    for act in (lambda: model.tokenize("a"), lambda: model.detokenize([1])):
        with pytest.raises(NotSupported, match="tokenizer is not here"):
            act()


# ---------------------------------------------------------------------------------------------- what is sent
def test_a_chat_and_a_text_go_to_their_routes(server, open_):
    server.script = [answer("Hi"), answer("Hi", chat=False)]
    model = open_()
    ask(model)
    ask(model, "Once upon")
    (_, chat_route, _, chat), (_, text_route, _, text) = server.seen[-2:]
    assert chat_route == "/v1/chat/completions" and text_route == "/v1/completions"
    assert chat["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    assert text["prompt"] == "Once upon" and text["max_tokens"] is None and "max_tokens" not in chat
    assert chat["model"] == text["model"] == "far" and chat["stream"] is True and chat["stream_options"] == {"include_usage": True}


def test_every_field_goes_out_under_the_servers_name_for_it(server, open_):
    everything = dict(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=-0.5,
                      logit_bias=((7, 2.5),), seed=11, max_tokens=9, min_tokens=1, stop=("END",), stop_ids=(3,), ignore_eos=False)
    ask(open_(), **everything)
    sent = server.asked[-1]
    assert {key: sent[key] for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
            "logit_bias", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids")} == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "frequency_penalty": 0.5,
        "presence_penalty": -0.5, "logit_bias": {"7": 2.5}, "seed": 11, "max_tokens": 9, "min_tokens": 1, "stop": ["END"],
        "stop_token_ids": [3]}


def test_what_a_server_does_by_itself_is_switched_off(server, open_):
    """llama-server's own top-k is 40 and vLLM takes a model's generation config: an explicit "off" is sent to them."""
    ask(open_(dialect="llama-server"), temperature=1.0)
    assert {key: server.asked[-1][key] for key in ("top_k", "min_p", "repeat_penalty")} == {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}
    ask(open_(dialect="vllm"), temperature=1.0)
    assert server.asked[-1]["top_k"] == -1 and server.asked[-1]["repetition_penalty"] == 1.0
    ask(open_(dialect="openai"), temperature=1.0)
    assert not server.asked[-1].keys() & {"top_k", "min_p", "repetition_penalty", "ignore_eos"}
    ask(open_(dialect="openai"), temperature=1.0, top_k=3)
    assert server.asked[-1]["top_k"] == 3


@pytest.mark.parametrize("owner, title", [("vllm", "vLLM"), ("library", "Ollama"), ("llamacpp", "llama-server"), ("me", "llama-cpp-python"),
                                          ("somebody", "OpenAI"), (None, "OpenAI")])
def test_the_kind_of_server_is_seen_by_its_list(server, open_, owner, title):
    server.owner = owner
    assert open_().info.format == f"OpenAI API · {title}"


@pytest.mark.parametrize("dialect, field", [("ollama", {"top_k": 4}), ("ollama", {"logit_bias": ((1, 1.0),)}),
                                            ("llama-server", {"stop_ids": (1,)}), ("llama-cpp-python", {"stop_ids": (1,)}),
                                            ("vllm", {"prompt_logprobs": 1})])
def test_what_would_be_ignored_is_refused_before_it_is_sent(server, open_, dialect, field):
    model, before = open_(dialect=dialect), len(server.asked)
    with pytest.raises(NotSupported) as caught:
        ask(model, **field)
    assert caught.value.field == next(iter(field)) and len(server.asked) == before


def test_a_limit_of_a_prompt_is_kept_in_bytes_and_drafts_cannot_be(server, open_):
    model = open_()
    server.script = [answer("Hi", chat=False)]
    for prompt in ("é" * 4 + "a", (1,) * 10):                 # a token is a byte at least
        assert list(model.generate(Request(prompt, prompt_limit=10), Cancel()))[-1].error is None
        with pytest.raises(InvalidRequest, match="10 tokens(; this one has 11|.*bytes counts as one)") as caught:
            model.generate(Request(prompt + prompt[:1], prompt_limit=10), Cancel())
        assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequest, match="prompt may have 20"):
        model.generate(Request(CHAT, prompt_limit=20), Cancel())
    with pytest.raises(NotSupported, match="logits"):
        ask(model, draft=DraftSpec("lookup"))
    assert len(server.asked) == 2


def test_schema_tools_template_and_going_on(server, open_):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    turns = (*CHAT, Message("assistant", "", extra=(("tool_calls", [call]),)), Message("tool", "1", extra=(("tool_call_id", "c1"),)))
    request = Request(turns, Sampling(), template=(("tools", [tool]), ("enable_thinking", False)), schema='{"type": "object"}',
                      continue_last=True)
    list(open_().generate(request, Cancel()))
    sent = server.asked[-1]
    assert sent["tools"] == [tool] and sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert sent["response_format"]["json_schema"]["schema"] == {"type": "object"} and sent["continue_final_message"] is True
    assert sent["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}' and sent["messages"][3]["tool_call_id"] == "c1"
    with pytest.raises(NotSupported, match="go on with a turn"):
        open_(dialect="ollama").generate(Request(CHAT, continue_last=True), Cancel())


def test_the_key_goes_into_one_header_and_nowhere_else(server, open_, tmp_path):
    origin = server.url.removesuffix("/v1")
    asked = []
    model = open_(replace(HERE, key=lambda where: asked.append(where) or "s3cret" if where == origin else None))
    ask(model)
    assert server.seen[-1][2]["authorization"] == "Bearer s3cret" and set(asked) == {origin}
    server.script = [then(lambda h: h.fail(400, '{"error": {"message": "bad key s3cret"}}'))]
    _, _, last = ask(model)
    told = str(last.error) + repr(last.error.to_dict()) + repr(model.info)
    assert "s3cret" not in told and "bad key …" in told
    assert "s3cret" not in (tmp_path / "away" / "manifest.json").read_text()


# ---------------------------------------------------------------------------------------------- what comes back
def test_an_answer_with_its_counts_and_clocks(open_, server):
    server.script = [then(lambda h: h.stream([chunk("A"), chunk("B"), chunk(finish="length"), counted(completion_tokens=2), DONE], 0.05))]
    texts, finishes, last = ask(open_(), seed=3)
    assert texts == {0: "AB"} and finishes == {0: "length"} and last.error is None and last.seed == 3
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 2)
    assert last.usage.cached_tokens is None, "not told is not zero"
    timing = last.timing
    assert timing.prefill_seconds is None and timing.ttft_seconds < timing.total_seconds and 0.03 < timing.decode_seconds < 1
    assert timing.decode_tokens_per_second == pytest.approx(1 / timing.decode_seconds)


def test_counts_that_are_not_told_are_absent(open_, server):
    server.script = [[chunk("A"), chunk(finish="stop"), DONE]]
    _, _, last = ask(open_(), max_tokens=5)
    assert last.usage is None and last.timing.decode_tokens_per_second is None and last.seed is None and last.error is None


def test_what_arrives_at_once_has_no_speed(open_, server):
    server.script = [[b"".join(answer("A", "B", "C", completion_tokens=3))]]
    _, _, last = ask(open_())
    assert last.usage.completion_tokens == 3 and last.timing.decode_tokens_per_second is None


def test_cached_tokens_and_the_servers_own_clock(open_, server):
    usage = event({"choices": [], "usage": {"prompt_tokens": 50, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}},
                   "timings": {"prompt_ms": 250.0, "prompt_per_second": 136.0, "cache_n": 99}})
    server.script = [[chunk("A"), chunk(finish="stop"), usage, DONE]]
    _, _, last = ask(open_())
    assert last.usage.cached_tokens == 16
    assert (last.timing.prefill_seconds, last.timing.prefill_tokens_per_second) == (0.25, 136.0)


RAW = b"".join(answer("Gr\u00fc\u00dfe ", "\u4f60\u597d ", "\U0001f389"))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_characters_cut_anywhere_come_out_whole(open_, server, size):
    server.script = [[RAW[i:i + size] for i in range(0, len(RAW), size)]]
    assert ask(open_())[0] == {0: "Grüße 你好 🎉"}


def test_half_a_character_in_each_of_two_chunks(open_, server):
    """Some servers escape a surrogate pair and cut between its halves."""
    half = lambda text: b'data: {"choices": [{"index": 0, "delta": {"content": "' + text + b'"}}]}\n\n'  # noqa: E731
    server.script = [[half(b"a\\ud83c"), half(b"\\udf89b"), half(b"\\ud83c"), chunk(finish="stop"), DONE]]
    assert ask(open_())[0] == {0: "a🎉b\ufffd"}


def test_comments_line_ends_and_strange_lines_are_no_trouble(open_, server):
    server.script = [[b": ping\n\n", b"event: message\r\nid: 1\r\n", chunk("A").replace(b"\n", b"\r\n"), b":\n\n", chunk("B"), b"retry: 1\n\n",
                      chunk(finish="stop"), b"\n\n", DONE, b"data: after the end\n\n"]]
    assert ask(open_())[0] == {0: "AB"}


@pytest.mark.parametrize("end", [[], [counted()], [b"data: [DONE]"], [counted().rstrip()]])
def test_a_missing_done_is_no_error_where_the_answer_has_ended(open_, server, end):
    server.script = [[chunk("A"), chunk(finish="stop"), *end]]
    texts, finishes, last = ask(open_())
    assert (texts, finishes, last.error) == ({0: "A"}, {0: "stop"}, None)


def test_done_without_a_finish_is_an_end(open_, server):
    server.script = [[chunk("A"), DONE]]
    assert ask(open_())[1:2] == ({0: "stop"},)


def test_thinking_and_calls_come_as_the_model_wrote_them(open_, server):
    delta = lambda **said: event({"choices": [{"index": 0, "delta": said}]})  # noqa: E731
    server.script = [[delta(reasoning_content="Let me "), delta(reasoning_content="see."), delta(content="So:"),
                      delta(tool_calls=[{"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"x"'}}]),
                      delta(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]), chunk(finish="tool_calls"), DONE]]
    texts, finishes, _ = ask(open_())
    assert texts[0] == '<think>\nLet me see.\n</think>\n\nSo:<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert finishes == {0: "stop"}


def test_several_choices(open_, server):
    server.script = [[chunk("A"), chunk("B", index=1), chunk("C"), chunk(finish="stop", index=1), chunk(finish="length"),
                      counted(completion_tokens=3), DONE]]
    texts, finishes, last = ask(open_(), n=2)
    assert texts == {0: "AC", 1: "B"} and finishes == {0: "length", 1: "stop"} and last.error is None
    assert server.asked[-1]["n"] == 2


def test_log_probabilities_of_both_shapes(open_, server):
    new = {"content": [{"token": "A", "logprob": -0.5, "bytes": [65], "top_logprobs": [{"token": "B", "logprob": -1.0, "bytes": None}]}]}
    old = {"tokens": ["A"], "token_logprobs": [-0.5], "top_logprobs": [{"B": -1.0, "A": -0.5}]}
    model = open_()
    for prompt, said, chat in ((CHAT, new, True), ("x", old, False)):
        server.script = [[chunk("A", chat=chat, logprobs=said), chunk(finish="stop", chat=chat), counted(), DONE]]
        seen = [one for e in model.generate(Request(prompt, Sampling(logprobs=1)), Cancel()) for one in e.logprobs]
        assert [(one.id, one.text, one.logprob) for one in seen] == [(-1, "A", -0.5)] and ("B", -1.0) in [top[1:] for top in seen[0].top]
    assert server.asked[-1]["logprobs"] == 1 and server.asked[-2]["top_logprobs"] == 1


def test_a_server_that_does_not_stream_is_read_whole(open_, server):
    server.script = [{"choices": [{"index": 0, "message": {"role": "assistant", "content": "All of it"}, "finish_reason": "stop"}],
                      "usage": {"prompt_tokens": 3, "completion_tokens": 3}}]
    texts, finishes, last = ask(open_())
    assert (texts, finishes, last.usage.completion_tokens) == ({0: "All of it"}, {0: "stop"}, 3)
    assert last.timing.decode_tokens_per_second is None


# ---------------------------------------------------------------------------------------------- what was not kept
@pytest.mark.parametrize("script, asked, field", [
    (answer("A"), {"n": 2}, "n"), (answer("A END B"), {"stop": ("END",)}, "stop"), (answer("A", completion_tokens=9), {"max_tokens": 3}, "max_tokens"),
    (answer("A", completion_tokens=1), {"ignore_eos": True, "max_tokens": 8}, "ignore_eos"),
    (answer("A", completion_tokens=1), {"min_tokens": 4}, "min_tokens"), (answer("A"), {"logprobs": 1}, "logprobs")])
def test_what_a_server_did_not_honour_is_an_error_that_names_it(open_, server, script, asked, field):
    server.script = [script]
    _, _, last = ask(open_(), **asked)
    assert isinstance(last.error, NotSupported) and last.error.field == field


# ---------------------------------------------------------------------------------------------- failures
def failure(model, server, *script, **more):
    server.script = list(script)
    texts, finishes, last = ask(model, **more)
    assert last.error is not None and set(finishes.values()) <= {"error", "stop"}
    return last.error


@pytest.mark.parametrize("status, body, kind, words", [
    (400, '{"error": {"message": "max_tokens is too large"}}', RemoteRefused, "max_tokens is too large"),
    (400, '{"object": "error", "message": "context is 4096"}', RemoteRefused, "context is 4096"),
    (422, '{"detail": [{"loc": ["body", "n"], "msg": "must be 1"}]}', RemoteRefused, "body.n: must be 1"),
    (413, "too large", RemoteRefused, "too large"), (401, '{"error": "no key"}', RemoteFailed, "refuses the key: no key"),
    (403, '{"error": "not from there"}', RemoteFailed, "forbids this: not from there"), (508, "", AddressRefused, "leads back to it"),
    (404, '{"error": {"message": "model gone"}}', RemoteFailed, "model gone"), (500, "<h1>Oops</h1>", RemoteFailed, "Oops"),
    (400, "x" * 5000, RemoteRefused, "xxx…")])
def test_a_status_becomes_an_error_with_the_servers_words(open_, server, status, body, kind, words):
    error = failure(open_(), server, then(lambda h: h.fail(status, body)))
    assert type(error) is kind and words in error.cause and len(error.cause) < 800 and error.remedy and error.evidence.get("status", 508) == status


def test_no_room_is_waited_for_and_then_told(open_, server):
    server.script = [then(lambda h: h.fail(429, "busy", retry_after="0")), then(lambda h: h.fail(503, "loading", retry_after="0")), answer("Now")]
    assert ask(open_())[0] == {0: "Now"} and len(server.asked) == 3
    server.script = [then(lambda h: h.fail(429, "busy", retry_after="0"))]
    assert isinstance(failure(open_(retries=1), server, *server.script), QueueFull)
    server.script = [then(lambda h: h.fail(429, "busy", retry_after="3600"))]
    began = time.monotonic()
    error = failure(open_(), server, *server.script)
    assert isinstance(error, QueueFull) and error.evidence["seconds"] == 3600 and time.monotonic() - began < 5


def test_a_redirect_is_not_followed(open_, server):
    error = failure(open_(), server, then(lambda h: h.fail(307, "", location="http://169.254.169.254/latest/meta-data")))
    assert isinstance(error, RemoteFailed) and "169.254" in str(error.evidence["location"]) and len(server.asked) == 1


@pytest.mark.parametrize("script, words", [
    ([chunk("A")], "middle"), ([], "middle"), ([b'data: {"choices": [{"ind'], "no JSON"), ([b"data: nonsense\n\n"], "no JSON"),
    ([b"data: 7\n\n"], "no chunk"), ([event({"choices": 7})], "choices"), ([event({"choices": [7]})], "choices"),
    ([event({"choices": [{"index": 5, "delta": {"content": "x"}}]})], "nobody asked for"), ([DONE], "without an answer"),
    ([chunk("A"), event({"error": {"message": "CUDA out of memory"}}), DONE], "CUDA out of memory"),
    ([chunk("A"), b'event: error\ndata: {"message": "overloaded"}\n\n'], "overloaded"),
    ([chunk("A"), b'error: {"message": "slot lost"}\n\n'], "slot lost"), ([chunk("A"), chunk(finish="content_filter"), DONE], "filter"),
    ([chunk("A"), chunk(finish="bored"), DONE], "not known"), ([b'data: {"choices": ' + b"[" * 9999 + b"\n\n"], "no JSON")])
def test_an_answer_that_breaks_off_is_an_error_and_never_an_end(open_, server, script, words):
    error = failure(open_(), server, script)
    assert type(error) is RemoteFailed and words in error.cause and len(server.asked) == 1, "and it is not asked again"


def test_what_was_said_before_it_broke_is_kept(open_, server):
    server.script = [[chunk("A"), chunk("B")]]
    texts, finishes, last = ask(open_())
    assert texts == {0: "AB"} and finishes == {0: "error"} and isinstance(last.error, RemoteFailed)


def test_a_connection_cut_in_the_middle_is_not_tried_again(open_, server):
    def cut(handler):
        handler.begin()
        handler.piece(chunk("A"))
        handler.connection.shutdown(socket.SHUT_RDWR)
    assert isinstance(failure(open_(), server, cut), RemoteFailed) and len(server.asked) == 1


def test_one_that_is_cut_before_a_word_is_not_tried_again_either(open_, server):
    """It was sent to its end: the server may be at it."""
    assert isinstance(failure(open_(), server, lambda h: h.connection.shutdown(socket.SHUT_RDWR)), RemoteFailed) and len(server.asked) == 1


def test_a_server_that_is_gone_is_tried_again_and_then_said(open_, server):
    model = open_(retries=1, connect_seconds=1)
    model._client.close()               # the list came over a connection that is still open
    server.close()
    _, finishes, last = ask(model)
    assert isinstance(last.error, RemoteUnreachable) and finishes == {0: "error"}


def test_silence_ends_an_answer(open_, server):
    def still(handler):
        handler.begin()
        handler.piece(chunk("A"))
        server.left.wait(20)
    error = failure(open_(silence_seconds=1), server, still)
    server.left.set()
    assert isinstance(error, RemoteFailed) and "nothing for 1 s" in error.cause


def test_keep_alive_comments_are_signs_of_life(open_, server):
    def slow(handler):
        handler.begin()
        for _ in range(4):
            time.sleep(0.4)
            handler.piece(b": still here\n\n")
        for raw in (*answer("Now"), b""):
            handler.piece(raw)
        handler.wfile.write(b"0\r\n\r\n")
    server.script = [slow]
    assert ask(open_(silence_seconds=1))[0] == {0: "Now"}


# ---------------------------------------------------------------------------------------------- stopping
def test_cancel_ends_it_at_once_and_hangs_up(open_, server):
    server.script = [endless]
    cancel, seen, began, finishes = Cancel(), 0, 0.0, []
    for each in open_().generate(Request(CHAT), cancel):
        seen += bool(each.text)
        if seen == 3 and not cancel.is_set():
            began = time.monotonic()
            cancel.set()
        finishes += [each.finish] if each.finish else []
    assert finishes == ["cancelled"] and each.last and each.error is None and time.monotonic() - began < 5
    assert server.left.wait(20), "the server is told that nobody listens"


def test_closing_the_iterator_hangs_up(open_, server):
    server.script = [endless]
    events = open_().generate(Request(CHAT), Cancel())
    next(each for each in events if each.text)
    events.close()
    assert server.left.wait(5) and list(events) == []


def test_a_time_limit_keeps_what_is_there(open_, server):
    server.script = [endless]
    texts, finishes, last = ask(open_(), time_limit=0.3)
    assert finishes == {0: "time_limit"} and texts[0].startswith("0 1 ") and last.error is None and last.timing.total_seconds < 2


def test_a_request_that_was_cancelled_before_is_never_sent(open_, server):
    cancel, model = Cancel(), open_()
    cancel.set()
    assert ask(model, cancel=cancel)[1] == {0: "cancelled"}
    time.sleep(0.1)
    assert server.asked == []


def test_unloading_ends_what_runs_and_refuses_the_next(open_, server):
    server.script = [endless]
    model = open_()
    events = model.generate(Request(CHAT), Cancel())
    next(each for each in events if each.text)
    model.close()
    assert [each.finish for each in events if each.finish] == ["cancelled"]
    with pytest.raises(Cancelled):
        model.generate(Request(CHAT), Cancel())


# ---------------------------------------------------------------------------------------------- several at once
def test_answers_run_beside_each_other_up_to_the_places(open_, server):
    model, gate, peak, now, lock = open_(streams=2), threading.Event(), [0], [0], threading.Lock()

    def held(handler):
        with lock:
            now[0] += 1
            peak[0] = max(peak[0], now[0])
        gate.wait(5)
        with lock:
            now[0] -= 1
        handler.stream(answer("x"))

    server.script = [held]
    running = [model.generate(Request(CHAT), Cancel()) for _ in range(4)]
    deadline = time.monotonic() + 5
    while peak[0] < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (model.running, model.waiting) == (2, 2)
    with pytest.raises(QueueFull):
        raise [e for e in model.generate(Request(CHAT, queue_limit=0.05), Cancel()) if e.last][0].error
    gate.set()
    ends = [[e for e in events if e.last][0] for events in running]
    assert peak[0] == 2 and all(end.error is None for end in ends) and max(end.timing.queue_seconds for end in ends) > 0.01


def test_a_connection_is_used_again_and_a_stale_one_is_not(open_, server):
    model, ports = open_(), []

    def noting(handler):
        ports.append(handler.client_address[1])
        handler.stream(answer("x"))

    server.script = [noting]
    ask(model)
    idle(model)
    ask(model)
    assert ports[0] == ports[1]

    def closing(handler):
        noting(handler)
        handler.close_connection = True

    server.script = [closing, noting]
    ask(model)
    time.sleep(0.1)
    assert ask(model)[2].error is None and ports[3] != ports[2]


# ---------------------------------------------------------------------------------------------- addresses
def test_an_address_out_of_reach_is_refused_at_load_and_at_each_answer(server, tmp_path, open_):
    with pytest.raises(AddressRefused, match="private network"):
        load(folder(tmp_path, server.url), RemoteOptions(), lambda _: None, Cancel())
    assert server.seen == []
    model = open_(Reach(allowed=(server.url.removeprefix("http://").removesuffix("/v1"),)))
    assert ask(model)[2].error is None
    idle(model)
    model._client._reach = Reach()
    model._client.close()
    assert isinstance(ask(model)[2].error, AddressRefused)


def test_a_key_does_not_go_out_in_the_open(server, tmp_path, monkeypatch):
    monkeypatch.setattr(Reach, "in_the_open", lambda self, address, peer: True)
    with pytest.raises(AddressRefused, match="without encryption"):
        load(folder(tmp_path, server.url), RemoteOptions(), lambda _: None, Cancel(), replace(HERE, key=lambda _: "k"))
    assert server.seen == []


@pytest.mark.parametrize("values", [{"streams": 0}, {"dialect": "klingon"}, {"silence_seconds": 0}, {"retries": 11}])
def test_options_have_limits(values):
    with pytest.raises(InvalidRequest):
        RemoteOptions(**values)
