"""A `Request` in OpenAI's words. Pure: no socket, no clock.

What is sent is what the request says: a field that the server's family is known to ignore is refused by name, everything else is sent,
and a server that does not take it says so. What the answer then shows was not kept, `remote_chunks` tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from backends.base import InvalidRequest, Message, NotSupported, Request, Sampling
from backends.remote_dialects import Dialect

NEUTRAL = Sampling()


def body(request: Request, model: str, dialect: Dialect, counts: bool = True) -> tuple[str, dict[str, Any]]:
    """(route, JSON). NotSupported names the field that cannot be asked of this server."""
    chat = not isinstance(request.prompt, str) and bool(request.prompt) and isinstance(request.prompt[0], Message)
    out: dict[str, Any] = {"model": model, "stream": True, **({"stream_options": {"include_usage": True}} if counts else {})}
    if chat:
        out["messages"] = [message(turn) for turn in request.prompt]
    else:
        out["prompt"] = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    out |= _sampling(request.sampling, dialect, chat)
    out |= _template(request, dialect, chat)
    if request.schema is not None:
        out["response_format"] = _format(json.loads(request.schema), dialect)
    if request.prompt_limit is not None:
        _bounded(request.prompt_limit, out)
    return ("/chat/completions" if chat else "/completions"), out


def _bounded(most: int, out: Mapping[str, Any]) -> None:
    """InvalidRequest unless the prompt surely has no more tokens than that: only the other server counts them, but none is less than a
    byte, one may begin a text, and JSON around a message is longer than what a template puts there."""
    prompt = out.get("prompt")
    text = prompt if isinstance(prompt, str) else json.dumps([out.get("messages"), out.get("tools", [])], ensure_ascii=False)
    ids = isinstance(prompt, list)
    size = len(prompt) if ids else len(text.encode("utf-8", "surrogatepass")) + 1
    if size > most:
        how = f"; this one has {size}." if ids else f". Another server counts them, so here each of its {size} bytes counts as one."
        raise InvalidRequest(f"The prompt may have {most} tokens{how}", field="prompt",
                             remedy="Send less, use a key with a higher limit, or ask a local model.")


def message(turn: Message) -> dict[str, Any]:
    extra = dict(turn.extra)
    if "tool_calls" in extra:               # templates take arguments as objects, the wire takes them as text
        extra["tool_calls"] = [_call(call) for call in extra["tool_calls"]]
    return {"role": turn.role, "content": turn.content, **({"name": turn.name} if turn.name else {}), **extra}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": function}


def _sampling(asked: Sampling, dialect: Dialect, chat: bool) -> dict[str, Any]:
    if asked.prompt_logprobs is not None:
        raise _cannot("prompt_logprobs", "servers have no common way to ask for them")
    out: dict[str, Any] = {"temperature": asked.temperature, "top_p": asked.top_p}
    if asked.max_tokens is not None:
        out["max_tokens"] = asked.max_tokens
    elif not chat:
        out["max_tokens"] = None            # left out, it means 16 to most servers
    for name in ("frequency_penalty", "presence_penalty", "seed", "n"):
        if getattr(asked, name) != getattr(NEUTRAL, name):
            out[name] = getattr(asked, name)
    if asked.stop:
        out["stop"] = list(asked.stop)
    if asked.logit_bias:
        _refuse_ignored("logit_bias", dialect)
        out["logit_bias"] = {str(token): bias for token, bias in asked.logit_bias}
    if asked.logprobs is not None:
        out |= {"logprobs": True, "top_logprobs": asked.logprobs} if chat else {"logprobs": asked.logprobs}
    return out | _beyond(asked, dialect)


def _beyond(asked: Sampling, dialect: Dialect) -> dict[str, Any]:
    """Fields that are not OpenAI's, under the names that this server has for them."""
    out = {}
    for ours in ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_ids"):
        value = getattr(asked, ours)
        neutral = value == getattr(NEUTRAL, ours) or ours == "top_k" and value <= 0
        if not neutral:
            _refuse_ignored(ours, dialect)
        theirs, off = dialect.names.get(ours, (ours, None))
        if not neutral or dialect.explicit and ours in dialect.names:
            out[theirs] = off if neutral else list(value) if isinstance(value, tuple) else value
    return out


def _refuse_ignored(name: str, dialect: Dialect) -> None:
    if name in dialect.ignores:
        raise _cannot(name, f"{dialect.title} takes it without a word and does nothing with it")


def _cannot(name: str, why: str) -> NotSupported:
    return NotSupported(f"{name} cannot be asked of another server: {why}.", field=name, remedy="Leave it out, or use a local model.")


def _template(request: Request, dialect: Dialect, chat: bool) -> dict[str, Any]:
    """Tools and further variables of the chat template; going on with the last turn."""
    out, variables = {}, dict(request.template)
    if "tools" in variables:
        out["tools"] = variables.pop("tools")
    if variables:
        out["chat_template_kwargs"] = variables
    if request.continue_last and chat:
        if dialect.goes_on is None:
            raise NotSupported("This server is not known to go on with a turn: it would begin a new one.", field="continue_last",
                               remedy="Ask again from the question, or choose the server's kind when loading it.")
        out |= dialect.goes_on
    return out


def _format(schema: Any, dialect: Dialect) -> dict[str, Any]:
    if dialect.schema == "json_object":
        return {"type": "json_object", "schema": schema}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
