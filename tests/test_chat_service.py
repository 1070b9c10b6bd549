"""A chat as a value: what still fits, what is dropped or refused, edit, export, presets; answers that outlive their page."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from backends.base import ContextTooLong, Event, InvalidRequest, ModelNotLoaded, Sampling, StepFailed, Timing, Usage
from gainz_ui.services.answers import Answers
from gainz_ui.services.chat import (
    Chat, Turn, answer_room, archive, fit, from_export, preset_name, to_export, to_markdown)
from gainz_ui.tabs.chat import askable


def chat_of(pairs: int, size: int = 10, system: str = "") -> Chat:
    """Turns of ``size`` words each, ending with a question."""
    chat = Chat("c", system)
    for i in range(pairs):
        chat = chat.say("user", f"q{i} " + "w " * (size - 1)).say("assistant", f"a{i} " + "w " * (size - 1))
    return chat.say("user", "last " + "w " * (size - 1))


def words(messages) -> int:
    return sum(len(m.content.split()) for m in messages)


def test_what_fits_is_sent_whole():
    chat = chat_of(3)
    assert fit(chat, words, context=100, room=30, overflow="drop") == (chat, 70)


def test_the_oldest_turns_go_first_and_with_slack():
    """70 words and 30 of room in 80: two pairs would do (30 + 30 = 60 ≤ 70 with the slack of 10)."""
    fitted, prompt = fit(chat_of(3), words, context=80, room=30, overflow="drop")
    assert (fitted.start, prompt) == (4, 30)
    assert fitted.sent()[0].content.startswith("q2") and len(fitted.turns) == 7, (
        "dropped from what is sent, not from the chat"
    )


def test_without_room_for_slack_the_bare_fit_is_taken():
    fitted, prompt = fit(chat_of(1, 10), words, context=40, room=30, overflow="drop")
    assert (fitted.start, prompt) == (2, 10)


def test_what_was_dropped_stays_dropped_while_it_fits():
    fitted, _ = fit(chat_of(3), words, context=80, room=30, overflow="drop")
    longer = fitted.say("assistant", "ok").say("user", "more")
    assert fit(longer, words, 80, 30, "drop")[0].start == fitted.start, "the prompt's beginning, and so the cache, is kept"


def test_the_system_prompt_is_never_dropped():
    fitted, _ = fit(chat_of(3, system="be brief"), words, context=60, room=20, overflow="drop")
    assert fitted.start > 0 and fitted.sent()[0].role == "system"


def test_refuse_says_the_figures():
    with pytest.raises(ContextTooLong) as caught:
        fit(chat_of(3), words, context=80, room=30, overflow="refuse")
    assert caught.value.evidence == {"prompt_tokens": 70, "answer_tokens": 30, "context": 80}


def test_a_question_too_long_by_itself_is_refused_though_dropping_is_allowed():
    with pytest.raises(ContextTooLong):
        fit(chat_of(2, 50), words, context=60, room=20, overflow="drop")


@given(st.integers(0, 8), st.integers(1, 30), st.integers(1, 300), st.integers(1, 100))
def test_what_fit_returns_fits_and_begins_with_a_question(pairs, size, context, room):
    chat = chat_of(pairs, size)
    try:
        fitted, prompt = fit(chat, words, context, room, "drop")
    except ContextTooLong:
        assert size + room > context
        return
    assert prompt == words(fitted.sent()) and prompt + room <= context
    assert fitted.turns == chat.turns and fitted.turns[fitted.start].role == "user"


def test_room_for_the_answer():
    assert answer_room(Sampling(max_tokens=7), 4096) == 7
    assert answer_room(Sampling(), 4096) == 512


def test_an_edited_question_ends_the_chat_there_and_an_edited_answer_does_not():
    chat = chat_of(2)
    assert [t.content for t in chat.edit(2, "new").turns][2:] == ["new"]
    changed = chat.edit(1, "better")
    assert len(changed.turns) == 5 and changed.turns[1].content == "better" and changed.turns[1].stats["edited"] is True
    with pytest.raises(InvalidRequest):
        chat.edit(9, "x")


def test_cutting_behind_the_dropped_turns_leaves_a_valid_chat():
    fitted, _ = fit(chat_of(3), words, 80, 30, "drop")
    assert fitted.cut(2).start == 2 and fitted.edit(0, "again").start == 0


def test_asking_again_takes_the_answer_away():
    chat = Chat("c").say("user", "q").say("assistant", "a")
    assert [t.content for t in chat.until_question().turns] == ["q"] and Chat("c").until_question().turns == ()


@pytest.mark.parametrize(
    "data",
    [
        {"turns": []},
        {"id": "x", "turns": [{"role": "king", "content": "x"}]},
        {"id": "x", "turns": 5},
        [1],
        {"id": "x", "turns": [{"role": "user", "content": 5}]},
        {"id": "x", "turns": [], "start": 3},
    ],
)
def test_a_stored_chat_that_is_none_is_refused(data):
    with pytest.raises(InvalidRequest):
        Chat.of(data)


def test_export_comes_back_and_markdown_reads():
    chat = Chat("c", "Be brief.", (Turn("user", "Hi `x`"), Turn("assistant", "Hello", {
        "model": "m", "completion_tokens": 3, "tokens_per_second": 12.34, "ttft_seconds": 0.05, "finish": "stop"})))
    assert from_export(to_export(chat)) == chat
    text = to_markdown(chat, {"user": "You", "assistant": "Model", "system": "System prompt"})
    assert "**You**\n\nHi `x`" in text and "m · 3 tokens · 12.3 tok/s · TTFT 50 ms · stop" in text and "Be brief." in text
    for broken in ("{", "[]", json.dumps({"format": "other"})):
        with pytest.raises(InvalidRequest):
            from_export(broken)


def test_titles_are_one_short_line():
    assert Chat("c").say("user", "a\nb   c").title == "a b c" and len(Chat("c").say("user", "x" * 99).title) == 48


def test_the_archive_holds_each_chat_once_newest_first():
    first, second = chat_of(1), Chat("d").say("user", "x")
    kept = archive(archive([], first), second)
    assert [c["id"] for c in archive(kept, first)] == ["c", "d"]
    assert archive([], Chat("e")) == [] and len(archive([{"id": str(i)} for i in range(50)], first)) == 30


def test_preset_names():
    assert preset_name("  my  own ") == "my own"
    for bad in ("", "  ", "x" * 41, "precise"):
        with pytest.raises(InvalidRequest):
            preset_name(bad)


# ---------------------------------------------------------------------------------------------- answers
def stream(gate: threading.Event, tokens: int = 3):
    def start(cancel):
        for i in range(tokens):
            yield Event(text=f"w{i} ", ids=(i,))
        while not gate.is_set() and not cancel.is_set():
            time.sleep(0.005)
        yield Event(finish="cancelled" if cancel.is_set() else "stop")
        yield Event(-1, usage=Usage(5, tokens), timing=Timing(ttft_seconds=0.1, decode_tokens_per_second=9.0))
    return start


def finished(answer, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while answer.running and time.monotonic() < end:
        time.sleep(0.005)
    return not answer.running


def test_an_answer_is_seen_as_it_grows_and_ends_with_the_engines_figures():
    answers, gate = Answers(), threading.Event()
    answer = answers.begin("c", stream(gate), about="x")
    seen = 0
    while answer.view().tokens < 3:
        seen = answer.wait(seen, 1.0)
    view = answer.view()
    assert (view.text, view.done, view.finish, answer.about) == ("w0 w1 w2 ", False, None, "x")
    gate.set()
    assert finished(answer)
    view = answer.view()
    assert (view.done, view.finish, view.ttft, view.speed, view.usage.prompt_tokens) == (True, "stop", 0.1, 9.0, 5)


def test_stop_keeps_the_text():
    answers = Answers()
    answer = answers.begin("c", stream(threading.Event()))
    while answer.view().tokens < 3:
        time.sleep(0.005)
    assert answers.stop("c") and finished(answer)
    assert (answer.view().text, answer.view().finish, answer.view().error) == ("w0 w1 w2 ", "cancelled", None)
    assert not answers.stop("c") and not answers.stop("nobody")


def test_a_page_that_goes_and_comes_back_finds_its_answer():
    answers, gate = Answers(grace=30), threading.Event()
    answer = answers.begin("c", stream(gate))
    answers.watch("c")
    answers.leave("c")
    time.sleep(0.05)
    assert answer.running and answers.get("c") is answer
    answers.watch("c")
    gate.set()
    assert finished(answer) and answer.view().finish == "stop"
    answers.close()


def test_nobody_comes_back_and_the_answer_stops():
    answers = Answers(grace=0.05)
    answer = answers.begin("c", stream(threading.Event()))
    answers.watch("c")
    answers.watch("c")
    answers.leave("c")
    time.sleep(0.15)
    assert answer.running, "one page still looks"
    answers.leave("c")
    assert finished(answer) and answer.view().finish == "cancelled"


def test_a_new_question_stops_the_old_answer():
    answers = Answers()
    old = answers.begin("c", stream(threading.Event()))
    new = answers.begin("c", stream(threading.Event()))
    assert finished(old) and old.view().finish == "cancelled" and answers.get("c") is new
    answers.close()
    assert finished(new)


def test_errors_before_and_during_the_stream_reach_the_view():
    def refuses(cancel):
        raise InvalidRequest("no")

    def breaks(cancel):
        yield Event(text="half", ids=(1,))
        yield Event(finish="error")
        yield Event(-1, timing=Timing(), error=StepFailed("kernel"))

    def bug(cancel):
        yield Event(text="x", ids=(1,))
        raise KeyError("bug")

    answers = Answers()
    views = []
    for start in (refuses, breaks, bug):
        answer = answers.begin("c", start)
        assert finished(answer)
        views.append(answer.view())
    assert [view.error.code for view in views] == ["invalid_request", "step_failed", "error"]
    assert [view.text for view in views] == ["", "half", "x"] and all(view.finish == "error" for view in views)


@pytest.mark.parametrize("loaded, last, names, first", [
    ((("starter", True, ()), ("starter-draft", True, ("draft", "reads states"))), "starter", ["starter"], "starter"),
    ((("a", True, ()), ("b", True, ())), "a", ["a", "b"], "a"),
    ((("a", True, ()), ("b", False, ())), "b", ["a", "b"], "a"),
    ((("a", True, ()),), None, ["a"], "a"),
    ((("only-a-draft", True, ("draft", "reads states")),), "only-a-draft", [], None), ((), None, [], None)])
def test_a_draft_that_says_nothing_by_itself_is_not_offered_to_be_asked(loaded, last, names, first):
    models = tuple(SimpleNamespace(name=name, chat_template=chats, speaks="reads states" not in able) for name, chats, able in loaded)

    def model(name):
        if last is None:
            raise ModelNotLoaded("No model is loaded.", field="model")
        return SimpleNamespace(info=SimpleNamespace(name=last))

    assert askable(SimpleNamespace(model=model), SimpleNamespace(models=models)) == (names, first)
