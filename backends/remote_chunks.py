"""A server's chunks in our words, and what they show was not kept of what a request asked. Pure: no socket, no clock.

Refuses to guess: an error in the middle, a choice that nobody asked for and an end that is not known are errors. Looked at afterwards:
a stop string that shows, more or fewer tokens than promised, fewer choices, no log-probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.base import FinishReason, NotSupported, RemoteFailed, Request, TokenLogprob
from backends.remote_http import words

FINISH: Mapping[str, FinishReason] = {
    "stop": "stop", "length": "length", "tool_calls": "stop", "function_call": "stop", "eos": "stop", "eos_token": "stop",
    "stop_sequence": "stop", "end_turn": "stop", "max_tokens": "length", "time_limit": "time_limit"}
UNKNOWN_ID = -1                         # of a token whose id the server does not say
THINK, THOUGHT = "<think>\n", "\n</think>\n\n"


@dataclass(frozen=True)
class Piece:
    """What one chunk added to one choice."""

    index: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    matched: str | int | None = None


@dataclass
class _Choice:
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    thinking: bool = False
    half: str = ""                      # the first half of a character that came as two escapes in two chunks
    text: list[str] = field(default_factory=list)
    finish: FinishReason | None = None
    logprobs: int = 0


class Chunks:
    """One answer's chunks. ``usage``, ``timings``: the server's own, as it sent them last; None = not told."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.choices: dict[int, _Choice] = {}
        self.usage: Mapping[str, Any] | None = None
        self.timings: Mapping[str, Any] | None = None
        self.error = ""

    def take(self, data: Any) -> list[Piece]:
        """RemoteFailed where it is an error or no chunk."""
        if not isinstance(data, Mapping):
            raise RemoteFailed("The server sent what is no chunk of an answer.", kind=type(data).__name__)
        if data.get("error") or data.get("object") == "error":
            self.error = words(data) or json.dumps(data)[:200]
            raise RemoteFailed(f"The other server failed in the middle: {self.error}")
        self.usage = _mapping(data.get("usage")) or self.usage
        self.timings = _mapping(data.get("timings")) or self.timings
        choices = data.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(one, Mapping) for one in choices):
            raise RemoteFailed("The server sent choices that are none.")
        return [piece for one in choices if (piece := self._choice(one)) is not None]

    def _choice(self, said: Mapping[str, Any]) -> Piece | None:
        index = said.get("index", 0)
        if type(index) is not int or not 0 <= index < self.request.sampling.n:
            raise RemoteFailed("The server answers a choice that nobody asked for.", index=index)
        choice = self.choices.setdefault(index, _Choice())
        if choice.finish is not None:       # some send one more, empty, to carry their counts
            return None
        delta = said.get("delta") or said.get("message") or said
        text = self._text(choice, delta)
        reason = said.get("finish_reason")
        finish = self._finish(reason) if reason else None
        text += _owed(choice) if finish else ""
        logprobs = _logprobs(said.get("logprobs"))
        choice.logprobs += len(logprobs)
        choice.text.append(text)
        choice.finish = finish
        matched = said.get("stop_reason")
        return Piece(index, text, logprobs, finish, matched if isinstance(matched, str | int) and finish == "stop" else None)

    @staticmethod
    def _finish(reason: Any) -> FinishReason:
        if reason == "content_filter":
            raise RemoteFailed("The other server's filter ended the answer.")
        if reason not in FINISH:
            raise RemoteFailed("The server ended the answer with a word that is not known.", finish_reason=reason)
        return FINISH[reason]

    def _text(self, choice: _Choice, delta: Any) -> str:
        """What the model wrote, its thinking in the tags that it wrote it in, calls kept until they are whole."""
        if not isinstance(delta, Mapping):
            return ""
        content = delta.get("content") or delta.get("text") or delta.get("refusal") or ""
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            _gather(choice.calls, call)
        text = ""
        if isinstance(thought, str) and thought:
            text += ("" if choice.thinking else THINK) + thought
            choice.thinking = True
        if isinstance(content, str) and content:
            text += (THOUGHT if choice.thinking else "") + content
            choice.thinking = False
        return _whole(choice, text)

    def close(self) -> list[Piece]:
        """At the server's last word: choices that it did not end by name have ended all the same."""
        out = []
        for index in range(self.request.sampling.n):
            choice = self.choices.get(index)
            if choice is not None and choice.finish is None and choice.text:
                text, choice.finish = _owed(choice), "stop"
                choice.text.append(text)
                out.append(Piece(index, text, finish="stop"))
        return out

    def broken(self) -> NotSupported | None:
        """What the request asked for and the whole answer shows was not kept."""
        asked, made = self.request.sampling, whole_number(self.usage, "completion_tokens")
        if len(self.choices) < asked.n:
            return _not_kept("n", f"{len(self.choices)} of {asked.n} answers came")
        if (stop := next((one for one in asked.stop for choice in self.choices.values() if one in "".join(choice.text)), None)) is not None:
            return _not_kept("stop", f"{stop!r} stands in the answer")
        if asked.logprobs is not None and not any(choice.logprobs for choice in self.choices.values()) and made:
            return _not_kept("logprobs", "none came")
        if made is None:
            return None
        if asked.max_tokens is not None and made > asked.n * asked.max_tokens:
            return _not_kept("max_tokens", f"{made} tokens came")
        least = asked.max_tokens if asked.ignore_eos and not asked.stop and not asked.stop_ids else asked.min_tokens
        if least and made < asked.n * least and all(choice.finish == "stop" for choice in self.choices.values()):
            return _not_kept("ignore_eos" if asked.ignore_eos else "min_tokens", f"the answer ended after {made} tokens")
        return None


