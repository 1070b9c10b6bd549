"""/generate, /health and /metrics: wire schema ↔ Request and Event, nothing else.

/generate takes one JSON object; a field that is not known or has a wrong type is refused by name. With ``stream`` the answer
is server-sent events: one JSON object after each ``data:``, pieces of ``text`` first, the last with ``done`` and the counts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any, Literal

from fastapi import APIRouter, Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict

from backends.base import ROLES, TEXT_TOKENS, DraftSpec, Event, InvalidRequest, Message, Request, Sampling, TokenLogprob
from gainz_ui import __version__
from gainz_ui.api import described, limits, metrics
from gainz_ui.api.bridge import Answer, watch_disconnect
from gainz_ui.api.errors import error_body
from gainz_ui.api.route import Route, only
from gainz_ui.api_values import biases
from gainz_ui.services.gpu import GpuWatch
from gainz_ui.services.startup import Startup
from gainz_ui.services.studio import Studio


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class MessageBody(Strict):
    role: Literal[ROLES]
    content: str
    name: str | None = None


class DraftBody(Strict):
    name: str
    length: int | Literal["auto"] | None = None     # "auto" as none: chosen by measurement

    def spec(self) -> DraftSpec:
        return DraftSpec(self.name, None if self.length == "auto" else self.length)


class GenerateBody(Strict):
    """Everything of Sampling but ``n``; ranges are checked there, once for page, API and command line."""

    prompt: str | list[int] | None = None
    messages: list[MessageBody] | None = None
    model: str | None = None
    draft: str | DraftBody | None = None
    stream: bool = False
    time_limit: float | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


GAP_SECONDS = 0.01          # between two chunks of a stream: slower models send token by token, faster ones a few at once
_PLAIN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed",
          "max_tokens", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs")


def to_request(body: GenerateBody) -> Request:
    """InvalidRequest names the field."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", field="prompt")
    if body.messages is not None:
        if not body.messages:
            raise InvalidRequest("messages is empty.", field="messages", remedy="Give at least one message, or a prompt.")
        prompt: Any = tuple(Message(item.role, item.content, item.name) for item in body.messages)
    else:
        prompt = body.prompt if isinstance(body.prompt, str) else tuple(body.prompt or ())
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    sampling = Sampling(**{name: getattr(body, name) for name in _PLAIN}, stop=stop, stop_ids=tuple(body.stop_ids or ()),
                        logit_bias=biases(body.logit_bias))
    draft = DraftSpec(body.draft) if isinstance(body.draft, str) else body.draft.spec() if body.draft else None
    return Request(prompt, sampling, draft, time_limit=body.time_limit)


def _within(request: Request, body: GenerateBody) -> Request:
    """A text that nobody bounded goes on for `TEXT_TOKENS`, as the same name does for Gradio's client: it has no end of its own, as an
    answer in a chat has. ``null`` means to the end of the context."""
    if body.messages is not None or "max_tokens" in body.model_fields_set:
        return request
    allowed = request.sampling.max_tokens                   # by the key
    most = TEXT_TOKENS if allowed is None else min(allowed, TEXT_TOKENS)
    return replace(request, sampling=replace(request.sampling, max_tokens=most))


# ---------------------------------------------------------------------------------------------- answers
def _logprob(item: TokenLogprob | None) -> dict[str, Any] | None:
    if item is None:
        return None
    raw = item.top_raw or (None,) * len(item.top)
    return {"id": item.id, "text": item.text, "bytes": _bytes(item.raw), "logprob": item.logprob,
            "top": [{"id": i, "text": text, "bytes": _bytes(own), "logprob": value} for (i, text, value), own in zip(item.top, raw)]}


def _bytes(raw: bytes | None) -> list[int] | None:
    return None if raw is None else list(raw)


