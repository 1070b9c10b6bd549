"""The lessons of a draft on disk: passages that the teacher has said, and its last hidden state at every place to be learned.

A passage is said once and read once by the teacher; training then asks for windows in any order. Everything is a part of the
job's folder, so that a stopped job goes on behind the last one. Knows tokens and hidden states; nothing of the student.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from backends.base import Cancel
from backends.compress.corpus import Passage, Window
from backends.compress.writer import Parts
from backends.errors import OutOfMemory

BATCH = 256             # passages in a part
CHUNK = 256             # rows that the teacher reads at once
WINDOWS = 64            # windows whose states are one part


def save_passages(parts: Parts, name: str, passages: Sequence[Passage], seconds: float) -> None:
    tokens = [token for passage in passages for token in passage.tokens]
    parts.save(name, {"tokens": torch.tensor(tokens, dtype=torch.int32),
                      "lengths": torch.tensor([len(passage.tokens) for passage in passages], dtype=torch.int32),
                      "begins": torch.tensor([passage.begin for passage in passages], dtype=torch.int32)},
               {"seconds": seconds})


def load_passages(parts: Parts, name: str) -> list[Passage]:
    tensors, _ = parts.load(name)
    pieces = torch.split(tensors["tokens"], tensors["lengths"].tolist())
    return [Passage(tuple(piece.tolist()), begin) for piece, begin in zip(pieces, tensors["begins"].tolist())]


class Lessons:
    """Windows, and for each the teacher's last hidden states (as its head reads them) at `Window.places`: bfloat16 [n, H].

    ``part``: what its parts are called. `read` fills what is missing; `states` can be asked afterwards."""

    def __init__(self, parts: Parts, part: str, windows: Sequence[Window]) -> None:
        self.parts, self.part, self.windows = parts, part, [window for window in windows if window.places]
        self._files: dict[int, Any] = {}

    def read(self, teacher: Any, report: Callable[[int, int], None], cancel: Cancel, seconds: float = math.inf) -> None:
        """``teacher``: a decoder that gives hidden states. What is not begun after ``seconds`` of reading is left unread, and is
        no lesson then."""
        spent, whole = 0.0, len(self.windows)
        for start in range(0, whole, WINDOWS):
            name = self._name(start)
            if not self.parts.has(name):
                if spent > seconds:
                    self.windows = self.windows[:start]
                    break
                began, found = time.monotonic(), {}
                for number in range(start, min(start + WINDOWS, whole)):
                    cancel.raise_if_set("The job")
                    found[f"window.{number}"] = _hidden(teacher, self.windows[number])
                    report(number, whole)
                self.parts.save(name, found, {"seconds": time.monotonic() - began})
            spent += self.parts.facts(name)["seconds"]
        report(len(self.windows), whole)

    def states(self, number: int) -> Tensor:
        start = number // WINDOWS * WINDOWS
        if start not in self._files:
            self._files[start] = safe_open(str(self.parts.path(self._name(start))), framework="pt")
        return self._files[start].get_tensor(f"window.{number}")

    def _name(self, start: int) -> str:
        return f"{self.part}-{start // WINDOWS:05d}"


def _hidden(teacher: Any, window: Window) -> Tensor:
    """What the teacher's head reads at the window's places."""
    slot, found = teacher.open(window.tokens, reuse=False), []
    try:
        if not teacher.reserve(slot, len(window.tokens)):
            raise OutOfMemory("The teacher has no room for a window.", tokens=len(window.tokens))
        for at in range(0, len(window.tokens), CHUNK):
            found.append(teacher.states(slot, window.tokens[at:at + CHUNK]))
    finally:
        teacher.release(slot)
    return torch.cat(found)[window.places].to(torch.bfloat16).cpu()
