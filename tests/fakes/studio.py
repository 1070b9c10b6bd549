"""A studio without an engine: streams text at a set speed. For the page's own tests; it behaves as `Studio` does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from backends import speculative
from backends.base import (
    Backend,
    Cancel,
    Cancelled,
    ContextTooLong,
    Event,
    LocalOptions,
    MemoryEstimate,
    ModelInfo,
    ModelNotFound,
    ModelNotLoaded,
    OutOfMemory,
    Progress,
    Speculation,
    Timing,
    Usage,
    make_options,
)
from gainz_ui.services.meter import Meter
from gainz_ui.services.signals import Signal
from gainz_ui.settings import Settings

WORDS = (
    "Light in a vacuum travels at about **299,792 kilometres a second**. It takes eight minutes from the Sun to the Earth, "
    "and a little over a second from the Moon.\n\n- Sound needs air\n- Light needs nothing\n\n```python\nprint(299_792_458)\n```\n"
).split(" ")
GB = 10**9


class FakeStudio:
    def __init__(self, speed: float = 200.0, tokens: int = 120, context: int = 2048, load_seconds: float = 1.0) -> None:
        self.speed, self.tokens, self.context, self.load_seconds = speed, tokens, context, load_seconds
        self.changed, self.requests, self.steps, self.meter, self.resting = Signal(), [], 0, Meter(), ()
        self.settings, self.written = Settings(models=Path("no-such-folder")), {}
        self.records = SimpleNamespace(write_output=lambda kind, name, data: self.written.update({(kind, name): data}),
                                       outputs_of=lambda kind: [])
        self._models: dict[str, ModelInfo] = {}
        self._running, self._counted = 0, threading.Lock()
        self.dead, self.speedup = "", 1.62
        backend = Backend("gguf", "GGUF", (), LocalOptions, lambda model: None, lambda *a: None)
        self.registry = SimpleNamespace(backends=(backend,))
        self._entries = {
            name: SimpleNamespace(
                name=name,
                path=Path(name),
                size=size,
                reason=reason,
                code="",
                backend="" if reason else "gguf",
                title="GGUF",
                format=form,
                bits=4.5,
                local=True,
                revision=None,
                source="",
                parent="",
                notes=(),
                ready=not reason,
            )
            for name, size, form, reason in (
                ("starter", 98_362_432, "GGUF Q4_1", ""),
                ("starter-fp16", 269_060_552, "safetensors", ""),
                ("half-a-file", 1200, "", "model.gguf is cut: its header promises 98362432 bytes"),
            )
        }

    # what there is
    def catalog(self):
        return [self.entry(name) for name in self._entries]

    def entry(self, name):
        if name not in self._entries:
            raise ModelNotFound(f"There is no model {name!r}.", field="model")
        return SimpleNamespace(**{**vars(self._entries[name]), "loaded": name in self._models, "helper": self._entries[name].backend == "draft"})

    def details(self, name):
        return SimpleNamespace(
            architecture="llama",
            parameters=134_515_008,
            layers=(None,) * 30,
            trained_context=8192,
            bits=5.85,
            quantization="",
            hidden=576,
            inner=1536,
            weights_bytes=98_000_000,
            disk_bytes=98_000_000,
        )

    def options_for(self, name):
        return LocalOptions

    def estimate(self, name, options={}):  # noqa: B006
        made = make_options(LocalOptions, options)
        context = made.context or 8192
        return MemoryEstimate(110_000_000, context * 46_080, 60_000_000, 4 * GB, context, 8192 if context < 80_000 else 8192)

    # load and unload
    def load(self, name, options={}, progress=lambda p: None, cancel=None):  # noqa: B006
        estimate, cancel = self.estimate(name, options), cancel or Cancel()
        if not estimate.fits:
            raise OutOfMemory(f"{name} does not fit the free memory.", needed=estimate.total, free=estimate.free)
        for i in range(20):
            if cancel.is_set():
                raise Cancelled("The load was cancelled.")
            progress(Progress("read", i, 20))
            time.sleep(self.load_seconds / 20)
        self._models[name] = info(name, self.context)
        self.changed.emit()
        return self._models[name]

    def unload(self, name):
        if name not in self._models:
            raise ModelNotLoaded(f"{name!r} is not loaded.")
        del self._models[name]
        self.changed.emit()

    def loaded(self):
        return dict(self._models)

    def model(self, name=None):
        if not self._models:
            raise ModelNotLoaded("No model is loaded.", field="model")
        return SimpleNamespace(info=self._models[name or list(self._models)[-1]])

    def drafts(self, model=None):
        target = self.model(model).info
        return speculative.pairings(target, self._models.values(), lambda name: speculative.Difference(7, "a", "b"),
                                    {name: (9 * GB, 4 * GB) for name in ("giant",)})

    def tokenize(self, prompt, model=None):
        text = prompt if isinstance(prompt, str) else "\n".join(f"{m.role} {m.content}" for m in prompt)
        return tuple(range(len(text.split())))

    def submit(self, request, model=None, cancel=None) -> Iterator[Event]:
        name, prompt = self.model(model).info.name, len(self.tokenize(request.prompt))
        if prompt + (request.sampling.max_tokens or 0) > self.context:
            raise ContextTooLong("Prompt and answer do not fit the context.", prompt_tokens=prompt, context=self.context)
        self.requests.append((name, request))
        return self._stream(request, prompt, cancel or Cancel())

    def _stream(self, request, prompt, cancel):
        self._count(1)
        try:
            yield from self._said(request, prompt, cancel)
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._counted:
            self._running += change

    def _said(self, request, prompt, cancel):
        begun, finish, made = time.monotonic(), "stop", 0
        limit = min(self.tokens, request.sampling.max_tokens or self.tokens)
        yield Event(progress=Progress("prefill", prompt // 2, prompt))
        time.sleep(0.05)
        first = time.monotonic()
        while made < limit and not cancel.is_set():
            time.sleep(max(0.0, first + made / self.speed - time.monotonic()))
            count = min(limit - made, 3 if request.draft else 1)
            words = tuple(("" if n == 0 else " ") + WORDS[n % len(WORDS)] for n in range(made, made + count))
            drafted = tuple(n < count - 1 for n in range(count))
            yield Event(text="".join(words), ids=tuple(range(made, made + count)), drafted=drafted,
                        parts=words if any(drafted) else ())
            made, self.steps = made + count, self.steps + 1
        finish = "cancelled" if cancel.is_set() else "length" if made == request.sampling.max_tokens else "stop"
        yield Event(finish=finish)
        now = time.monotonic()
        yield Event(
            -1,
            usage=Usage(prompt, made, min(16, prompt - 1), speculation=self._told(request.draft)),
            timing=Timing(
                0.0,
                first - begun,
                0.05,
                now - first,
                now - begun,
                prompt / 0.05,
                (made - 1) / max(now - first, 1e-9) if made > 1 else None,
            ),
        )

    def _told(self, draft):
        """What was drafted, as a test wants it told."""
        if draft is None:
            return None
        told = Speculation(draft.name, draft.length, 0.75, 2.5, ((16, 14), (14, 10)), ((0, 2), (2, 14)), (("lookup 3-4", 32, 24),),
                           0.01, self.speedup)
        return told if self.speedup else replace(told, acceptance=None, lengths=((0, 30),), positions=(), sources=(), resting=True)

    # how things stand
    def mark(self):
        if self.meter.due():
            self.meter.heard({"models": {name: {"tokens": 3 * self.steps} for name in self._models}})
            self.meter.mark(self._running, 0, (12, 64), 420_000_000, 180_000_000)

    def snapshot(self):
        memory = SimpleNamespace(
            total=24 * GB, available=18 * GB, engine=420_000_000 if self._models else 0, front=180_000_000
        )
        status = "dead" if self.dead else "ready" if self._models else "idle"
        return SimpleNamespace(
            status=status,
            reason=self.dead,
            healthy=not self.dead,
            models=tuple(self._models.values()),
            loading=(),
            engine=status,
            running=self._running,
            waiting=0,
            queue_limit=256,
            memory=memory,
            step_age=None,
            uptime=1.0,
            counters={"models": {name: {"cache": {"pages_total": 64, "pages_used": 12, "pages_cached": 20, "pages_free": 32, "page_size": 16}}
                                 for name in self._models}},
            resting=self.resting,
            missing=(),
        )


def info(name: str, context: int) -> ModelInfo:
    return replace(
        ModelInfo(name, "gguf", "GGUF Q4_1"),
        architecture="llama",
        kernels="aten · 2 threads",
        bits=5.85,
        parameters=134_515_008,
        context=context,
        trained_context=8192,
        vocab_size=49152,
        chat_template=True,
        kv_type="float32",
        kv_bytes_per_token=46_080,
        streams=8,
        threads=2,
        weights_bytes=98_000_000,
        estimate=MemoryEstimate(110_000_000, 94_371_840, 60_000_000, 4 * GB, context, 8192),
        peak_bytes=255_000_000,
        load_seconds=1.2,
        capabilities=("batch", "prefix", "draft"),
        notes=("No C++ compiler was found: the aten kernels are used, which are slower.",),
    )
