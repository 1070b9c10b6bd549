"""A model in the engine process as the front sees it: the `Model` protocol over the host. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from backends.answer import Reviving
from backends.base import Cancel, Embeddings, Event, Message, Model, ModelInfo, Request

if TYPE_CHECKING:
    from backends.host import EngineHost, Loaded


class EngineModel(Model):
    """A model in the engine process. Its `info` is what it was when last loaded."""

    def __init__(self, host: EngineHost, loaded: Loaded) -> None:
        self._host, self._loaded = host, loaded

    @property
    def info(self) -> ModelInfo:
        return self._loaded.info

    def generate(self, request: Request, cancel: Cancel) -> Iterator[Event]:
        """Raises at once what is wrong with the request. Of a model that rests, or that a death of the engine took, the answer
        begins with the progress of the reload, and then errors come in the last event."""
        self._host.raise_unless_open(self._loaded)
        return self._host.answer(self._loaded, request, cancel) or Reviving(self._host, self._loaded, request, cancel)

    def tokenize(self, prompt: str | tuple[Message, ...], *, special: bool = True) -> tuple[int, ...]:
        return tuple(self._ask("tokenize", prompt, special))

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._ask("detokenize", tuple(ids))

    def embed(self, prompts: Sequence[str | tuple[int, ...]], cancel: Cancel) -> Embeddings:
        return self._ask("embed", tuple(prompts), cancel=cancel)

    def close(self) -> None:
        self._host.unload(self._loaded.name)

    def _ask(self, verb: str, *arguments: Any, cancel: Cancel | None = None) -> Any:
        self._host.raise_unless_open(self._loaded)
        while not self._host.take(self._loaded):
            self._host.bring(self._loaded, lambda _: None, cancel or Cancel())
        try:
            call = self._loaded.link.call(verb, self._loaded.name, *arguments)
            if cancel is not None:
                cancel.on_set(call.cancel)
            return call.result()
        finally:
            self._host.give(self._loaded)
