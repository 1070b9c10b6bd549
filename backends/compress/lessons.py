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
from backends.compress.join import shifted
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

    ``part``: what its parts are called. ``everywhere``: the states of all places are kept, for a student that reads them.
    `read` fills what is missing; the others can be asked afterwards."""

    def __init__(self, parts: Parts, part: str, windows: Sequence[Window], everywhere: bool = False) -> None:
        self.parts, self.part, self.windows = parts, part, [window for window in windows if window.places]
        self.everywhere = everywhere
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
                    hidden = _hidden(teacher, self.windows[number])
                    found[f"window.{number}"] = hidden if self.everywhere else hidden[self.windows[number].places]
                    report(number, whole)
                self.parts.save(name, found, {"seconds": time.monotonic() - began})
            spent += self.parts.facts(name)["seconds"]
        report(len(self.windows), whole)

    def states(self, number: int) -> Tensor:
        """bfloat16 [n, H], at the window's places."""
        found = self._kept(number)
        return found[self.windows[number].places] if self.everywhere else found

    def rows(self, number: int) -> Tensor:
        """bfloat16 [T, H], at every place of the window; only where they are kept."""
        if not self.everywhere:
            raise RuntimeError(f"lessons {self.part!r} keep only the states that are learned")
        return self._kept(number)

    def before(self, numbers: Sequence[int]) -> Tensor | None:
        """What a student that reads states is given beside the tokens of these windows: float32 [B, T, H], at every place the
        state of the one before it. None where only tokens are read."""
        return shifted(torch.stack([self.rows(number) for number in numbers]).float()) if self.everywhere else None

    def _kept(self, number: int) -> Tensor:
        start = number // WINDOWS * WINDOWS
        if start not in self._files:
            self._files[start] = safe_open(str(self.parts.path(self._name(start))), framework="pt")
        return self._files[start].get_tensor(f"window.{number}")

    def _name(self, start: int) -> str:
        return f"{self.part}-{start // WINDOWS:05d}"


def _hidden(teacher: Any, window: Window) -> Tensor:
    """What the teacher's head reads, bfloat16 [T, H]."""
    slot, found = teacher.open(window.tokens, reuse=False), []
    try:
        if not teacher.reserve(slot, len(window.tokens)):
            raise OutOfMemory("The teacher has no room for a window.", tokens=len(window.tokens))
        for at in range(0, len(window.tokens), CHUNK):
            found.append(teacher.states(slot, window.tokens[at:at + CHUNK]))
    finally:
        teacher.release(slot)
    return torch.cat(found).to(torch.bfloat16).cpu()
