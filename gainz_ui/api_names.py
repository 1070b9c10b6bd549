"""The names by which Gradio's client calls Gainz. They are a contract: frozen by a test, independent of the page's layout.

Registered inside the page's Blocks by `register`. Knows gradio and the studio; the same rules, ranges and errors as everywhere,
since requests are made of the same values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from inspect import Parameter, Signature
from typing import Any, get_type_hints

import gradio as gr

from backends.base import Cancel, DraftSpec, GainzError, InvalidRequest, Message, Request, Sampling
from gainz_ui import api_batch, api_bench, api_variants
from gainz_ui.api_values import biases, listed, mapping, optional_text, text, whole
from gainz_ui.api_work import BEAT_SECONDS, plain
from gainz_ui.page import asker
from gainz_ui.services.answers import Answer, View
from gainz_ui.services.jobs import Jobs
from gainz_ui.services.monitor import Monitor
from gainz_ui.services.studio import Studio

NAMES = ("/batch", "/benchmark", "/chat", "/compare", "/generate", "/load", "/models", "/monitor", "/quantize", "/unload")
BATCH_SECONDS = 0.08        # a client that gets every token by itself spends more time on transport than the model on tokens


def register(studio: Studio, jobs: Jobs) -> None:
    """Call inside ``gr.Blocks``. No concurrency limit of Gradio's: the engine admits."""
    def spoken(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except GainzError as error:
            raise gr.Error(str(error), print_exception=False) from error

    def run(request: Request, model: str | None, stream: bool, who: gr.Request | None) -> Iterator[dict]:
        request = replace(request, key=asker(who))
        name = spoken(lambda: studio.model(optional_text("model", model))).info.name
        for view in _views(lambda cancel: studio.submit(request, model, cancel)):
            if view.error is not None:
                raise gr.Error(str(view.error), print_exception=False)
            if stream or view.done:
                yield _state(view, name)

    def generate(**given: Any) -> dict:
        """Continue a text. Takes every sampling field by name, and `draft`, `draft_length`, `time_limit`. Yields the answer so
        far, or with `stream` false only the whole one; the last has finish_reason, counts and timing."""
        yield from run(spoken(lambda: make_request(text("prompt", given.pop("prompt")), given)), given["model"], given["stream"], given["who"])

    def chat(**given: Any) -> dict:
        """Answer a message through the model's chat template. `history`: earlier turns as {"role", "content"}. Takes and yields
        what /generate does."""
        turns = spoken(lambda: _turns(given.pop("message"), given.pop("history") or [], given.pop("system")))
        yield from run(spoken(lambda: make_request(turns, given)), given["model"], given["stream"], given["who"])

    def models() -> list[dict]:
        """Everything in models/, loadable or not with the reason, and what is loaded. ``size`` is ``bytes`` by its older name."""
        return [plain(asdict(entry) | {"bytes": entry.size}, "folder") for entry in studio.catalog()]

    watched = Monitor(studio)

    def monitor() -> dict:
        """How the server does: memory, queue, speeds, percentiles of the last minutes, errors by code, models, recent requests (without
        what they said), the last minutes second by second."""
        return watched.plain()

    def load(name: str, options: dict | None = None) -> dict:
        """Load a model; `options` as on the Models tab (context, kv_type, streams, threads, device, dtype, kernels …)."""
        cancel = Cancel()
        return plain(asdict(spoken(lambda: studio.load(text("name", name), mapping("options", options), cancel=cancel))), "decoder")

    def unload(name: str) -> dict:
        """Give a model's memory back."""
        spoken(lambda: studio.unload(text("name", name)))
        return {"unloaded": name}

    chat = _taking(chat, message=str, history=(list[dict] | None, None), system=(str | None, None), **_fields(None))
    generate = _taking(generate, prompt=str, **_fields(256))
    compare, quantize = api_variants.functions(studio, jobs, spoken)
    batch, benchmark = api_batch.function(studio, spoken), api_bench.function(studio, jobs, spoken)
    for function in (batch, benchmark, chat, compare, generate, load, models, monitor, quantize, unload):
        # evaluated here: gr.api reads the hints themselves, and this file's are text
        function.__annotations__ = get_type_hints(function)
        gr.api(function, api_name=function.__name__, concurrency_limit=None)


# ---------------------------------------------------------------------------------------------- signatures
FIRST = ("max_tokens", "temperature", "top_p", "seed", "stop")      # their places are promised, and those of what is before
TYPES = {"stop": list[str] | None, "stop_ids": list[int] | None, "logit_bias": dict | None}


def _fields(max_tokens: int | None) -> dict[str, tuple[Any, Any]]:
    """(type, default) of what a generation takes: the sampling fields, made from `Sampling`, and what surrounds them. Left out
    are n and the log-probabilities: the answer has no place for them; HTTP has. ``who`` is Gradio's to fill in."""
    hints, plain = get_type_hints(Sampling), Sampling()
    left_out = {"n", "logprobs", "prompt_logprobs"}
    made = {name: (TYPES.get(name, hints[name]), None if name in TYPES else getattr(plain, name))
            for name in Sampling.__dataclass_fields__ if name not in left_out}
    first = {name: made.pop(name) for name in FIRST} | {"max_tokens": (int | None, max_tokens)}
    return {**first, "model": (str | None, None), **made, "stream": (bool, True), "draft": (str | None, None),
            "draft_length": (int | None, None), "time_limit": (float | None, None), "who": (gr.Request | None, None)}


def _taking(function: Callable[..., Iterator[dict]], **parameters: Any) -> Callable[..., Iterator[dict]]:
    """``function`` with a signature of its own: name=type, or name=(type, default)."""
    pairs = {name: value if isinstance(value, tuple) else (value, Parameter.empty) for name, value in parameters.items()}
    signature = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)
                           for name, (kind, default) in pairs.items()], return_annotation=dict)

    def call(*args: Any, **kwargs: Any) -> Iterator[dict]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        yield from function(**bound.arguments)

    call.__name__, call.__doc__, call.__signature__ = function.__name__, function.__doc__, signature
    call.__annotations__ = {name: kind for name, (kind, _) in pairs.items()} | {"return": dict}
    return call


