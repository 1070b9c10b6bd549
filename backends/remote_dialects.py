"""What servers call the fields that go beyond OpenAI's own, and which of them take a field without a word and do nothing with it.

Data only. A server that is none of these is spoken to in OpenAI's fields; what a request asks beyond them is sent under vLLM's names,
which others have taken over, and the server's refusal, if it refuses, is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

VLLM: Mapping[str, tuple[str, Any]] = {
    "top_k": ("top_k", -1), "min_p": ("min_p", 0.0), "repetition_penalty": ("repetition_penalty", 1.0), "min_tokens": ("min_tokens", 0),
    "ignore_eos": ("ignore_eos", False), "stop_ids": ("stop_token_ids", [])}
LLAMA: Mapping[str, tuple[str, Any]] = {
    "top_k": ("top_k", 0), "min_p": ("min_p", 0.0), "repetition_penalty": ("repeat_penalty", 1.0)}


@dataclass(frozen=True)
class Dialect:
    """``names``: our field → (theirs, the value that switches it off). With ``explicit`` that value is sent, too: what such a server
    does by itself is something else (top-k 40, the model's own generation config). ``ignores``: our field → why it is refused here.
    ``owners``: what its /models calls the owner. ``goes_on``: fields that make it continue the last turn; None: it cannot.
    ``schema``: the form in which it takes a JSON schema. ``note``: what a person has to know of it."""

    name: str
    title: str
    names: Mapping[str, tuple[str, Any]]
    explicit: bool = False
    ignores: frozenset[str] = frozenset()
    owners: tuple[str, ...] = ()
    goes_on: Mapping[str, Any] | None = None
    schema: Literal["json_schema", "json_object"] = "json_schema"
    note: str = ""


LAST_TURN = {"continue_final_message": True, "add_generation_prompt": False}
DIALECTS = {dialect.name: dialect for dialect in (
    Dialect("openai", "OpenAI", VLLM),
    Dialect("vllm", "vLLM", VLLM, True, owners=("vllm",), goes_on=LAST_TURN),
    Dialect("sglang", "SGLang", VLLM, True, owners=("sglang",), goes_on={"continue_final_message": True}),
    Dialect("llama-server", "llama-server", {**LLAMA, "ignore_eos": ("ignore_eos", False)}, True,
            frozenset({"min_tokens", "stop_ids"}), ("llamacpp",), {}),
    Dialect("llama-cpp-python", "llama-cpp-python", {**LLAMA, "min_tokens": ("min_tokens", 0)}, True,
            frozenset({"stop_ids"}), ("me",), schema="json_object",
            note="It answers one request at a time, and drops it when another one comes, unless it was started with --interrupt_requests false."),
    Dialect("ollama", "Ollama", {}, False,
            frozenset({"top_k", "min_p", "repetition_penalty", "min_tokens", "stop_ids", "logit_bias"}), ("library",)),
    Dialect("gainz", "Gainz", {**{ours: (ours, off) for ours, (_, off) in VLLM.items()}, "top_k": ("top_k", 0)}, True, owners=("gainz",)))}
PLAIN = DIALECTS["openai"]
AUTO = "auto"


def by_owner(owner: Any) -> Dialect:
    """The family of a server by what its list of models says; OpenAI's where that is nobody known."""
    return next((dialect for dialect in DIALECTS.values() if owner in dialect.owners), PLAIN)
