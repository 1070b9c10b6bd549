"""Side by side: what runs at once and what in turn, the answers under way, and where they part. Over a studio without an
engine."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from backends.base import (
    DraftSpec, InvalidRequest, LoadError, Message, ModelInfo, ModelNotFound, NoChatTemplate, Request, Sampling)
from gainz_ui.services import compare as module
from gainz_ui.services.answers import View
from gainz_ui.services.catalog import CatalogEntry
from gainz_ui.services.compare import Comparison, Plan, plan, related, room, to_dict
from gainz_ui.services.parting import Parting, Shot, marked, parting
from gainz_ui.tabs.compare_view import card, drafting_note
from tests.fakes.studio import FakeStudio, info

GB = 10**9
ASK = Request((Message("user", "Hello"),), Sampling(max_tokens=10, seed=4))


@pytest.fixture
def studio():
    made = FakeStudio(speed=2000.0, tokens=20, load_seconds=0.05)
    made._models["starter"] = info("starter", 2048)
    made.order = []
    load, unload, submit = made.load, made.unload, made.submit

    def note(kind, call):
        return lambda *a, **k: (made.order.append((kind, a[0] if kind != "ask" else a[1])), call(*a, **k))[1]

    made.load, made.unload, made.submit = note("load", load), note("unload", unload), note("ask", submit)
    return made


def free(monkeypatch, count):
    monkeypatch.setattr(module, "free_memory", lambda device: count)


# ---------------------------------------------------------------------------------------------- choosing
def entry(name, parent="", bits=None, loaded=False):
    return CatalogEntry(name, Path(name), 1, parent=parent, bits=bits, loaded=loaded)


LLAMA, GPTQ, AWQ = entry("llama"), entry("tiny-gptq", "tiny", 4.0), entry("tiny-awq", "tiny", 4.0)


@pytest.mark.parametrize(("entries", "expected"), [
    ([], []), ([LLAMA], ["llama"]), ([LLAMA, entry("qwen")], ["llama"]),
    ([LLAMA, GPTQ, AWQ, entry("tiny")], ["tiny", "tiny-awq", "tiny-gptq"]),                                   # a model and its variants
    ([LLAMA, GPTQ, AWQ], ["tiny-awq", "tiny-gptq"]),                                                         # the model itself is gone
    ([entry("llama", loaded=True), GPTQ, AWQ], ["llama"]),                                               # what is loaded comes first
    ([GPTQ, entry("tiny-awq", "tiny", loaded=True), entry("a"), entry("a-q", "a")], ["tiny-awq", "tiny-gptq"]),
    ([LLAMA, CatalogEntry("draft", Path("draft"), 1, parent="llama", helper=True)], ["llama"]),            # a draft is no variant
    ([entry("starter", bits=4.5), entry("starter-fp16"), LLAMA], ["starter-fp16", "starter"]),          # alike by name
    ([entry(f"a-{i}", "a") for i in range(6)] + [entry("a")], ["a", "a-0", "a-1", "a-2"])])
def test_what_stands_chosen_at_first_belongs_together(entries, expected):
    assert related(entries) == expected


def test_the_catalog_knows_what_a_variant_was_made_from(tmp_path):
    from backends.registry import Registry
    from gainz_ui.services.catalog import examine
    for name, parent in (("one", {"name": "starter"}), ("two", "starter"), ("three", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps({"parent": parent}))
    assert [examine(Registry(()), name, tmp_path / name).parent for name in ("one", "two", "three")] == ["starter", "", ""]


# ---------------------------------------------------------------------------------------------- planning
@pytest.mark.parametrize("names", [5, "starter", None, [1, 2], {"starter": 1, "starter-fp16": 2}])
def test_names_come_in_a_list(studio, names):
    with pytest.raises(InvalidRequest, match="list of names") as caught:
        plan(studio, names)
    assert caught.value.field == "models"


@pytest.mark.parametrize("names", [[], ["starter"], ["starter", "starter"], ["a", "b", "c", "d", "e"]])
def test_two_to_four_different_models(studio, names):
    with pytest.raises(InvalidRequest):
        plan(studio, names)
    assert studio.order == []


def test_a_name_that_is_none_is_refused(studio):
    with pytest.raises(ModelNotFound):
        plan(studio, ["starter", "absent"])


def test_at_once_where_memory_holds_all(studio, monkeypatch):
    free(monkeypatch, 4 * GB)
    found = plan(studio, ["starter", "starter-fp16"])
    assert (found.in_turn, found.why, found.load, found.unload) == (False, "", ("starter-fp16",), ())
    assert found.need == studio.estimate("starter-fp16", {"context": 4096, "streams": 1}).total
    assert plan(studio, ["starter", "starter-fp16"], alone=True).why == "asked"


def test_in_turn_where_memory_does_not_hold_all(studio, monkeypatch):
    studio._models.clear()
    one = studio.estimate("starter", {"context": 4096}).total
    free(monkeypatch, int(one * 1.5))
    found = plan(studio, ["starter", "starter-fp16"])
    assert (found.in_turn, found.why, found.load, found.unload) == (True, "memory", ("starter", "starter-fp16"), ())


def test_a_loaded_one_makes_way_only_where_not_even_one_more_fits(studio, monkeypatch):
    free(monkeypatch, studio.estimate("starter-fp16", {"context": 4096}).total // 2)
    found = plan(studio, ["starter", "starter-fp16"])
    assert found.in_turn and found.unload == ("starter",)


def test_the_context_grows_with_prompt_and_answer():
    assert room(ASK) == 4096
    assert room(Request("x" * 10_000, Sampling(max_tokens=4000))) == 9 * 1024 + 1024
    assert room(Request("", Sampling(max_tokens=None))) == 4096


# ---------------------------------------------------------------------------------------------- running
def finished(comparison):
    assert comparison.wait(20)
    return comparison.shots()


def test_at_once_loads_first_and_asks_all_with_the_same_seed(studio, monkeypatch):
    free(monkeypatch, 4 * GB)
    comparison = Comparison(studio, plan(studio, ["starter", "starter-fp16"]), ASK)
    shots = finished(comparison)
    assert studio.order == [("load", "starter-fp16"), ("ask", "starter"), ("ask", "starter-fp16")]
    assert [shot.state for shot in shots] == ["done", "done"] and all(len(shot.ids) == 10 for shot in shots)
    assert {request.sampling.seed for _, request in studio.requests} == {4}
    assert set(studio.loaded()) == {"starter", "starter-fp16"}, "what answers at once stays loaded"


def test_a_seed_is_drawn_once_for_all(studio, monkeypatch):
    free(monkeypatch, 4 * GB)
    request = replace(ASK, sampling=replace(ASK.sampling, seed=None))
    comparison = Comparison(studio, plan(studio, ["starter", "starter-fp16"]), request)
    finished(comparison)
    assert {asked.sampling.seed for _, asked in studio.requests} == {comparison.seed} and comparison.seed is not None


def test_in_turn_each_is_loaded_asked_and_unloaded(studio, monkeypatch):
    studio._models.clear()
    free(monkeypatch, int(studio.estimate("starter", {"context": 4096}).total * 1.5))
    shots = finished(Comparison(studio, plan(studio, ["starter", "starter-fp16"]), ASK))
    assert studio.order == [(kind, name) for name in ("starter", "starter-fp16") for kind in ("load", "ask", "unload")]
    assert studio.loaded() == {} and all(shot.unloaded and shot.state == "done" for shot in shots)


def test_in_turn_because_it_was_asked_unloads_nothing(studio, monkeypatch):
    free(monkeypatch, 4 * GB)
    shots = finished(Comparison(studio, plan(studio, ["starter-fp16", "starter"], alone=True), ASK))
    assert studio.order == [("ask", "starter"), ("load", "starter-fp16"),
                            ("ask", "starter-fp16")], "the loaded one does not wait"
    assert not any(shot.unloaded for shot in shots)


def test_a_loaded_one_that_makes_way_is_unloaded_before_the_next_is_loaded(studio, monkeypatch):
    free(monkeypatch, studio.estimate("starter-fp16", {"context": 4096}).total // 2)
    finished(Comparison(studio, plan(studio, ["starter-fp16", "starter"]), ASK))
    assert studio.order[:3] == [("ask", "starter"), ("unload", "starter"), ("load", "starter-fp16")]


def test_one_that_fails_leaves_the_others_alone(studio, monkeypatch):
    free(monkeypatch, 4 * GB)
    chosen = plan(studio, ["starter", "starter-fp16"])

    def broken(*a, **k):
        raise LoadError("It is cut.")

    studio.load = broken
    shots = finished(Comparison(studio, chosen, ASK))
    assert [shot.state for shot in shots] == ["done", "failed"] and shots[1].error.cause == "It is cut."


def test_a_refused_question_is_that_sides_error(studio, monkeypatch):
    free(monkeypatch, 4 * GB)
    studio._models["starter-fp16"] = info("starter-fp16", 2048)
    submit = studio.submit

    def choosy(request, model=None, cancel=None):
        if model == "starter":
            raise NoChatTemplate("It has none.")
        return submit(request, model, cancel)

    studio.submit = choosy
    shots = finished(Comparison(studio, plan(studio, ["starter", "starter-fp16"]), ASK))
    assert [shot.state for shot in shots] == ["failed", "done"] and shots[0].error.code == "no_chat_template"


def test_stop_ends_all_answers_and_keeps_their_texts(studio, monkeypatch):
    free(monkeypatch, 4 * GB)
    studio.speed, studio.tokens = 50.0, 5000
    request = replace(ASK, sampling=replace(ASK.sampling, max_tokens=None))
    comparison = Comparison(studio, plan(studio, ["starter", "starter-fp16"]), request)
    end = time.monotonic() + 10
    while not all(shot.view.text for shot in comparison.shots()) and time.monotonic() < end:
        time.sleep(0.02)
    comparison.stop()
    shots = finished(comparison)
    assert studio._running == 0 and all(shot.view.finish == "cancelled" and shot.view.text for shot in shots)


def test_what_a_program_gets_is_plain(studio, monkeypatch):
    free(monkeypatch, 4 * GB)
    comparison = Comparison(studio, plan(studio, ["starter", "starter-fp16"]), ASK)
    found = to_dict(comparison, finished(comparison))
    assert json.loads(json.dumps(found)) == found
    assert found["mode"] == "at once" and found["seed"] == 4 and found["reference"] == "starter"
    assert [answer["tokens"] for answer in found["answers"]] == [10, 10] and found["answers"][1]["parts_at_token"] is None
    assert found["answers"][0]["disk_bytes"] == 98_362_432 and found["answers"][0]["kernels"] == "aten · 2 threads"


# ---------------------------------------------------------------------------------------------- where they part
def shot(pieces, finish="stop", fingerprint="a", done=True):
    text = "".join(text for _, text in pieces)
    view = View(text, sum(len(ids) for ids, _ in pieces), done, finish if done else None)
    return Shot("m", "done", view, ModelInfo("m", "gguf", "GGUF", vocab_fingerprint=fingerprint), 1, None, None, False,
                tuple(pieces))


A = [((1,), "The"), ((2,), " sky"), ((3,), " is"), ((4,), " blue"), ((0,), "")]
B = [((1,), "The"), ((2,), " sky"), ((7,), " isn't"), ((4,), " blue"), ((0,), "")]


def test_answers_part_at_the_first_other_token():
    assert parting(shot(A), shot(A)) is None
    assert parting(shot(A), shot(B)) == Parting(2, len("The sky")), "the token decides, though both go on with “ is”"
    assert parting(shot(A), shot(B, done=False)) == Parting(2, 7), "told while it still runs"


def test_as_long_as_one_is_the_beginning_of_the_other_they_agree_until_it_has_ended():
    short = A[:2]
    assert parting(shot(A), shot(short, done=False)) is None
    assert parting(shot(A), shot(short, "length")) is None, "cut short is no difference"
    assert parting(shot(short, "stop"), shot(A)) == Parting(2, 7)


def test_other_tokens_are_compared_by_their_text():
    other = [((9, 8), "The sky"), ((5,), " is"), ((6,), " black")]
    assert parting(shot(A), shot(other, fingerprint="b")) == Parting(3, len("The sky is bl"))


def test_several_tokens_in_one_event():
    grouped = [((1, 2), "The sky"), ((7, 4), " isn't blue")]
    assert parting(shot(A), shot(grouped)) == Parting(2, 7)


def test_marks_cover_the_text_and_say_what_differs():
    text, reference = "The sky isn't blue today, friends", "The sky is blue today, Tom"
    parts = marked(text, 7, reference)
    assert "".join(piece for _, piece in parts) == text
    assert parts == [("same", "The sky "), ("first", "isn't"), ("same", " blue today,"), ("other", " friends")]
    assert marked(text, None) == [("same", text)]
    assert marked(text, 7) == [("same", "The sky "), ("first", "isn't"), ("other", " blue today, friends")]
    assert marked("The sky", 7, "The sky is") == [("same", "The sky"), ("first", "")], "it ended here"


def test_what_a_model_writes_is_text_in_its_card():
    """A card is one line of HTML of ours: no tag of an answer's, and no line break after which Markdown would begin."""
    words = "<img src=x onerror=alert(1)>\r\n\n![p](http://evil.example/p.png)\n\n<script>a</script>"
    for shots in ([shot([((1,), words)])] * 2, [shot([((1,), "Other")]), shot([((1,), words)])]):
        text = card("en", shots, 1, Plan(("m", "m")))
        assert "&lt;img src=x onerror" in text and not any(sign in text for sign in ("<img", "<script", "\n", "\r"))


