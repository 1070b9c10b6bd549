"""The names by which Gradio's client calls Gainz. They are a contract: frozen by a test, independent of the page's layout.

Registered inside the page's Blocks by `register`. Knows gradio and the studio; the same rules, ranges and errors as everywhere,
since requests are made of the same values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from backends.base import Cancel, DraftSpec, GainzError, InvalidRequest, Message, Request, Sampling
from gainz_ui.services.answers import Answer, View
from gainz_ui.services.studio import Studio

NAMES = ("/chat", "/generate", "/load", "/models", "/unload")
BATCH_SECONDS = 0.08        # a client that gets every token by itself spends more time on transport than the model on tokens
BEAT_SECONDS = 0.25         # a generator that yields nothing cannot be closed: it says the same again


def register(studio: Studio) -> None:
    """Call inside ``gr.Blocks``. No concurrency limit of Gradio's: the engine admits."""
    import gradio as gr

    def spoken(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except GainzError as error:
            raise gr.Error(str(error), print_exception=False) from error

    def run(request: Request, model: str | None) -> Iterator[dict]:
        name = spoken(lambda: studio.model(model)).info.name
        for view in _views(lambda cancel: studio.submit(request, model, cancel)):
            if view.error is not None:
                raise gr.Error(str(view.error), print_exception=False)
            yield _state(view, name)

    def generate(prompt: str, max_tokens: int | None = 256, temperature: float = 0.0, top_p: float = 1.0, seed: int | None = None,
                 stop: list[str] | None = None, model: str | None = None, options: dict | None = None) -> dict:
        """Continue a text. `options` takes every further sampling field by name (top_k, min_p, ignore_eos, logit_bias …) and
        `draft`, `time_limit`. Yields the answer so far; the last one has finish_reason, counts and timing."""
        yield from run(spoken(lambda: make_request(prompt, max_tokens, temperature, top_p, seed, stop, options)), model)

    def chat(message: str, history: list[dict] | None = None, system: str | None = None, max_tokens: int | None = None,
             temperature: float = 0.0, top_p: float = 1.0, seed: int | None = None, stop: list[str] | None = None,
             model: str | None = None, options: dict | None = None) -> dict:
        """Answer a message through the model's chat template. `history`: earlier turns as {"role", "content"}. Yields like
        /generate."""
        turns = spoken(lambda: _turns(message, history or [], system))
        yield from run(spoken(lambda: make_request(turns, max_tokens, temperature, top_p, seed, stop, options)), model)

    def models() -> list[dict]:
        """Everything in models/, loadable or not with the reason, and what is loaded."""
        return [_plain(entry, "folder") for entry in studio.catalog()]

    def load(name: str, options: dict | None = None) -> dict:
        """Load a model; `options` as on the Models tab (context, kv_type, streams, threads, device, dtype, kernels …)."""
        cancel = Cancel()
        return _plain(spoken(lambda: studio.load(name, options or {}, cancel=cancel)), "decoder")

    def unload(name: str) -> dict:
        """Give a model's memory back."""
        spoken(lambda: studio.unload(name))
        return {"unloaded": name}

    for function in (chat, generate, load, models, unload):
        # evaluated here: gr.api reads the hints themselves, and this file's are text
        function.__annotations__ = _hints(function)
        gr.api(function, api_name=function.__name__, concurrency_limit=None)


def _hints(function: Callable) -> dict[str, Any]:
    from typing import get_type_hints
    return get_type_hints(function)


# ---------------------------------------------------------------------------------------------- values
def make_request(prompt: str | tuple[Message, ...], max_tokens: int | None, temperature: float, top_p: float, seed: int | None,
                 stop: list[str] | None, options: Mapping[str, Any] | None) -> Request:
    """InvalidRequest names the field; an option that is not known is refused."""
    more = dict(options or {})
    draft, limit = more.pop("draft", None), more.pop("time_limit", None)
    known = set(Sampling.__dataclass_fields__) - {"n", "max_tokens", "temperature", "top_p", "seed", "stop"}
    for name in more:
        if name not in known:
            raise InvalidRequest(f"Unknown option {name!r}.", field=name,
                                 remedy=f"Known options: {', '.join(sorted(known | {'draft', 'time_limit'}))}.")
    if "stop_ids" in more:
        more["stop_ids"] = tuple(more["stop_ids"])
    if "logit_bias" in more:
        more["logit_bias"] = _biases(more["logit_bias"])
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=_whole("seed", seed), stop=tuple(stop or ()),
                        max_tokens=_whole("max_tokens", max_tokens), **more)
    return Request(prompt, sampling, DraftSpec(draft) if draft else None, time_limit=limit)


def _whole(name: str, value: Any) -> int | None:
    """Some clients send whole numbers as 16.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(key), float(value)) for key, value in dict(given).items())
    except (TypeError, ValueError) as error:
        raise InvalidRequest("logit_bias maps token ids to numbers.", field="logit_bias") from error


def _turns(message: str, history: list[dict], system: str | None) -> tuple[Message, ...]:
    turns = [Message("system", system)] if system else []
    for turn in history:
        if set(turn) - {"role", "content"} or not all(isinstance(turn.get(key), str) for key in ("role", "content")):
            raise InvalidRequest('Each turn of history is {"role": …, "content": …}, both texts.', field="history")
        turns.append(Message(turn["role"], turn["content"]))
    return (*turns, Message("user", message))


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


def _plain(value: Any, path: str) -> dict[str, Any]:
    """A frozen value as JSON: paths and other objects as text. Its field ``path`` gets another name, since Gradio's client
    takes every object with a "path" for a file to be fetched."""
    def plain(item: Any) -> Any:
        if isinstance(item, Mapping):
            return {path if key == "path" else str(key): plain(inner) for key, inner in item.items()}
        if isinstance(item, (list, tuple)):
            return [plain(inner) for inner in item]
        return item if item is None or isinstance(item, (str, int, float, bool)) else str(item)
    return plain(asdict(value))
