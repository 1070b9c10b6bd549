"""Events to OpenAI's answers, whole and in pieces. Knows shapes only; where events come from and where bytes go, routes know.

Beyond OpenAI's fields an answer has ``timings`` (llama.cpp's names, draft counts among them), ``seed`` and, in a choice,
``stop_reason``: the stop string or token id that ended it, or "time_limit" or "cancelled", for which OpenAI has no word: their
finish_reason is "length".
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.base import Event, TokenLogprob, Usage
from gainz_ui import __version__
from gainz_ui.api.openai_request import Ask
from gainz_ui.api.openai_tools import Held

FINISH = {"stop": "stop", "length": "length", "time_limit": "length", "cancelled": "length", "error": "length"}
LOWEST = -9999.0            # JSON has no minus infinity


@dataclass
class Choice:
    """What one choice has said so far."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt: list[TokenLogprob | None] = field(default_factory=list)
    finish: str | None = None
    reason: str | int | None = None

    def add(self, event: Event) -> None:
        self.text.append(event.text)
        self.logprobs += event.logprobs
        self.prompt += event.prompt_logprobs or ()
        if event.finish is not None:
            self.finish = FINISH[event.finish]
            self.reason = event.matched if event.finish == "stop" else event.finish if event.finish != "length" else None


class Head:
    """What all pieces of an answer begin with."""

    def __init__(self, kind: str, model: str) -> None:
        self.chat = kind == "chat"
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex
        self.created, self.model = int(time.time()), model

    def fields(self, piece: bool) -> dict[str, Any]:
        name = ("chat.completion.chunk" if piece else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model,
                "system_fingerprint": f"gainz-{__version__}"}


# ---------------------------------------------------------------------------------------------- counts
def usage(ends: Sequence[Event]) -> dict[str, Any] | None:
    """None: another server answered, and did not say."""
    if any(event.usage is None and event.error is None for event in ends):
        return None
    counts = [event.usage or Usage() for event in ends]
    prompt, made = sum(one.prompt_tokens for one in counts), sum(one.completion_tokens for one in counts)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": _sum(one.cached_tokens for one in counts)}}


def timings(ends: Sequence[Event]) -> dict[str, Any]:
    """llama.cpp's names; milliseconds, and tokens a second. Of several prompts the slowest one's clock."""
    counts, clocks = [event.usage or Usage() for event in ends], [event.timing for event in ends]
    prompt = sum(one.prompt_tokens - (one.cached_tokens or 0) for one in counts)
    made = sum(one.completion_tokens for one in counts)
    return {"cache_n": _sum(one.cached_tokens for one in counts), "prompt_n": prompt,
            **_rate("prompt", prompt, max((clock.prefill_seconds or 0 for clock in clocks), default=0)), "predicted_n": made,
            **_rate("predicted", made, max((clock.decode_seconds or 0 for clock in clocks), default=0)),
            "draft_n": sum(one.drafted for one in counts), "draft_n_accepted": sum(one.accepted for one in counts)}


def _sum(values: Iterable[int | None]) -> int | None:
    """None where one of them is not known."""
    known = list(values)
    return None if None in known else sum(known)


def _rate(name: str, tokens: int, seconds: float) -> dict[str, float | None]:
    timed = tokens and seconds
    return {f"{name}_ms": round(seconds * 1000, 3), f"{name}_per_token_ms": round(seconds * 1000 / tokens, 3) if timed else None,
            f"{name}_per_second": round(tokens / seconds, 3) if timed else None}


# ---------------------------------------------------------------------------------------------- log-probabilities
def chat_logprobs(items: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": [{**_token(item.text, item.logprob, item.raw), "top_logprobs": [
        _token(text, value, raw) for (_, text, value), raw in zip(item.top, item.top_raw or (None,) * len(item.top))]}
        for item in items], "refusal": None}


def _token(text: str, value: float, raw: bytes | None) -> dict[str, Any]:
    return {"token": text, "logprob": max(value, LOWEST), "bytes": None if raw is None else list(raw)}


def text_logprobs(items: Sequence[TokenLogprob | None], start: int, first: str = "") -> dict[str, Any]:
    """The older shape. None: a prompt's first token, before which nothing stood, with the text ``first``. ``start``: where the
    text begins."""
    out: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for item in items:
        out["tokens"].append(item.text if item else first)
        out["token_logprobs"].append(max(item.logprob, LOWEST) if item else None)
        out["top_logprobs"].append({text: max(value, LOWEST) for _, text, value in item.top} if item else None)
        out["text_offset"].append(start)
        start += len(item.text if item else first)
    return out


def _first(before: str, prompt: Sequence[TokenLogprob | None]) -> str:
    """Text of the prompt's first token: what the others leave of it."""
    return before[:max(0, len(before) - sum(len(item.text) for item in prompt if item))]


