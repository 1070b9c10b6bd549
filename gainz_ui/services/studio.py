"""The facade that page, API and command line share: what models there are, which are loaded, and the way to ask them.

Knows the registry, the engine's host and the records. Refuses to know how a page or a wire format looks, and never touches
a weight: a local model lives in the engine process, and only `Event`s come back.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from backends import estimate as sizing, speculative
from backends.base import (
    Cancel, Embeddings, EngineStopping, Event, GainzError, MemoryEstimate, Message, Model, ModelDir, ModelInfo, ModelNotLoaded,
    NotSupported, Progress, ProgressFn, Request, UnknownFormat, make_options)
from backends.host import EngineHost
from backends.reach import Reach, is_loopback
from backends.registry import Registry
from gainz_ui.services import catalog as shelf
from gainz_ui.services.catalog import BackendEntry, CatalogEntry
from gainz_ui.services.drafts import Pairs
from gainz_ui.services.floor import Floor
from gainz_ui.services.identity import installation
from gainz_ui.services.idle import Idle
from gainz_ui.services.meter import Meter
from gainz_ui.services.records import Records
from gainz_ui.services.remote_keys import RemoteKeys
from gainz_ui.services.reload import difference, refuse_if_too_big, values
from gainz_ui.services.signals import Signal
from gainz_ui.services.snapshot import Loading, Memory, Snapshot, pages
from gainz_ui.settings import Settings

__all__ = ["BackendEntry", "CatalogEntry", "Loading", "Memory", "Signal", "Snapshot", "Studio"]

STUCK_SECONDS = 60.0                    # a busy engine without a step for so long is reported as stuck


def _quiet(_: Progress) -> None:
    """The progress of somebody who does not watch."""


def _sooner(request: Request, waited: float) -> Request:
    """What is left of its time limit after it has waited."""
    limit = request.time_limit
    return request if limit is None or not waited else replace(request, time_limit=max(limit - waited, 0.001))


class Studio:
    """Thread-safe; one for a process. `changed` tells after every load, unload, death of the engine or new file."""

    def __init__(self, settings: Settings, registry: Registry | None = None, host: EngineHost | None = None) -> None:
        self.settings = settings
        self.registry = registry or Registry.scan()
        self.changed, self.floor = Signal(), Floor()
        self.meter = Meter()
        self.records = Records(settings.logs, settings.outputs, settings.log_content, settings.log_size, self.meter.ended)
        self.host = host or EngineHost(logs=settings.logs, queue=settings.queue)
        self.host.on_change, self.host.on_beat = self.changed.emit, self._beaten
        self._idle = Idle(self.host, settings.idle_unload)
        self._lock = threading.Lock()                       # guards the four below; never held while something loads
        self._gates: dict[str, threading.Lock] = {}         # one load or unload of a name at a time
        self._remote: dict[str, Model] = {}                 # models answered by another server live in this process
        self._loading: dict[str, tuple[Progress, float]] = {}
        self._used: list[str] = []                          # loaded names, the last loaded at the end, drafts before all others
        self._holds: list[str] = []                         # reasons for not being ready yet
        self._pairs = Pairs(self)
        self._stopping = False
        self._born = time.monotonic()
        self.remote_keys = RemoteKeys(settings.remote_key_file)
        self.reach = Reach(settings.remote_private and is_loopback(settings.host), settings.remote_hosts, self.remote_keys.find,
                           installation(settings.models))

    # ------------------------------------------------------------------------------------------ what there is
    def catalog(self) -> list[CatalogEntry]:
        """Every folder and .gguf file of models/, loadable or not, with the reason; by name."""
        loaded, places = self.loaded(), shelf.places(self.settings.models)
        return [shelf.examine(self.registry, name, path, name in loaded) for name, path in places.items()]

    def entry(self, name: str) -> CatalogEntry:
        """ModelNotFound lists the names there are; NameRefused for a path."""
        return shelf.examine(self.registry, name, shelf.locate(self.settings.models, name), name in self.loaded())

    def directory(self, name: str) -> ModelDir:
        return ModelDir.of(shelf.locate(self.settings.models, name), name)

    def details(self, name: str) -> sizing.ModelFacts:
        """Architecture, layers, parameters, bits, context … from the files' headers."""
        return sizing.describe(self.directory(name))

    def backends(self) -> list[BackendEntry]:
        return shelf.backend_entries(self.registry)

    def options_for(self, name: str) -> type:
        """The options dataclass of the model's backend: forms are made from its fields."""
        return self.registry.claim(self.directory(name))[0].options

    def estimate(self, name: str, options: Mapping[str, Any] = {}) -> MemoryEstimate:  # noqa: B006  never written to
        """Memory needed against memory free, now. Unknown options are an InvalidRequest."""
        return sizing.estimate(self.directory(name), make_options(self.options_for(name), options))

    # ------------------------------------------------------------------------------------------ load and unload
    def load(self, name: str, options: Mapping[str, Any] = {}, progress: ProgressFn = _quiet,  # noqa: B006
             cancel: Cancel | None = None) -> ModelInfo:
        """Load ``name`` and return what it became. Loaded already with the same options: nothing happens; with others: it is
        reloaded, and both are said through ``progress``. OutOfMemory before anything is read where it cannot fit. A reload
        that is refused or fails leaves what was loaded."""
        self._raise_if_stopping()
        with self._gate(name):
            entry = self.entry(name)
            if entry.reason:
                raise self._refusal(entry)
            backend = self.registry.get(entry.backend)
            chosen, cancel = make_options(backend.options, options), cancel or Cancel()
            if (present := self.loaded().get(name)) is not None:
                if dict(present.options) == values(chosen):
                    progress(Progress("loaded", 1, 1, "already loaded with these options"))
                    return self.host.ensure(name, progress, cancel) if backend.local else present
                return self._reload(present, entry, backend, chosen, progress, cancel)
            return self._load(entry, backend, chosen, progress, cancel)

    def _reload(self, present: ModelInfo, entry: CatalogEntry, backend, options, progress, cancel: Cancel) -> ModelInfo:
        """With other options. What can be known beforehand is looked at while the old one still answers; where the load
        fails all the same, the old one comes back when it is next asked for."""
        name, note = entry.name, f"reloading with {difference(dict(present.options), values(options))}"
        if not backend.local:                               # it needs no memory: the new one first, then the old one goes
            old = self._remote[name]
            info = self._load(entry, backend, options, progress, cancel)
            old.close()
            return info
        free = sizing.free_memory(sizing.resolve(options)[0]) + (present.weights_bytes or 0)
        refuse_if_too_big(name, sizing.estimate(self.directory(name), options, free))
        self.host.check(name, entry.path, backend.name, options, progress, cancel)
        progress(Progress("unload", note=note))
        with self._lock:
            place = self._used.index(name)
        kept = self._unload(name)
        try:
            return self._load(entry, backend, options, progress, cancel)
        except GainzError as error:
            self.host.restore(kept)
            with self._lock:
                self._used.insert(place, name)
            error.evidence["kept"] = "the model as it was loaded before comes back when it is next asked for"
            self.changed.emit()
            raise

    def _load(self, entry: CatalogEntry, backend, options, progress: ProgressFn, cancel: Cancel) -> ModelInfo:
        with self._announced(entry.name, progress) as report:
            model = self.directory(entry.name)
            if backend.local:
                expected = sizing.estimate(model, options)
                refuse_if_too_big(entry.name, expected)
                proxy = self.host.load(entry.name, entry.path, backend.name, options, report, cancel, entry.revision)
                info = replace(proxy.info, estimate=proxy.info.estimate or expected)
                self.host.annotate(entry.name, info)
            else:
                self._remote[entry.name] = backend.load(model, options, report, cancel, self.reach)
                info = self._remote[entry.name].info
            with self._lock:
                others = [used for used in self._used if used != entry.name]
                self._used = [entry.name, *others] if backend.helper else [*others, entry.name]
            return info

    def unload(self, name: str) -> None:
        """Give its memory back. Its running answers end as cancelled. ModelNotLoaded where it is not loaded."""
        with self._gate(name):
            if name not in self.loaded():
                raise self._not_loaded(name)
            self._unload(name)
        self.changed.emit()

    def _unload(self, name: str) -> Any:
        """What the host needs to have a local model again."""
        with self._lock:
            self._used = [used for used in self._used if used != name]
            remote = self._remote.pop(name, None)
        return self.host.unload(name) if remote is None else remote.close()

    def restart(self) -> None:
        """End a stuck engine process at once; its models come back when they are next asked for."""
        self.host.kill()

    # ------------------------------------------------------------------------------------------ asking
    def loaded(self) -> dict[str, ModelInfo]:
        """By name. Models of an engine that died count: they come back when they are next asked for."""
        with self._lock:
            remote = {name: model.info for name, model in self._remote.items()}
        return dict(sorted({**self.host.models(), **remote}.items()))

    def model(self, name: str | None = None) -> Model:
        """The loaded model of that name; None: the one loaded last that is no draft. ModelNotLoaded, ModelNotFound."""
        if name is None:
            with self._lock:
                name = self._used[-1] if self._used else None
        if name is None:
            raise ModelNotLoaded("No model is loaded.", field="model")
        with self._lock:
            remote = self._remote.get(name)
        model = remote or self.host.model(name)
        if model is None:
            raise self._not_loaded(name)
        return model

    def _asked(self, name: str | None, cancel: Cancel) -> Model:
        """`model`, for somebody who waits: one that is not loaded is loaded first, if the settings say so."""
        try:
            return self.model(name)
        except ModelNotLoaded:
            if name is None or not self.settings.load_on_demand:
                raise
        self.load(name, cancel=cancel)
        return self.model(name)

    def submit(self, request: Request, model: str | None = None, cancel: Cancel | None = None) -> Iterator[Event]:
        """The answer, event by event. What is wrong with the request is raised here, before the first event; afterwards
        errors come in the last event. Closing the iterator cancels. Every request leaves one line in the request log. While a
        pair of a benchmark is measured, it waits."""
        self._raise_if_stopping()
        cancel = cancel or Cancel()
        request = replace(request, id=request.id or uuid.uuid4().hex[:16])
        try:
            chosen = self._asked(model, cancel)
        except GainzError as error:
            self.records.refused(request, model, error)
            raise
        limit = request.time_limit or self.settings.time_limit or None
        request = replace(request, time_limit=limit, queue_limit=request.queue_limit or self.settings.queue_time or None)
        try:
            if request.draft is not None:
                speculative.check(request.draft, chosen.info, self.loaded())
            events = self.floor.admitted(lambda waited: chosen.generate(_sooner(request, waited), cancel), cancel, request.queue_limit)
        except GainzError as error:
            self.records.refused(request, chosen.info, error)
            raise
        return self.records.follow(request, chosen.info, events)

    def embed(self, prompts: Sequence[str | tuple[int, ...]], model: str | None = None, cancel: Cancel | None = None, *,
              key: str = "") -> Embeddings:
        """Mean-pooled last hidden states; waits. NotSupported where the model's cannot be read. ``key``: see `Request`."""
        self._raise_if_stopping()
        cancel = cancel or Cancel()
        try:
            chosen = self._asked(model, cancel)
        except GainzError as error:
            self.records.refused_embedding(model, key, len(prompts), error)
            raise
        with self.records.embedding(chosen.info, key, len(prompts)) as tokens:
            if "embeddings" not in chosen.info.capabilities:
                raise NotSupported(f"{chosen.info.name} cannot embed: its hidden states cannot be read.", field="model")
            with self.floor.inside(cancel):
                found = chosen.embed(prompts, cancel)
            tokens += found.tokens
            return found

    def drafts(self, model: str | None = None) -> list[speculative.Pairing]:
        """Everything that could draft for the model, and of what does not fit the reason."""
        return self._pairs.of(self.model(model).info)

    def tokenize(self, prompt: str | tuple[Message, ...], model: str | None = None, *,
                 special: bool = True) -> tuple[int, ...]:
        return self.model(model).tokenize(prompt, special=special)

    def detokenize(self, ids: Sequence[int], model: str | None = None) -> str:
        return self.model(model).detokenize(ids)

    # ------------------------------------------------------------------------------------------ how things stand
    @contextmanager
    def not_ready(self, reason: str) -> Iterator[None]:
        """While this block runs, `snapshot` says "starting" with the reason: the starter is fetched, first models load."""
        with self._lock:
            self._holds.append(reason)
        try:
            yield
        finally:
            with self._lock:
                self._holds.remove(reason)
            self.changed.emit()

    def snapshot(self) -> Snapshot:
        engine = self.host.beat()
        models = self.loaded()
        with self._lock:
            now = time.monotonic()
            loading = tuple(Loading(name, seen, now - since) for name, (seen, since) in self._loading.items())
            holds = tuple(self._holds)
        running, waiting = self._elsewhere()
        status, reason = self._status(engine, models, loading, holds)
        memory = Memory(*sizing.machine_memory(), engine=engine.rss, front=sizing.resident())
        return Snapshot(status, reason, status in {"ready", "idle"}, tuple(models.values()), loading, engine.state,
                        engine.running + running, engine.waiting + waiting, self.settings.queue, memory, engine.step_age,
                        now - self._born, engine.counters, self.host.resting(), self.host.missing())

    def _elsewhere(self) -> tuple[int, int]:
        """Requests that other servers answer, and those that wait for a free connection to one."""
        with self._lock:
            models = list(self._remote.values())
        counts = [(getattr(model, "running", 0), getattr(model, "waiting", 0)) for model in models]
        return sum(running for running, _ in counts), sum(waiting for _, waiting in counts)

    def _beaten(self, counters: Mapping[str, Any]) -> None:
        """A heartbeat of the engine, in the thread that reads them."""
        self.meter.heard(counters)
        self.mark()

    def mark(self) -> None:
        """Remember how things stand, unless that was done a moment ago."""
        if self.meter.due():
            engine, (running, waiting) = self.host.beat(), self._elsewhere()
            self.meter.mark(engine.running + running, engine.waiting + waiting, pages(engine.counters), engine.rss, sizing.resident())

    def _status(self, engine, models, loading, holds) -> tuple[str, str]:
        if self._stopping:
            return "stopping", "the server is shutting down"
        if holds:
            return "starting", holds[-1]
        if engine.state == "dead":
            return "dead", engine.reason
        if engine.step_age is not None and engine.step_age > STUCK_SECONDS:
            return "stuck", f"the engine has work and made no step for {engine.step_age:.0f} s"
        if models:
            return "ready", ""
        if loading:
            return "loading", f"loading {loading[0].name}: {loading[0].progress.stage}"
        return "idle", ""

    def close(self) -> None:
        """Refuse new work, let running answers end for `settings.drain` seconds, then stop the engine. Twice is harmless."""
        self._stopping = True
        self._idle.close()
        until = time.monotonic() + self.settings.drain
        self.host.close(self.settings.drain)
        with self._lock:
            remote, self._remote = list(self._remote.values()), {}
        while any(getattr(model, "running", 0) for model in remote) and time.monotonic() < until:
            time.sleep(0.02)
        for model in remote:
            model.close()
        self.records.close()

    # ------------------------------------------------------------------------------------------ small things
    @contextmanager
    def _gate(self, name: str) -> Iterator[None]:
        with self._lock:
            gate = self._gates.setdefault(name, threading.Lock())
        with gate:
            yield

    @contextmanager
    def _announced(self, name: str, progress: ProgressFn) -> Iterator[ProgressFn]:
        """Keep what a load reports where `snapshot` sees it; tell everybody at both ends."""
        began = time.monotonic()

        def report(seen: Progress) -> None:
            self._loading[name] = (seen, began)
            progress(seen)

        report(Progress("check"))
        self.changed.emit()
        try:
            yield report
        finally:
            with self._lock:
                del self._loading[name]
            self.changed.emit()

    def _refusal(self, entry: CatalogEntry) -> GainzError:
        """The error behind an entry's reason, as the registry raises it."""
        if entry.code in {"unfinished", ""}:
            return UnknownFormat(f"{entry.name} cannot be loaded: {entry.reason}.", model=entry.name, remedy="")
        try:
            self.registry.pick(self.directory(entry.name))
        except GainzError as error:
            return error
        return UnknownFormat(f"{entry.name} cannot be loaded: {entry.reason}.", model=entry.name, remedy="Try again.")

    def _not_loaded(self, name: str) -> GainzError:
        shelf.locate(self.settings.models, name)           # a name that is no model at all is ModelNotFound
        return ModelNotLoaded(f"{name!r} is not loaded.", field="model", loaded=", ".join(self.loaded()) or "none")

    def _raise_if_stopping(self) -> None:
        if self._stopping:
            raise EngineStopping("The server is shutting down.")
