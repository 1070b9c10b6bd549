"""OpenAI's addresses over one studio: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models, and llama.cpp's
/tokenize and /detokenize. Knows how an answer is awaited, streamed and cancelled; shapes are openai_answer.py's, fields
openai_request.py's.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse

from backends.base import Event, InvalidRequest, ModelNotFound
from gainz_ui.api import limits, openai_answer as shapes
from gainz_ui.api import openai_request as asked
from gainz_ui.api import openai_schema as schema
from gainz_ui.api.described import FAILS, STREAM
from gainz_ui.api.bridge import Answer, aside, watch_disconnect
from gainz_ui.api.errors import body as error_shape, error_body
from gainz_ui.api.native import GAP_SECONDS, line
from gainz_ui.api.openai_request import Ask
from gainz_ui.api.route import METHODS, Route, only
from gainz_ui.services.keys import label
from gainz_ui.services.studio import Studio

MAX_INPUTS = 2048           # texts of one embedding request, as OpenAI has it
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize")
DONE = b"data: [DONE]\n\n"


def router(studio: Studio) -> APIRouter:
    routes = APIRouter(responses=FAILS, route_class=Route)

    @routes.post("/v1/chat/completions", responses=_streamed(schema.CompletionAnswer))
    async def chat_completions(body: schema.ChatBody, http: HttpRequest):
        return await _chat(studio, body, http)

    @routes.post("/v1/completions", responses=_streamed(schema.CompletionAnswer))
    async def completions(body: schema.CompletionBody, http: HttpRequest):
        return await _complete(studio, body, http)

    @routes.post("/v1/embeddings", responses={200: {"model": schema.EmbeddingAnswer}})
    async def embeddings(body: schema.EmbeddingBody, http: HttpRequest):
        return await _embed(studio, body, http)

    @routes.post("/tokenize", responses={200: {"model": schema.TokensAnswer}})
    async def tokenize(body: schema.TokenizeBody, http: HttpRequest):
        return await _tokenize(studio, body, http)

    @routes.post("/detokenize", responses={200: {"model": schema.TextAnswer}})
    async def detokenize(body: schema.DetokenizeBody, http: HttpRequest):
        return await _detokenize(studio, body, http)

    @routes.head("/v1/models", include_in_schema=False)
    @routes.get("/v1/models", responses={200: {"model": schema.ModelsAnswer}})
    async def models():
        return JSONResponse({"object": "list", "data": await asyncio.to_thread(list_models, studio)})

    @routes.head("/v1/models/{name}", include_in_schema=False)
    @routes.get("/v1/models/{name}", responses={200: {"model": schema.ModelAnswer}})
    async def model(name: str):
        found = await asyncio.to_thread(list_models, studio)
        for entry in found:
            if entry["id"] == name:
                return JSONResponse(entry)
        raise ModelNotFound(f"There is no model {name[:200]!r}.", field="model",
                            remedy=f"Models here: {', '.join(entry['id'] for entry in found) or 'none yet'}.")

    for path in POSTS:
        only(routes, path, "POST")
    only(routes, "/v1/models", "GET", "HEAD")
    only(routes, "/v1/models/{name}", "GET", "HEAD")

    @routes.api_route("/v1/{rest:path}", methods=METHODS, include_in_schema=False)
    async def unknown(rest: str):
        return JSONResponse(error_shape("not_found", f"There is no /v1/{rest[:200]} here.", f"There are {', '.join(POSTS)} and /v1/models.",
                                        status=404), 404)

    return routes


def _streamed(model: type) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": model, "content": STREAM, "description": "The answer; with stream as server-sent events, [DONE] last"}}


# ---------------------------------------------------------------------------------------------- models
def list_models(studio: Studio) -> list[dict[str, Any]]:
    """Everything that can be asked for by name, what is loaded first."""
    loaded = studio.loaded()
    entries = [(entry.name, entry.path, loaded.get(entry.name)) for entry in studio.catalog() if entry.ready or entry.name in loaded]
    out = []
    for name, path, info in sorted(entries, key=lambda entry: (entry[2] is None, entry[0])):
        created = int(path.stat().st_mtime) if path.exists() else 0
        facts = {"context": info.context or None, "format": info.format, "embeddings": "embeddings" in info.capabilities} if info else {}
        out.append({"id": name, "object": "model", "created": created, "owned_by": "local", "loaded": info is not None, **facts})
    return out


# ---------------------------------------------------------------------------------------------- answers
async def _chat(studio: Studio, body: schema.ChatBody, http: HttpRequest):
    return await _answer(studio, _bounded(asked.chat(body), http), "chat", http)


async def _complete(studio: Studio, body: schema.CompletionBody, http: HttpRequest):
    return await _answer(studio, _bounded(asked.completion(body), http), "text", http)


def _bounded(ask: Ask, http: HttpRequest) -> Ask:
    return replace(ask, requests=limits.bounded(http.scope, ask.requests))


async def _answer(studio: Studio, ask: Ask, kind: str, http: HttpRequest):
    """Errors before the first token have their own status; a client that leaves cancels."""
    if len(ask.requests) > 1:
        await aside(lambda cancel: limits.check_texts(http.scope, studio, [request.prompt for request in ask.requests], ask.model, "prompt"))
    answer = Answer(*(_start(studio, ask, request) for request in ask.requests), stride=ask.n)
    watcher, handed_over = asyncio.create_task(watch_disconnect(http.receive, answer.cancel)), False
    try:
        first = await answer.first()
        head = shapes.Head(kind, studio.model(ask.model).info.name)
        echoed = await _echoed(studio, ask) if ask.echo else ()
        if not ask.stream:
            return _whole(ask, head, [*first, *await answer.rest()], echoed)
        handed_over = True
    finally:
        watcher.cancel()
        if not handed_over:
            answer.close()
    return StreamingResponse(_pieces(answer, first, shapes.Stream(ask, head, echoed)), media_type="text/event-stream", headers=HEADERS)


def _start(studio: Studio, ask: Ask, request: Any) -> Callable:
    return lambda cancel: studio.submit(request, ask.model, cancel)


async def _echoed(studio: Studio, ask: Ask) -> list[str]:
    """The prompts as text."""
    return [request.prompt if isinstance(request.prompt, str)
            else await aside(lambda cancel, ids=request.prompt: studio.detokenize(ids, ask.model)) for request in ask.requests]


def _whole(ask: Ask, head: shapes.Head, events: Sequence[Event], echoed: Sequence[str]) -> JSONResponse:
    for event in events:
        if event.error is not None:
            raise event.error
    return JSONResponse(shapes.whole(ask, head, events, echoed))


async def _pieces(answer: Answer, events: list[Event], stream: shapes.Stream) -> AsyncIterator[bytes]:
    """One write for what is at hand. Leaving it, in whatever way, cancels the answer."""
    clock = asyncio.get_running_loop().time
    try:
        while events:
            sent = clock()
            failed = next((event.error for event in events if event.error is not None), None)
            out = b"".join(line(piece) for event in events for piece in stream.push(event))
            if failed is not None:
                yield out + line(error_body(failed)) + DONE
                return
            if out:
                yield out
                await asyncio.sleep(sent + GAP_SECONDS - clock())
            events = await answer.batch()
        yield b"".join(map(line, stream.close())) + DONE
    finally:
        answer.close()


# ---------------------------------------------------------------------------------------------- texts and numbers
async def _embed(studio: Studio, body: schema.EmbeddingBody, http: HttpRequest):
    prompts = asked.prompts_of("input", body.input)
    if len(prompts) > MAX_INPUTS:
        raise InvalidRequest(f"input takes up to {MAX_INPUTS} texts.", field="input", texts=len(prompts))
    if not all(prompts):
        raise InvalidRequest("input holds an empty text.", field="input")
    await aside(lambda cancel: limits.check_texts(http.scope, studio, prompts, body.model))
    found = await aside(lambda cancel: studio.embed(prompts, body.model, cancel, key=label(http.scope)), http.receive)
    packed = [_packed(vector, body.encoding_format == "base64") for vector in found.vectors]
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(packed)]
    return JSONResponse({"object": "list", "data": data, "model": studio.model(body.model).info.name,
                         "usage": {"prompt_tokens": sum(found.tokens), "total_tokens": sum(found.tokens)},
                         "pooling": "mean of the last hidden states over the text's tokens", "normalized": True})


def _packed(vector: Sequence[float], as_bytes: bool) -> list[float] | str:
    """To length 1, as OpenAI's are; little-endian float32 for clients that ask for base64."""
    length = sum(value * value for value in vector) ** 0.5 or 1.0
    unit = [value / length for value in vector]
    return base64.b64encode(struct.pack(f"<{len(unit)}f", *unit)).decode() if as_bytes else unit


async def _tokenize(studio: Studio, body: schema.TokenizeBody, http: HttpRequest):
    given = [one for one in (body.prompt, body.content, body.messages) if one is not None]
    if len(given) != 1:
        raise InvalidRequest("Give one of prompt, content and messages.", field="prompt")
    prompt = tuple(asked.message(item) for item in body.messages) if body.messages else given[0]
    ids = await aside(lambda cancel: studio.tokenize(prompt, body.model, special=body.add_special), http.receive)
    limits.check_tokens(http.scope, len(ids), "prompt")
    return JSONResponse({"tokens": list(ids), "count": len(ids), "model": studio.model(body.model).info.name})


async def _detokenize(studio: Studio, body: schema.DetokenizeBody, http: HttpRequest):
    limits.check_tokens(http.scope, len(body.tokens), "tokens")
    size = studio.model(body.model).info.vocab_size
    if any(not 0 <= token < size for token in body.tokens):
        raise InvalidRequest(f"tokens holds what is no id; this model's token ids are 0 to {size - 1}.", field="tokens")
    text = await aside(lambda cancel: studio.detokenize(body.tokens, body.model), http.receive)
    return JSONResponse({"content": text, "model": studio.model(body.model).info.name})
