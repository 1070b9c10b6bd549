"""OpenAI's bodies to requests of ours. Knows both vocabularies; refuses by name what cannot be honoured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from backends.base import MAX_CHOICES, MAX_LOGPROBS, DraftSpec, InvalidRequest, Message, Request, Sampling
from backends.characters import check_characters
from gainz_ui.api import openai_tools as tools
from gainz_ui.api.openai_schema import ChatBody, ChatMessage, CompletionBody, SamplingBody
from gainz_ui.api_values import biases

TEMPLATES_OWN = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}


@dataclass(frozen=True)
class Ask:
    """``requests``: one for each prompt; choice i of prompt k has the index k · n + i."""

    requests: tuple[Request, ...]
    model: str | None
    n: int
    stream: bool
    usage: bool                         # a stream ends with a chunk of it
    logprobs: bool
    tools: tools.Plan = tools.Plan()
    echo: bool = False


def chat(body: ChatBody) -> Ask:
    plan = tools.plan(body)
    _check_format(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs is given without logprobs.", field="top_logprobs", remedy="Set logprobs to true.")
    sampling = _sampling(body, _most(body), (body.top_logprobs or 0) if body.logprobs else None, "top_logprobs")
    template = dict(body.chat_template_kwargs or {})
    for name in template.keys() & TEMPLATES_OWN:
        raise InvalidRequest(f"chat_template_kwargs cannot set {name}.", field="chat_template_kwargs")
    if plan.shown:
        template["tools"] = list(plan.shown)
    messages = tuple(message(item) for item in body.messages)
    request = Request(messages, sampling, _draft(body), time_limit=body.time_limit, template=tuple(template.items()),
                      schema=plan.schema or _schema(body))
    return Ask((request,), body.model, sampling.n, *_streaming(body), sampling.logprobs is not None, plan)


def completion(body: CompletionBody) -> Ask:
    n = 1 if body.n is None else body.n
    if body.best_of not in (None, n):
        raise InvalidRequest("best_of other than n is not done here.", field="best_of", remedy="Leave it out.")
    sampling = _sampling(body, 16 if body.max_tokens is None else body.max_tokens, body.logprobs, "logprobs")
    if body.echo and sampling.logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=sampling.logprobs)
    prompts = prompts_of("prompt", body.prompt)
    if len(prompts) * sampling.n > MAX_CHOICES:
        raise InvalidRequest(f"prompt × n is at most {MAX_CHOICES} answers at once.", field="prompt", prompts=len(prompts), n=sampling.n)
    requests = tuple(Request(prompt, sampling, _draft(body), time_limit=body.time_limit) for prompt in prompts)
    return Ask(requests, body.model, sampling.n, *_streaming(body), sampling.logprobs is not None, echo=bool(body.echo))


def prompts_of(field: str, given: str | Sequence) -> list[str | tuple[int, ...]]:
    """A text, token ids, or a list of either."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest(f"{field} is empty.", field=field)
    if isinstance(given[0], int):
        return [tuple(given)]
    return [one if isinstance(one, str) else tuple(one) for one in given]


# ---------------------------------------------------------------------------------------------- messages
def message(given: ChatMessage) -> Message:
    extra: dict[str, Any] = {}
    if given.tool_calls:
        extra["tool_calls"] = [_tool_call(call.model_dump(exclude_none=True, exclude={"index"})) for call in given.tool_calls]
    for name in ("tool_call_id", "reasoning_content"):
        if getattr(given, name) is not None:
            extra[name] = getattr(given, name)
    if given.content in (None, []) and not given.tool_calls:
        raise InvalidRequest("A message needs content.", field="messages", remedy='{"role": "user", "content": "Hello"}')
    content = given.content if isinstance(given.content, str) else "".join(part.text for part in given.content or ())
    return Message(given.role, content, given.name, tuple(extra.items()))


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates take the arguments as an object."""
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("The arguments of a tool call are no JSON.", field="messages") from error
    check_characters("arguments", arguments)
    return {**call, "function": {**call["function"], "arguments": arguments}}


# ---------------------------------------------------------------------------------------------- fields
SAME = ("presence_penalty", "frequency_penalty", "seed", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos")


def _sampling(body: SamplingBody, most: int | None, logprobs: int | None, name: str) -> Sampling:
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} must be from 0 to {MAX_LOGPROBS}.", field=name)
    values = {field: getattr(body, field) for field in SAME if getattr(body, field) is not None}
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return Sampling(temperature=1.0 if body.temperature is None else body.temperature, top_p=1.0 if body.top_p is None else body.top_p,
                    n=1 if body.n is None else body.n, max_tokens=most, stop=stop, stop_ids=tuple(body.stop_ids or ()),
                    logit_bias=biases(body.logit_bias), logprobs=logprobs, **values)


def _most(body: ChatBody) -> int | None:
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens contradict each other.", field="max_completion_tokens",
                             remedy="Give one of them.")
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _draft(body: SamplingBody) -> DraftSpec | None:
    if body.draft is None:
        return None
    return DraftSpec(body.draft) if isinstance(body.draft, str) else body.draft.spec()


def _streaming(body: SamplingBody) -> tuple[bool, bool]:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is given without stream.", field="stream_options", remedy="Set stream to true.")
    return bool(body.stream), bool(body.stream_options and body.stream_options.include_usage)


def _check_format(body: ChatBody) -> None:
    form = body.response_format
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        raise InvalidRequest("json_schema belongs to response_format of the type json_schema, and only to it.", field="response_format")


def _schema(body: ChatBody) -> str | None:
    form = body.response_format
    if form is None or form.type == "text":
        return None
    return json.dumps(form.json_schema.body if form.json_schema else {"type": "object"})
