"""What OpenAI's clients send and get, as types: fields, their kinds, and what each may hold. Ranges are checked in `Sampling`.

A field that is not here is refused by name. Of OpenAI's own fields these are taken though they change nothing, since they are
labels for a service that does not exist here, and are neither kept nor sent on: user, safety_identifier, metadata,
prompt_cache_key. store and service_tier are taken only with values that ask for nothing.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from backends.base import ROLES
from gainz_ui.api.native import DraftBody, Strict


class Labels(Strict):
    """Harmless: see above."""

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class StreamOptions(Strict):
    include_usage: bool | None = None


class SamplingBody(Labels):
    """What chat and completions share; after ``logit_bias`` our extensions."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_ids: list[int] | None = None
    ignore_eos: bool | None = None
    draft: str | DraftBody | None = None
    time_limit: float | None = None


# ---------------------------------------------------------------------------------------------- chat
class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(Strict):
    """``refusal``, ``audio``, ``annotations``, ``function_call``: null, as clients send an answer back."""

    role: Literal[ROLES]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    annotations: None = None
    function_call: None = None


class JsonSchema(Strict):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True, protected_namespaces=())
    name: str
    description: str | None = None
    body: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionBody(Strict):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionBody


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingBody):
    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(SamplingBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: None = None


# ---------------------------------------------------------------------------------------------- others
class EmbeddingBody(Strict):
    input: str | list[str] | list[int] | list[list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


class TokenizeBody(Strict):
    """``content``: llama.cpp's name for ``prompt``."""

    prompt: str | None = None
    content: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, max_length=4096)
    model: str | None = None
    add_special: bool = True


class DetokenizeBody(Strict):
    tokens: list[int] = Field(max_length=1 << 20)
    model: str | None = None


# ---------------------------------------------------------------------------------------------- answers, for the description
class UsageAnswer(BaseModel):
    prompt_tokens: int
    completion_tokens: int | None = None
    total_tokens: int


class CompletionAnswer(BaseModel):
    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: UsageAnswer | None
    timings: dict[str, Any]


class EmbeddingAnswer(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    model: str
    usage: UsageAnswer
    pooling: str
    normalized: bool


class ModelAnswer(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    loaded: bool


class ModelsAnswer(BaseModel):
    object: Literal["list"]
    data: list[ModelAnswer]


class TokensAnswer(BaseModel):
    tokens: list[int]
    count: int
    model: str


class TextAnswer(BaseModel):
    content: str
    model: str
