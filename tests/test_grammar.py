"""Answers by a schema: every text is of it, whatever the model wants, and the same alone, in a batch, drafted or preempted."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest

from backends.base import DraftSpec, Request, Sampling
from backends.engine import noise
from backends.engine.grammar import Grammars
from backends.engine.loop import Engine
from backends.engine.sampler import choose
from backends.errors import InvalidRequest, NotSupported
from tests.toys import EOS, SIZE, ToyDecoder, ask, drain, toy_model

PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 150},
                                           "kind": {"enum": ["cat", "dog"]}},
          "required": ["name", "age", "kind"], "additionalProperties": False}
PROMPT = tuple(b"Say it: ")


def sampled(seed: int, **more) -> Sampling:
    return Sampling(temperature=1.0, seed=seed, max_tokens=400, **more)


@pytest.fixture
def library():
    return pytest.importorskip("llguidance", reason="answers by a schema need llguidance (requirements.txt)")


def plainly(schema: dict, sampling: Sampling) -> list[int]:
    """The answer by the plainest loop: the mask of the text so far, one token, again."""
    model = toy_model()
    constraint = Grammars(model.text, model.decoder.vocab).constraint(json.dumps(schema))
    tokens, seed = list(PROMPT), noise.choice_seed(sampling.seed, 0)
    while not constraint.complete:
        token = choose(model.decoder.logits(tokens), sampling, seed, len(tokens), allowed=constraint.allowed())
        tokens.append(token)
        if token == EOS:
            break
        constraint.accept(token)
    return tokens[len(PROMPT):]


def test_an_answer_is_of_its_schema_alone_in_a_batch_and_drafted(library):
    wanted = {seed: plainly(PERSON, sampled(seed)) for seed in range(6)}
    for room, draft in ((10**9, None), (10**9, DraftSpec("lookup", 5)), (160, DraftSpec("lookup", 3)), (10**9, DraftSpec("draft", 4))):
        model, other = toy_model(ToyDecoder(room=room)), toy_model(name="draft")
        engine = Engine(budget=32)
        engine.attach(model), engine.attach(other)
        asked = [ask(engine, model, PROMPT, sampled(seed), schema=json.dumps(PERSON), draft=draft) for seed in wanted]
        free = ask(engine, model, PROMPT, Sampling(max_tokens=20))             # a neighbour without a schema is left alone
        drain(engine)
        for got, ids in zip(asked, wanted.values(), strict=True):
            assert got.check().ids() == ids and got.finish() == "stop"
            found = json.loads(got.text())
            assert set(found) == {"name", "age", "kind"} and found["kind"] in ("cat", "dog") and isinstance(found["age"], int)
        alone = ask(engine, model, PROMPT, Sampling(max_tokens=20))
        drain(engine)
        assert free.ids() == alone.ids()


def test_a_draft_is_cut_where_the_grammar_ends_it(library):
    """A lookup that repeats the prompt's JSON proposes tokens of another key: they are not even computed."""
    prompt = tuple(b'{"name": "abc", "age": 1} {"name": "abc", "age": 1} ')
    model = toy_model(ToyDecoder(lambda kv: np.eye(SIZE, dtype=np.float32)[prompt[len(kv) % len(prompt)]] * 9))
    engine = Engine()
    engine.attach(model)
    schema = {"type": "object", "properties": {"kind": {"enum": ["cat"]}}, "required": ["kind"], "additionalProperties": False}
    got = ask(engine, model, prompt, Sampling(max_tokens=60), schema=json.dumps(schema), draft=DraftSpec("lookup", 8))
    drain(engine)
    assert json.loads(got.check().text()) == {"kind": "cat"}


def test_penalties_and_bias_still_act_inside_the_grammar(library):
    schema = json.dumps({"enum": ["aa", "bb"]})
    texts = []
    for bias in ((), ((ord("a"), -100.0),), ((ord("b"), -100.0),)):
        model = toy_model(ToyDecoder(lambda kv: np.zeros(SIZE, np.float32)))
        engine = Engine()
        engine.attach(model)
        got = ask(engine, model, PROMPT, Sampling(max_tokens=20, logit_bias=bias), schema=schema)
        drain(engine)
        texts.append(json.loads(got.text()))
    assert texts[1:] == ["bb", "aa"]


def test_a_cut_answer_says_so(library):
    model = toy_model()
    engine = Engine()
    engine.attach(model)
    got = ask(engine, model, PROMPT, Sampling(max_tokens=3), schema=json.dumps(PERSON))
    drain(engine)
    assert got.check().finish() == "length" and got.text().startswith("{")


def test_further_choices_have_a_place_of_their_own(library):
    model = toy_model()
    engine = Engine()
    engine.attach(model)
    got = ask(engine, model, PROMPT, sampled(3, n=3), schema=json.dumps(PERSON))
    drain(engine)
    texts = [got.check(3).text(index) for index in range(3)]
    assert len(set(texts)) == 3 and all(set(json.loads(text)) == {"name", "age", "kind"} for text in texts)


@pytest.mark.parametrize("schema,words", [
    ('{"type": "nonsense"}', "nonsense"), ('{"type": "array", "uniqueItems": true}', "uniqueItems"), ("[1", "read"), ("3", "schema"),
    ('{"$ref": "http://somewhere.example/x"}', "somewhere"), ('{"type": "string", "pattern": "(?<=a)b"}', "look-around"),
    ('{"type": "object", "properties": ' * 300 + "{}" + "}" * 300, "schema"), ('{"$ref": "#/nowhere"}', "nowhere"),
    ('{"$ref": "#"}', "followed")])
def test_a_schema_that_cannot_be_followed_is_refused_by_name(library, schema, words):
    model = toy_model()
    with pytest.raises(InvalidRequest) as caught:
        Grammars(model.text, model.decoder.vocab).constraint(schema)
    assert caught.value.field == "response_format" and words in str(caught.value).lower() + str(caught.value)


def test_indentation_has_an_end(library):
    model = toy_model()
    constraint = Grammars(model.text, model.decoder.vocab).constraint('{"type": "object"}')
    constraint.accept(ord("{"))
    for _ in range(24):
        assert constraint.allowed()[ord(" ")]
        constraint.accept(ord(" "))
    assert not constraint.allowed()[ord(" ")] and constraint.allowed()[ord("}")]


def test_without_the_library_the_field_is_named(monkeypatch):
    def absent(name):
        raise ImportError(name)
    monkeypatch.setattr(importlib, "import_module", absent)
    model = toy_model()
    with pytest.raises(NotSupported, match="llguidance") as caught:
        Grammars(model.text, model.decoder.vocab).constraint("{}")
    assert caught.value.field == "response_format" and "pip install" in caught.value.remedy


@pytest.mark.parametrize("sampling,field", [(Sampling(ignore_eos=True), "ignore_eos"), (Sampling(min_tokens=2, max_tokens=3), "min_tokens")])
def test_what_contradicts_a_schema_is_refused(sampling, field):
    with pytest.raises(InvalidRequest) as caught:
        Request("a", sampling, schema="{}")
    assert caught.value.field == field