class Tally:
    """What the events of one answer add up to."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.logprobs: list[dict[str, Any] | None] = []
        self.extra: dict[str, Any] = {}
        self.finish: str | None = None
        self.last: Event | None = None

    def add(self, event: Event) -> None:
        self.text.append(event.text)
        self.logprobs += [_logprob(item) for item in event.logprobs]
        if event.prompt_logprobs is not None:
            self.extra["prompt_logprobs"] = [_logprob(item) for item in event.prompt_logprobs]
        if event.finish is not None:
            self.finish = event.finish
            if event.matched is not None:
                self.extra["matched"] = event.matched
        if event.last:
            self.last = event

    def counts(self) -> dict[str, Any]:
        """finish_reason, tokens and timing; null where the answer ended without them."""
        usage, timing = (self.last.usage, self.last.timing) if self.last else (None, None)
        counted = asdict(usage) if usage else {"prompt_tokens": None, "completion_tokens": None}
        if usage and usage.speculation is None:             # nobody asked for a draft
            del counted["speculation"]
        return {"finish_reason": self.finish, **counted, "timing": asdict(timing) if timing else None, **self.extra}


def line(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _piece(event: Event) -> dict[str, Any]:
    piece: dict[str, Any] = {"text": event.text, "ids": event.ids}
    if event.logprobs:
        piece["logprobs"] = [_logprob(item) for item in event.logprobs]
    return piece


async def _stream(answer: Answer, first: list[Event], head: dict[str, Any]) -> AsyncIterator[bytes]:
    """One chunk for what is at hand. Leaving it, in whatever way, cancels the answer."""
    tally, events = Tally(), first
    try:
        while events:
            out, sent = [], asyncio.get_running_loop().time()
            for event in events:
                tally.add(event)
                if event.text or event.ids:
                    out.append(line(_piece(event)))
            if out:
                yield b"".join(out)
                await asyncio.sleep(sent + GAP_SECONDS - asyncio.get_running_loop().time())
            events = await answer.batch()
        end = {"text": "", "done": True, **head, **tally.counts()}
        if tally.last is not None and tally.last.error is not None:
            end |= error_body(tally.last.error)
        yield line(end)
    finally:
        answer.close()


async def _whole(answer: Answer, first: list[Event], head: dict[str, Any]) -> JSONResponse:
    tally = Tally()
    for event in (*first, *await answer.rest()):
        tally.add(event)
    if tally.last is not None and tally.last.error is not None:
        raise tally.last.error
    out = {"text": "".join(tally.text), **head, **tally.counts()}
    if tally.logprobs:
        out["logprobs"] = tally.logprobs
    return JSONResponse(out)


# ---------------------------------------------------------------------------------------------- routes
def router(studio: Studio, startup: Startup) -> APIRouter:
    """The three routes over one studio."""
    routes, gpus = APIRouter(route_class=Route), GpuWatch()

    @routes.post("/generate", responses=described.GENERATE)
    async def generate(body: GenerateBody, http: HttpRequest):
        (request,) = limits.bounded(http.scope, (to_request(body),))
        request = _within(request, body)
        head = {"model": studio.model(body.model).info.name}
        answer = Answer(lambda cancel: studio.submit(request, body.model, cancel))
        watcher, handed_over = asyncio.create_task(watch_disconnect(http.receive, answer.cancel)), False
        try:
            first = await answer.first()
            if not body.stream:
                return await _whole(answer, first, head)
            handed_over = True
        finally:
            watcher.cancel()
            if not handed_over:
                answer.close()
        return StreamingResponse(_stream(answer, first, head), media_type="text/event-stream",
                                 headers={"cache-control": "no-store", "x-accel-buffering": "no"})

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", responses=described.HEALTH)
    async def health():
        data = await asyncio.to_thread(describe_health, studio, startup)
        return JSONResponse(data, 200 if data["ready"] else 503, {"cache-control": "no-store"})

    @routes.head("/metrics", include_in_schema=False)
    @routes.get("/metrics", responses=described.METRICS)
    async def read_metrics():
        text, kind = await asyncio.to_thread(lambda: metrics.render(studio, gpus.use()))
        return PlainTextResponse(text, media_type=kind)

    only(routes, "/generate", "POST")
    only(routes, "/health", "GET", "HEAD")
    only(routes, "/metrics", "GET", "HEAD")
    return routes


def describe_health(studio: Studio, startup: Startup) -> dict[str, Any]:
    """Ready, or why not. A start that failed leaves it not ready until some model is loaded."""
    now, task, failed = studio.snapshot(), startup.task, startup.error
    data: dict[str, Any] = {"ready": now.healthy and failed is None, "status": now.status, "reason": now.reason,
                            "models": [info.name for info in now.models], "version": __version__,
                            "running": now.running, "waiting": now.waiting, "uptime_seconds": round(now.uptime, 1)}
    if task is not None and task.running:
        data["progress"] = asdict(task.progress)
        if now.healthy and not now.models:      # between two steps of the start
            data |= {"ready": False, "status": "starting", "reason": "starting"}
    if failed is not None:
        data |= {"status": "failed", "reason": str(failed), **error_body(failed)}
    return data
