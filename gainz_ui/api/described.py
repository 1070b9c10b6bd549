"""Shapes of our own routes' answers, for the description that clients are made from. Nothing is computed here."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """``type`` and ``param`` are OpenAI's words; ``remedy`` says what to do, ``evidence`` what shows it."""

    message: str
    type: str
    param: str | None
    code: str
    remedy: str
    field: str | None
    evidence: dict[str, Any]


class ErrorAnswer(BaseModel):
    error: ErrorDetail


class GenerateAnswer(BaseModel):
    text: str
    model: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    timing: dict[str, Any] | None


class HealthAnswer(BaseModel):
    ready: bool
    status: str
    reason: str
    models: list[str]
    version: str
    running: int
    waiting: int
    uptime_seconds: float


FAILS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "What was wrong, in which field, and what to do"},
    "5XX": {"model": ErrorAnswer, "description": "The server could not do it, and why"}}
STREAM: dict[str, dict[str, Any]] = {"text/event-stream": {}}     # an event is one JSON object; [DONE] is none
GENERATE: dict[int | str, dict[str, Any]] = {
    200: {"model": GenerateAnswer, "content": STREAM, "description": "The answer; with stream as server-sent events, the last with done"}, **FAILS}
HEALTH: dict[int | str, dict[str, Any]] = {200: {"model": HealthAnswer}, 503: {"model": HealthAnswer, "description": "Not ready, and why"}}
METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}},
                                                  "description": "Prometheus' text form"}}