# ---------------------------------------------------------------------------------------------- values
def make_request(prompt: str | tuple[Message, ...], given: Mapping[str, Any]) -> Request:
    """A request of what `_fields` names. InvalidRequest names the field."""
    fields = {name: value for name, value in given.items() if name in Sampling.__dataclass_fields__}
    for name in ("seed", "max_tokens", "min_tokens", "top_k"):
        fields[name] = whole(fields[name])
    fields["stop"] = listed("stop", (fields["stop"],) if isinstance(fields["stop"], str) else fields["stop"])
    fields["stop_ids"] = tuple(map(whole, listed("stop_ids", fields["stop_ids"])))
    fields["logit_bias"] = biases(fields["logit_bias"])
    draft = DraftSpec.asked(optional_text("draft", given["draft"]), whole(given["draft_length"]))
    return Request(prompt, Sampling(**fields), draft, time_limit=given["time_limit"])


def _turns(message: str, history: list[dict], system: str | None) -> tuple[Message, ...]:
    turns = [Message("system", text("system", system))] if system else []
    for turn in listed("history", history):
        if not isinstance(turn, dict) or set(turn) - {"role", "content"} or not all(isinstance(turn.get(key), str) for key in ("role", "content")):
            raise InvalidRequest('Each turn of history is {"role": …, "content": …}, both texts.', field="history")
        turns.append(Message(turn["role"], turn["content"]))
    return (*turns, Message("user", text("message", message)))


def _views(start: Callable[[Cancel], Iterator]) -> Iterator[View]:
    """The answer again and again as it grows; closing the iterator stops it."""
    answer, seen, last = Answer(start), 0, 0.0
    try:
        while True:
            seen = answer.wait(seen, BEAT_SECONDS)
            view = answer.view()
            if not view.done and (rest := last + BATCH_SECONDS - time.monotonic()) > 0:
                time.sleep(rest)
                continue
            last = time.monotonic()
            yield view
            if view.done:
                return
    finally:
        answer.stop()


def _state(view: View, model: str) -> dict[str, Any]:
    counted = asdict(view.usage) if view.usage else {"prompt_tokens": None, "completion_tokens": view.tokens}
    return {"text": view.text, "model": model, "finish_reason": view.finish, **counted,
            "timing": asdict(view.timing) if view.timing else None}
