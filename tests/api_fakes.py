"""A studio without an engine: scripted answers at a chosen pace, and a count of the steps that were really made."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from backends.base import (Embeddings, Event, GainzError, Message, ModelInfo, ModelNotFound, ModelNotLoaded, QueueFull, StepFailed, Timing,
                           TokenLogprob, Usage)
from backends.reach import Reach
from gainz_ui.services.meter import Meter
from gainz_ui.services.signals import Signal
from gainz_ui.services.studio import Memory, Snapshot

INFO = ModelInfo("tiny", "fake", "fake F32", context=64, vocab_size=32, chat_template=True, capabilities=("embeddings",))


class FakeStudio:
    """``pace`` seconds a token. ``fail``: an error raised before the first event. ``break_after``: tokens until a failed step."""

    def __init__(self, settings=None, words=None) -> None:
        self.settings = settings
        self.words = words or [f"w{i} " for i in range(32)]
        self.pace, self.prefill, self.steps, self.running = 0.0, 0.0, 0, 0
        self.fail: GainzError | None = None
        self.break_after: int | None = None
        self.status, self.reason = "ready", ""
        self.requests: list = []
        self.changed, self.closed, self.meter = Signal(), threading.Event(), Meter()
        self.registry = SimpleNamespace(backends=())
        self.records = SimpleNamespace(outputs_of=lambda kind: [])
        self.present, self.reach = {"tiny": INFO}, Reach(here="fake")

    def renew(self) -> FakeStudio:
        """Itself, with all that tests change as it was at first."""
        fresh = FakeStudio()
        for name in ("pace", "prefill", "steps", "fail", "break_after", "status", "reason", "words", "present"):
            setattr(self, name, getattr(fresh, name))
        self.requests.clear()
        return self

    def model(self, name=None):
        if name is None and not self.present:
            raise ModelNotLoaded("No model is loaded.", field="model")
        if name not in (None, "tiny") and name not in self.present:
            raise ModelNotFound(f"There is no model {name!r}.", field="model")
        return SimpleNamespace(info=INFO)

    def loaded(self):
        return dict(self.present)

    def catalog(self):
        return [SimpleEntry("tiny")]

    def entry(self, name):
        if name not in ("tiny", "small"):
            raise ModelNotFound(f"There is no model {name!r}.", field="model")
        return SimpleEntry(name)

    def details(self, name):
        return SimpleNamespace(hidden=64, inner=128, parameters=1000, trained_context=64)

    def load(self, name, options={}, progress=lambda p: None, cancel=None):  # noqa: B006
        self.model(name)
        self.present = {"tiny": INFO}
        return INFO

    def unload(self, name):
        self.model(name)
        self.present = {}

    def tokenize(self, prompt, model=None, *, special=True):
        self.model(model)
        return tuple(([1] if special else []) + list(range(2, 2 + len(str(prompt).split()))))

    def detokenize(self, ids, model=None):
        self.model(model)
        return "".join(self.words[i % 32] for i in ids)

    def embed(self, prompts, model=None, cancel=None, *, key=""):
        self.model(model)
        self.requests.append(key)
        return Embeddings(tuple((3.0, float(len(prompt)), 4.0) for prompt in prompts), tuple(len(prompt) for prompt in prompts))

    def submit(self, request, model=None, cancel=None):
        self.model(model)
        self.requests.append(request)
        if self.fail is not None:
            raise self.fail
        return self._events(request, cancel)

    def _events(self, request, cancel):
        self.running += 1
        began = time.monotonic()
        finish, made = "length", 0
        limit = min(request.sampling.max_tokens or 16, 10_000)
        try:
            deadline = began + self.prefill
            while time.monotonic() < deadline and not cancel.is_set():
                time.sleep(0.005)
                self.steps += 1
            choices = range(request.sampling.n)
            for i in range(limit):
                if cancel.is_set() or self.closed.is_set():
                    finish = "cancelled"
                    break
                if self.break_after == made:
                    yield Event(0, finish="error")
                    yield Event(-1, usage=Usage(3, made), timing=Timing(), error=StepFailed("The step failed."))
                    return
                time.sleep(self.pace)
                self.steps += 1
                made += 1
                word = self.words[i % 32]
                logprobs = (TokenLogprob(i, word, -0.5, ((i, word, -0.5),), word.encode(), (word.encode(),)),) \
                    if request.sampling.logprobs is not None else ()
                for choice in choices:
                    yield Event(choice, word, (i,), logprobs, finish=finish if made == limit else None)
            if made < limit:
                for choice in choices:
                    yield Event(choice, finish=finish)
            yield Event(-1, usage=Usage(3, made * len(choices), passes=made, drafted=4, accepted=2), seed=7,
                         timing=Timing(ttft_seconds=0.01, total_seconds=time.monotonic() - began))
        finally:
            self.running -= 1

    def mark(self):
        self.meter.heard(self.snapshot().counters)

    @contextlib.contextmanager
    def not_ready(self, reason):
        self.status, self.reason = "starting", reason
        try:
            yield
        finally:
            self.status, self.reason = "ready", ""

    def snapshot(self):
        return Snapshot(self.status, self.reason, self.status in ("ready", "idle"), tuple(self.present.values()), (), "ready",
                        self.running, 0, 256, Memory(8, 4, 2, 1), None, 1.0, {"tokens": 7, "last_step": None,
                        "models": {"tiny": {"tokens": 7, "requests": 2, "cache": {"pages_used": 3, "pages_total": 8, "page_size": 16}}}})

    def close(self):
        self.closed.set()


class SimpleEntry:
    """Stands in for a catalog entry: a dataclass is what `asdict` wants."""

    def __new__(cls, name):
        from gainz_ui.services.catalog import CatalogEntry
        return CatalogEntry(name, Path("models") / name, 10, backend="fake", title="Fake", format="fake F32", loaded=True)


FULL = QueueFull("Too many requests are waiting.", waiting=256)
__all__ = ["FULL", "INFO", "FakeStudio", "Message"]
