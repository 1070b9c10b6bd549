"""A backend of a few lines: a folder with toy.json. It loads as slowly as its options say, and dies on request."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field

from backends.base import (
    Backend, Claim, LocalOptions, MissingRequirement, ModelDir, ModelInfo, OutOfMemory, Progress)


@dataclass(frozen=True)
class ToyOptions(LocalOptions):
    load_ms: int = field(default=0, metadata={"label": "Load time", "low": 0, "high": 60_000})
    megabytes: int = field(default=0, metadata={"label": "Memory", "low": 0, "high": 4096})
    fault: str = field(default="", metadata={"label": "Fault", "choices": ("", "die", "die-once", "raise", "memory", "option")})


class ToyModel:
    def __init__(self, model: ModelDir, options: ToyOptions) -> None:
        self.info = ModelInfo(model.name, "toy", "toy", context=1000, dtype="bytes")
        self.weights = b"x" * (options.megabytes << 20)

    def tokenize(self, prompt, *, special=True):
        return tuple(prompt.encode())

    def detokenize(self, ids):
        return bytes(ids).decode()

    def close(self):
        self.weights = b""


def claims(model: ModelDir) -> Claim | None:
    return Claim(10, "it has a toy.json", "toy") if "toy.json" in model.files else None


def load(model: ModelDir, options: ToyOptions, progress, cancel) -> ToyModel:
    for done in range(options.load_ms // 5):
        progress(Progress("read", done, options.load_ms // 5))
        cancel.raise_if_set(f"Loading {model.name}")
        time.sleep(0.005)
    once = model.path / "died"
    if options.fault == "die" or options.fault == "die-once" and not once.exists():
        once.write_text("yes")
        os.kill(os.getpid(), signal.SIGKILL)
    if options.fault == "raise":
        raise KeyError("no such key")
    if options.fault == "memory":
        raise OutOfMemory("Not enough.", needed=2, free=1)
    return ToyModel(model, options)


def check(model: ModelDir, options: ToyOptions) -> None:
    if options.fault == "option":
        raise MissingRequirement("This machine has no such device.", device="toy")


BACKEND = Backend("toy", "Toy", (), ToyOptions, claims, load, check=check)
