"""Faults of a body in our words, without a server; and which field was meant by one that there is not."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from gainz_ui.api.faults import told
from gainz_ui.api.native import GenerateBody
from gainz_ui.api.openai_schema import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from gainz_ui.services.meant import ELSEWHERE, meant

HELLO = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES = (ChatBody, CompletionBody, EmbeddingBody, GenerateBody, TokenizeBody, DetokenizeBody)


def said(model, body):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body, from_attributes=True)           # as FastAPI does
    return told([{**fault, "loc": ("body", *fault["loc"])} for fault in caught.value.errors()], model)


def content(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize("model,body,field,message", [
    (ChatBody, {}, "messages", "messages is missing."),
    (ChatBody, {"messages": "Hi"}, "messages", "messages must be a list, not 'Hi'."),
    (ChatBody, {"messages": ["Hi"]}, "messages.0", "messages.0 must be an object, not 'Hi'."),
    (ChatBody, {"messages": []}, "messages", "messages is empty."),
    (ChatBody, {**HELLO, "response_format": "json"}, "response_format", "response_format must be an object, not 'json'."),
    (ChatBody, {**HELLO, "stream_options": 3}, "stream_options", "stream_options must be an object, not 3."),
    (ChatBody, {**HELLO, "seed": 1.5}, "seed", "seed must be a whole number, not 1.5."),
    (ChatBody, {**HELLO, "stream": "yes"}, "stream", "stream must be true or false, not 'yes'."),
    (ChatBody, {**HELLO, "store": True}, "store", "store must be false, not true."),
    (ChatBody, {**HELLO, "stop": 5}, "stop", "stop must be a text or a list, not 5."),
    (ChatBody, {**HELLO, "temperature": "h" * 99}, "temperature", "temperature must be a number, not a text."),
    (ChatBody, {**HELLO, "logit_bias": [1]}, "logit_bias", "logit_bias must be an object, not a list."),
    (ChatBody, {**HELLO, "draft": 3}, "draft", "draft must be a text or an object, not 3."),
    (ChatBody, {**HELLO, "draft": {"name": "d", "length": "long"}}, "draft.length",
     "draft.length must be a whole number or 'auto', not 'long'."),
    (ChatBody, {**HELLO, "tool_choice": "maybe"}, "tool_choice", "tool_choice must be 'none', 'auto' or 'required' or an object, not 'maybe'."),
    (ChatBody, {**HELLO, "tool_choice": {"type": "function"}}, "tool_choice.function", "tool_choice.function is missing."),
    (ChatBody, {"messages": [{"role": "assistant", "content": "x", "refusal": "no"}]}, "messages.0.refusal",
     "messages.0.refusal must be null, not 'no'."),
    (CompletionBody, {"prompt": [1, "a"]}, "prompt.1", "prompt.1 must be a whole number or a list, not 'a'."),
    (DetokenizeBody, {"tokens": [None]}, "tokens.0", "tokens.0 must be a whole number, not null."),
    (ChatBody, {**HELLO, "Temperature": 1}, "Temperature", "Unknown field 'Temperature'; temperature was probably meant."),
    (ChatBody, {**HELLO, "str": 1}, "str", "Unknown field 'str'."),
    (ChatBody, {**HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "schemas": {}}}},
     "response_format.json_schema.schemas",
     "Unknown field 'response_format.json_schema.schemas'; response_format.json_schema.schema was probably meant."),
    (ChatBody, content({"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}), "messages.0.content.1.type",
     "messages.0.content.1: Sounds are not understood by this server, which reads texts only."),
    (ChatBody, content({"type": "dance"}), "messages.0.content.0.type", "messages.0.content.0.type must be 'text', not 'dance'."),
    (ChatBody, content({"type": {}, "text": ""}), "messages.0.content.0.type", "messages.0.content.0.type must be 'text', not an object."),
    (GenerateBody, content({"type": "image_url"}), "messages.0.content", "messages.0.content must be a text, not a list.")])
def test_a_fault_names_the_whole_path_and_what_must_stand_there(model, body, field, message):
    found = said(model, body)
    assert (found.field, found.message) == (field, message) and found.remedy


def test_every_fault_is_said_in_our_words():
    """Each field with a value of every kind: pydantic's own words begin or end like these."""
    for model in BODIES:
        for name in (field.alias or name for name, field in model.model_fields.items()):
            for value in (None, True, 5, 1.5, "x", [], [1], ["x"], [{}], {}, {"x": []}, 10**40):
                try:
                    model.model_validate({name: value}, from_attributes=True)
                except ValidationError as caught:
                    for fault in caught.errors():
                        message = told([{**fault, "loc": ("body", *fault["loc"])}], model).message
                        assert not re.search("Input should|nable to|valid ", message), (model, name, value, message)


def test_a_body_that_is_no_object_names_no_field():
    found = said(ChatBody, [1])
    assert found.field == "" and "JSON object" in found.message


@pytest.mark.parametrize("name,ours", [
    ("max_new_tokens", "max_tokens"), ("n_predict", "max_tokens"), ("num_predict", "max_tokens"), ("max_token", "max_tokens"),
    ("maxTokens", "max_tokens"), ("repeat_penalty", "repetition_penalty"), ("repetitionPenalty", "repetition_penalty"),
    ("presense_penalty", "presence_penalty"), ("temp", "temperature"), ("temprature", "temperature"), ("top-k", "top_k"), ("topk", "top_k"),
    ("stop_token_ids", "stop_ids"), ("stopping_strings", "stop"), ("draft_model", "draft"), ("timeout", "time_limit"),
    ("n_probs", "logprobs"), ("typical_p", None), ("top_a", None), ("mirostat", None), ("num_beams", None), ("x", None), ("x" * 10**6, None)])
def test_which_field_was_meant(name, ours):
    assert meant(name, set(GenerateBody.model_fields)) == ours


def test_every_name_that_is_suggested_is_a_field_of_some_body():
    known = {name for model in BODIES for name in model.model_fields} | {"length"}
    assert not ELSEWHERE.keys() - known
    assert all(re.fullmatch("[a-z_]+", theirs) and theirs != ours for ours, names in ELSEWHERE.items() for theirs in names)
