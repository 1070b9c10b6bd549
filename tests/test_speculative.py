"""Which draft fits which model: each rule with its reason, the same for page, API and engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backends import speculative
from backends.base import DraftSpec, ModelInfo, Vocab
from backends.engine.vocabularies import first_difference
from backends.errors import InvalidRequest, ModelNotLoaded, NotSupported
from backends.speculative import Difference, judge, pairings

BIG = ModelInfo("big", "gguf", "gguf Q4_0", capabilities=("batch", "draft"), vocab_fingerprint="one")
SMALL = replace(BIG, name="small")
OTHER = replace(BIG, name="other", vocab_fingerprint="two")
STATE = replace(BIG, name="state", path="generic-sequential", capabilities=("logprobs",))
AWAY = replace(BIG, name="away", path="remote", capabilities=())


def never():
    raise AssertionError("fingerprints that are equal need no comparing")


def test_the_same_vocabulary_drafts_token_by_token():
    assert judge(BIG, SMALL, never).how == "tokens" and judge(BIG, BIG, never).code == "itself"


def test_a_longer_vocabulary_is_used_as_far_as_both_go():
    pair = judge(BIG, OTHER, lambda: Difference(200, None, "<extra>"))
    assert pair.how == "tokens" and pair.known == 200 and "200" in pair.reason


def test_another_tokenizer_goes_through_text_and_the_first_id_is_named():
    pair = judge(BIG, OTHER, lambda: Difference(7, "a", "b"))
    assert pair.how == "text" and "id 7 is 'a' here and 'b' there" in pair.reason


@pytest.mark.parametrize(("target", "draft", "code"), [
    (AWAY, SMALL, "target_remote"), (STATE, SMALL, "target_sequential"), (BIG, AWAY, "draft_remote"),
    (BIG, STATE, "draft_sequential")])
def test_what_does_not_fit_says_why(target, draft, code):
    pair = judge(target, draft, never)
    assert not pair.fits and pair.code == code and pair.reason.endswith(".")


def test_every_model_is_listed_with_its_reason():
    found = pairings(BIG, (BIG, SMALL, STATE), lambda name: None, {"asleep": (5, 10), "giant": (50, 10)})
    assert {pair.name: pair.code for pair in found} == {"lookup": "lookup", "big": "itself", "small": "same",
                                                         "state": "draft_sequential", "asleep": "not_loaded", "giant": "no_room"}
    assert "50" in found[-1].reason and "10" in found[-1].reason
    assert not any(pair.fits for pair in pairings(AWAY, (SMALL,), lambda name: None))


def test_a_request_is_refused_before_it_is_queued():
    loaded = {info.name: info for info in (BIG, SMALL, STATE)}
    speculative.check(DraftSpec("lookup"), BIG, loaded)
    speculative.check(DraftSpec("lookup+small"), BIG, loaded)
    for target, name, error in ((AWAY, "lookup", NotSupported), (STATE, "small", NotSupported), (BIG, "nobody", ModelNotLoaded),
                                (BIG, "lookup+state", InvalidRequest)):
        with pytest.raises(error) as caught:
            speculative.check(DraftSpec(name), target, loaded)
        assert caught.value.field == "draft"


class Codec:
    """A vocabulary and nothing else."""

    def __init__(self, tokens):
        self.tokenizer = self
        self._tokens = {token: id for id, token in enumerate(tokens)}

    def get_vocab(self, with_added_tokens=True):
        return self._tokens


@pytest.mark.parametrize(("mine", "theirs", "expected"), [
    ("abc", "abc", None), ("abc", "axc", Difference(1, "b", "x")), ("abc", "abcd", Difference(3, None, "d")),
    ("abcd", "ab", Difference(2, "c", None))])
def test_the_first_difference(mine, theirs, expected):
    sizes = [Vocab(len(tokens), frozenset(), "") for tokens in (mine, theirs)]
    assert first_difference(Codec(mine), Codec(theirs), *sizes) == expected


def test_padding_is_no_difference():  # SP-01
    """200 tokens, heads of 320 and 256 rows: what a head has beyond its tokenizer is none of its tokens."""
    tokens = [f"t{n}" for n in range(200)]
    assert first_difference(Codec(tokens), Codec(tokens), Vocab(320, frozenset(), ""), Vocab(256, frozenset(), "")) is None


@pytest.mark.parametrize(("sent", "name", "length"), [("lookup", "lookup", None), ({"name": "small"}, "small", None), (
    {"name": "small", "length": "auto"}, "small", None), ({"name": "lookup+small", "length": 4}, "lookup+small", 4)])
def test_the_draft_field_of_generate(sent, name, length):
    from gainz_ui.api.native import GenerateBody, to_request
    draft = to_request(GenerateBody(prompt="a", draft=sent)).draft
    assert (draft.name, draft.length) == (name, length)