# ---------------------------------------------------------------------------------------------- drafts
def test_each_variant_is_drafted_for_where_the_draft_fits_and_says_so_where_not(studio):
    studio._models["odd"] = replace(info("odd", 2048), capabilities=("logprobs",))
    studio._entries["odd"] = studio._entries["starter"].__class__(**{**vars(studio._entries["starter"]), "name": "odd"})
    request = replace(ASK, draft=DraftSpec("lookup", 3))
    comparison = Comparison(studio, Plan(("starter", "odd")), request)
    assert comparison.wait(10)
    drafted, plain = comparison.shots()
    asked = dict(studio.requests)
    assert asked["starter"].draft == DraftSpec("lookup", 3) and asked["odd"].draft is None
    assert drafted.undrafted is None and plain.undrafted.code == "target_sequential"
    said = to_dict(comparison, comparison.shots())
    assert said["draft"] == {"name": "lookup", "length": 3} and said["answers"][0]["speculation"]["acceptance"] == .75
    assert "one sequence at a time" in said["answers"][1]["undrafted"] and said["answers"][1]["speculation"] is None
    first, second = (card("en", comparison.shots(), number, comparison.plan) for number in (0, 1))
    assert "It pays: the answer came 1.62" in first and "75% of 32 draft tokens accepted, 2.50 tokens a pass" in first
    assert "tinted" not in first and "Answered without a draft: Lookup in the text does not fit, odd runs one sequence" in second


def test_one_choice_of_a_draft_for_several_models(studio):
    from gainz_ui.services import draft_offers
    studio._models["odd"] = replace(info("odd", 2048), capabilities=("logprobs",))
    found = {pair.name: pair for pair in draft_offers.offers(studio, ["odd", "starter"])}
    assert found["lookup"].fits and found["starter"].code == "itself" and not found["odd"].fits and not found["giant"].fits
    assert {pair.code for pair in draft_offers.offers(studio, ["starter-fp16"])} == {"lookup", "seen_when_loaded"}
    assert list(draft_offers.unfit(studio, ["odd", "starter", "starter-fp16"], DraftSpec("lookup+starter"))) == ["odd"]
    assert draft_offers.pairing(studio, "starter", DraftSpec("gone")).code == "not_loaded" and draft_offers.unfit(studio, ["odd"], None) == {}
    note = drafting_note("en", "lookup", list(found.values()), draft_offers.unfit(studio, ["odd"], DraftSpec("lookup")), ["starter"])
    assert "costs no memory" in note and "odd answers without it: odd runs one sequence" in note and "kernels of starter" in note