def _not_kept(name: str, what: str) -> NotSupported:
    return NotSupported(f"The other server did not honour {name}: {what}.", field=name, remedy="Leave it out, or use a local model.")


def _owed(choice: _Choice) -> str:
    """What is still owed when a choice ends: the end of its thinking, its calls (as Hermes and Qwen write them), half a character."""
    out = "\ufffd" if choice.half else ""
    out += THOUGHT.rstrip() if choice.thinking else ""
    for _, call in sorted(choice.calls.items()):
        try:
            arguments = json.loads(call["arguments"] or "{}")
        except ValueError:
            arguments = call["arguments"]
        out += "<tool_call>\n" + json.dumps({"name": call["name"], "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"
    choice.half, choice.thinking, choice.calls = "", False, {}
    return out


def _gather(calls: dict[int, dict[str, str]], piece: Any) -> None:
    if not isinstance(piece, Mapping):
        return
    index = piece.get("index")
    call = calls.setdefault(index if isinstance(index, int) else len(calls), {"name": "", "arguments": ""})
    function = _mapping(piece.get("function")) or {}
    call["name"] += function.get("name") or ""
    arguments = function.get("arguments") or ""
    call["arguments"] += arguments if isinstance(arguments, str) else json.dumps(arguments)


def _whole(choice: _Choice, text: str) -> str:
    """Surrogates that came apart are put together again; one without its other half is U+FFFD."""
    if not choice.half and text.isascii():
        return text
    text, choice.half = choice.half + text, ""
    if text and "\ud800" <= text[-1] <= "\udbff":
        text, choice.half = text[:-1], text[-1]
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _logprobs(said: Any) -> tuple[TokenLogprob, ...]:
    """Both shapes that OpenAI has had for them. Ids are `UNKNOWN_ID`: no server says them."""
    said = _mapping(said) or {}
    content, tokens = said.get("content"), said.get("tokens")
    if isinstance(content, list):
        return tuple(_token(one) for one in content if isinstance(one, Mapping))
    if not isinstance(tokens, list):
        return ()
    values, tops = said.get("token_logprobs") or [], said.get("top_logprobs") or [None] * len(tokens)
    return tuple(TokenLogprob(UNKNOWN_ID, str(text), float(value or 0.0), _top(top)) for text, value, top in zip(tokens, values, tops)
                 if value is not None)


def _token(said: Mapping[str, Any]) -> TokenLogprob:
    best = [one for one in said.get("top_logprobs") or () if isinstance(one, Mapping)]
    return TokenLogprob(UNKNOWN_ID, str(said.get("token", "")), float(said.get("logprob") or 0.0),
                        tuple((UNKNOWN_ID, str(one.get("token", "")), float(one.get("logprob") or 0.0)) for one in best),
                        _raw(said), tuple(_raw(one) or str(one.get("token", "")).encode() for one in best))


def _top(said: Any) -> tuple[tuple[int, str, float], ...]:
    found = [(UNKNOWN_ID, str(text), float(value)) for text, value in (_mapping(said) or {}).items() if isinstance(value, int | float)]
    return tuple(sorted(found, key=lambda one: -one[2]))


def _raw(said: Mapping[str, Any]) -> bytes | None:
    found = said.get("bytes")
    return bytes(found) if isinstance(found, list) and all(type(one) is int and 0 <= one < 256 for one in found) else None


def _mapping(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None


def whole_number(values: Mapping[str, Any] | None, *path: str) -> int | None:
    """The whole number at a place in nested objects, None where there is none."""
    value: Any = values
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