# ---------------------------------------------------------------------------------------------- whole
def whole(ask: Ask, head: Head, events: Sequence[Event], echoed: Sequence[str] = ()) -> dict[str, Any]:
    choices = [Choice() for _ in range(len(ask.requests) * ask.n)]
    for event in events:
        if event.index >= 0:
            choices[event.index].add(event)
    for i, one in enumerate(choices):
        one.prompt = choices[i // ask.n * ask.n].prompt         # scored once, by the first choice of each prompt
    made = [_chat_choice(ask, i, one) if head.chat else _text_choice(ask, i, one, echoed[i // ask.n] if echoed else "")
            for i, one in enumerate(choices)]
    ends = [event for event in events if event.last]
    return {**head.fields(False), "choices": made, "usage": usage(ends), "timings": timings(ends), "seed": _seed(ends)}


def _seed(ends: Sequence[Event]) -> int | None:
    return ends[0].seed if len(ends) == 1 else None


def _chat_choice(ask: Ask, index: int, choice: Choice) -> dict[str, Any]:
    text, calls = "".join(choice.text), []
    if ask.tools.names:
        held = Held(ask.tools)
        said = held.push(text)
        rest, calls = held.close()
        text = said + rest if not calls else (said + rest).strip()
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
    if calls:
        message["tool_calls"] = [call.wire() for call in calls]
    return {"index": index, "message": message, "logprobs": chat_logprobs(choice.logprobs) if ask.logprobs else None,
            "finish_reason": _finish(choice, bool(calls)), "stop_reason": choice.reason}


def _finish(choice: Choice, calls: bool) -> str | None:
    return "tool_calls" if calls and choice.finish == "stop" else choice.finish


def _text_choice(ask: Ask, index: int, choice: Choice, before: str) -> dict[str, Any]:
    prompt = choice.prompt if ask.echo else ()
    logprobs = text_logprobs([*prompt, *choice.logprobs], 0, _first(before, prompt)) if ask.logprobs else None
    return {"index": index, "text": before + "".join(choice.text), "logprobs": logprobs, "finish_reason": choice.finish,
            "stop_reason": choice.reason}


# ---------------------------------------------------------------------------------------------- in pieces
class Stream:
    """Events in, chunks out. The last choice's end is kept until the counts are there, which go with it (or after it, alone in a
    chunk without choices, where usage was asked for)."""

    def __init__(self, ask: Ask, head: Head, echoed: Sequence[str] = ()) -> None:
        self._ask, self._head, self._echoed = ask, head, echoed
        self._choices = [Choice() for _ in range(len(ask.requests) * ask.n)]
        self._held = [Held(ask.tools) for _ in self._choices] if ask.tools.names else None
        self._begun: set[int] = set()
        self._offset = [0] * len(self._choices)
        self._ends: list[Event] = []
        self._last: dict[str, Any] | None = None            # a choice's end, not yet sent

    def push(self, event: Event) -> Iterator[dict[str, Any]]:
        if event.last:
            self._ends.append(event)
        if event.index < 0 or event.progress is not None:
            return
        choice, first = self._choices[event.index], event.index not in self._begun
        choice.add(event)
        if first:
            self._begun.add(event.index)
            yield from self._opening(event.index)
        piece = self._piece(event, choice)
        if piece is not None:
            yield piece
        if event.finish is not None:
            yield from self._end(event.index, choice)

    def close(self) -> Iterator[dict[str, Any]]:
        counts = {"timings": timings(self._ends), "seed": _seed(self._ends)}
        if self._last is not None:
            yield self._last | ({} if self._ask.usage else counts)
        if self._ask.usage:
            yield {**self._head.fields(True), "choices": [], "usage": usage(self._ends), **counts}

    def _opening(self, index: int) -> Iterator[dict[str, Any]]:
        if self._head.chat:
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
        elif self._echoed:
            scored = self._choices[index // self._ask.n * self._ask.n].prompt       # by the first choice, which goes first
            text = self._echoed[index // self._ask.n]
            items = text_logprobs(scored, 0, _first(text, scored)) if self._ask.logprobs else None
            self._offset[index] = len(text)
            yield self._chunk(index, {"text": text, "logprobs": items})

    def _piece(self, event: Event, choice: Choice) -> dict[str, Any] | None:
        text = self._held[event.index].push(event.text) if self._held else event.text
        if not text and not (self._ask.logprobs and event.logprobs):
            return None
        if self._head.chat:
            logprobs = chat_logprobs(event.logprobs) if self._ask.logprobs else None
            return self._chunk(event.index, {"delta": {"content": text}, "logprobs": logprobs})
        logprobs = text_logprobs(event.logprobs, self._offset[event.index]) if self._ask.logprobs else None
        self._offset[event.index] += sum(len(item.text) for item in event.logprobs)
        return self._chunk(event.index, {"text": text, "logprobs": logprobs})

    def _end(self, index: int, choice: Choice) -> Iterator[dict[str, Any]]:
        rest, calls = self._held[index].close() if self._held else ("", [])
        if rest:
            yield self._chunk(index, {"delta": {"content": rest}})
        for place, call in enumerate(calls):
            yield self._chunk(index, {"delta": {"tool_calls": [{"index": place, **call.wire()}]}})
        if self._last is not None:
            yield self._last
        said = {"delta": {}} if self._head.chat else {"text": ""}
        self._last = self._chunk(index, {**said, "finish_reason": _finish(choice, bool(calls)), "stop_reason": choice.reason})

    def _chunk(self, index: int, inside: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._ask.usage else {}
        return {**self._head.fields(True), "choices": [{"index": index, "logprobs": None, "finish_reason": None, **inside}], **usage}
