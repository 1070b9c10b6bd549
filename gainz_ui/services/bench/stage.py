"""Both sides of a benchmark made ready to answer, and the memory as it was afterwards.

A side that is loaded already with the same settings is used as it is, and what a side leaves open is as that model is loaded;
others are loaded under a name of their own, so that one model can stand against itself with other settings. Where memory does not hold both, each is loaded when its turn comes, and the
measurement goes in blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from backends.base import (
    Cancel, Event, InvalidRequest, Message, Model, ModelInfo, ModelNotLoaded, ProgressFn, Request, make_options)
from backends.estimate import free_memory, resolve
from backends.speculative import parts
from gainz_ui.services.bench.configs import Config
from gainz_ui.services.compare import SPARE, load_options
from gainz_ui.services.reload import values

CONTEXT = 8192                  # tokens that a side is loaded with where nothing else is asked for: the longest workload
BLOCK = 4                       # pairs of a block, where the sides take turns in memory


class Stage:
    """A context manager. ``block``: what a `Design` needs to know. ``sides``: A and B, once entered."""

    def __init__(self, studio: Any, configs: Sequence[Config], progress: ProgressFn, cancel: Cancel, streams: int = 1) -> None:
        self.studio, self.configs, self.progress, self.cancel, self.streams = studio, tuple(configs), progress, cancel, streams
        self.sides: tuple[Any, ...] = ()
        self.block = 1
        self._stack = ExitStack()

    def __enter__(self) -> Stage:
        try:
            for config in self.configs:
                self._have_draft(config)
            places = [_Place(self, config, f"{config.model} · {letter}") for config, letter in zip(self.configs, "AB")]
            if places[0].same(places[1]):
                places[1] = places[0]
            if self._fits(places):
                self.sides = tuple(place.hold() for place in places)
            else:
                self.block = BLOCK
                turns = _Turns()
                self.sides = tuple(_InTurn(place, turns) for place in places)
                self._stack.callback(turns.clear)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def _fits(self, places: Sequence[_Place]) -> bool:
        wanted = {id(place): place.need() for place in places}
        return sum(wanted.values()) <= SPARE * free_memory(resolve(places[0].options)[0]) or len(wanted) == 1

    def _have_draft(self, config: Config) -> None:
        name = parts(config.draft.name)[1] if config.draft else None
        if name is None or name in self.studio.loaded():
            return
        self.studio.load(name, {}, self.progress, self.cancel)
        self._stack.callback(self.studio.unload, name)


class _Place:
    """Where a side is or will be."""

    def __init__(self, stage: Stage, config: Config, alias: str) -> None:
        self.stage, self.alias = stage, alias
        self._held: Model | None = None
        studio = stage.studio
        self.entry = studio.entry(config.model)
        if self.entry.reason:
            raise InvalidRequest(f"{config.model} cannot be loaded: {self.entry.reason}.", field="model")
        self.backend = studio.registry.get(self.entry.backend)
        present = studio.loaded().get(config.model)
        usual = dict(present.options) if present is not None else self._usual()
        self.options = make_options(self.backend.options, usual | dict(config.options))
        self.loaded = present is not None and dict(present.options) == values(self.options)

    def _usual(self) -> dict[str, Any]:
        """With as many streams as will be measured."""
        if not self.entry.local:
            return {}
        return load_options(self.stage.studio, self.entry.name, CONTEXT) | {"streams": self.stage.streams}

    def same(self, other: _Place) -> bool:
        return self.entry.name == other.entry.name and self.options == other.options and self.loaded == other.loaded

    def need(self) -> int:
        return 0 if self.loaded or not self.backend.local else self.stage.studio.estimate(self.entry.name, values(self.options)).total

    def hold(self) -> Model:
        """In memory until the stage is left; once, where both sides are this place."""
        if self.loaded:
            return self.stage.studio.model(self.entry.name)
        if self._held is None:
            self._held, leave = self.load()
            self.stage._stack.callback(leave)
        return self._held

    def load(self) -> tuple[Model, Any]:
        stage, studio = self.stage, self.stage.studio
        if not self.backend.local:
            model = self.backend.load(studio.directory(self.entry.name), self.options, stage.progress, stage.cancel, studio.reach)
            return model, model.close
        try:
            studio.host.unload(self.alias)              # what a killed benchmark left there
        except ModelNotLoaded:
            pass
        model = studio.host.load(self.alias, self.entry.path, self.backend.name, self.options, stage.progress, stage.cancel,
                                 self.entry.revision)
        return model, lambda: studio.host.unload(self.alias)


class _Turns:
    """Which of the sides is in memory: one at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: Any = None
        self.leave: Any = None

    def clear(self) -> None:
        if self.leave is not None:
            leave, self.leave, self.owner = self.leave, None, None
            leave()


class _InTurn:
    """A side that is loaded when it is asked, in place of the other one; what it is, is known once it has been loaded."""

    def __init__(self, place: _Place, turns: _Turns) -> None:
        self._place, self._turns, self._model = place, turns, None

    @property
    def info(self) -> ModelInfo:
        return (self._model or self._have()).info

    def tokenize(self, prompt: str | tuple[Message, ...], *, special: bool = True) -> tuple[int, ...]:
        return self._have().tokenize(prompt, special=special)

    def generate(self, request: Request, cancel: Cancel) -> Iterator[Event]:
        return self._have().generate(request, cancel)

    def _have(self) -> Model:
        with self._turns.lock:
            if self._turns.owner is not self:
                self._turns.clear()
                self._model, self._turns.leave = self._place.load()
                self._turns.owner = self
            return self._model
