"""Training a draft: AdamW over windows in a fixed order, checkpoints, and what share of its guesses the teacher would take.

Forward KL to the teacher at the places where the teacher spoke itself (Hinton et al. 2015; Zhou et al. 2024, "DistillSpec").
The order of windows depends on seed and step alone, so that a run that was stopped ends as one that was not. Knows a student
and its lessons; nothing of files or of how either was made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from backends.base import Cancel, Progress, ProgressFn
from backends.compress.corpus import Window
from backends.compress.lessons import Lessons
from backends.compress.student import Student, capped, divergence
from backends.compress.writer import Parts
from backends.errors import StepFailed

BETAS, DECAY, CLIP = (0.9, 0.95), 0.01, 1.0
WARM, FLOOR = 0.05, 0.05        # share of the way on which the rate rises; what is left of it at the end
LOOKS, LOOKED_AT = 8, 3         # how often acceptance is measured on the way, and on how many of the held-out windows
KEEP_SECONDS = 120.0            # between two checkpoints
ROWS = 256
# What a guess behind a guess weighs beside the first one, where the draft reads states: only the first has the teacher's state, all
# others the draft's own, which it has to learn to read as well. Half, since they are needed only where the first was right.
CHAINED, CHAINED_FROM = 0.5, 0.6        # the second: on which part of the way it begins; sooner, and both learn less in the time


@dataclass(frozen=True)
class Point:
    """One point of the loss curve. ``loss``: mean KL since the last point, nats; the others on held-out windows."""

    step: int
    tokens: int
    loss: float
    agreement: float
    overlap: float


@dataclass(frozen=True)
class Schedule:
    """``steps`` 0: until ``seconds`` of training are over."""

    steps: int
    seconds: float
    batch: int
    rate: float
    seed: int

    def progress(self, step: int, seconds: float) -> float:
        """0 … 1"""
        return min(1.0, step / self.steps if self.steps else seconds / max(self.seconds, 1e-9))

    def rate_at(self, progress: float) -> float:
        """Linear rise, then a cosine down to a floor."""
        if progress < WARM:
            return self.rate * max(progress / WARM, 0.01)
        along = (progress - WARM) / (1 - WARM)
        return self.rate * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * along)) / 2)


class Training:
    """From the last checkpoint to the end. ``head_ids``: what the draft may propose; None: everything."""

    def __init__(self, student: Student, lessons: Lessons, held_out: Lessons, head_ids: Sequence[int] | None,
                 schedule: Schedule, parts: Parts, progress: ProgressFn, cancel: Cancel) -> None:
        self.student, self.lessons, self.schedule = student, lessons, schedule
        self.parts, self.progress, self.cancel = parts, progress, cancel
        self.own, self.head = student.own_head(head_ids), student.head(head_ids)
        self.judge = Judge(student, held_out, head_ids, LOOKED_AT)
        self.optimizer = torch.optim.AdamW(student.trained.values(), lr=schedule.rate, betas=BETAS, weight_decay=DECAY)
        self.step, self.seconds, self.tokens, self.curve = 0, 0.0, 0, []
        self._sum, self._count = 0.0, 0

    def run(self) -> list[Point]:
        self._resume()
        if not self.curve:
            self._look(math.nan)
        saved = began = time.monotonic()
        before = self.seconds
        while (way := self.schedule.progress(self.step, self.seconds)) < 1:
            if self.cancel.is_set():
                self._save()
            self.cancel.raise_if_set("The job")
            self._step(way)
            self.seconds = before + time.monotonic() - began
            if self.schedule.progress(self.step, self.seconds) >= len(self.curve) / LOOKS:
                self._look(self._sum / max(self._count, 1))
            if time.monotonic() - saved > KEEP_SECONDS:
                self._save()
                saved = time.monotonic()
            self._report()
        self._save()
        return self.curve

    # ---- one step
    def _step(self, way: float) -> None:
        numbers = batch_at(len(self.lessons.windows), self.schedule.batch, self.step, self.schedule.seed)
        loss, shown = self.losses(numbers, way >= CHAINED_FROM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate_at(way)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.student.trained.values(), CLIP)
        if not torch.isfinite(norm):
            raise StepFailed("The training left the range of numbers.", step=self.step, rate=self.schedule.rate,
                             remedy="Choose a lower learning rate.")
        self.optimizer.step()
        self.step += 1
        self._sum, self._count = self._sum + float(shown.detach()), self._count + 1

    def losses(self, numbers: Sequence[int], late: bool) -> tuple[Tensor, Tensor]:
        """(what is made small, mean KL at the places). For a student that reads states, ``late``, the first also counts the KL of a
        pass on its own states, weighted by `CHAINED`; the second stays comparable all the way."""
        windows, before = [self.lessons.windows[number] for number in numbers], self.lessons.before(numbers)
        target = torch.cat([self.lessons.states(number) for number in numbers]).to(self.student.device)
        ids = torch.tensor([window.tokens for window in windows], device=self.student.device)
        hidden = self.student.hidden(ids, before)
        self.tokens += len(target)
        loss = self._distance(hidden, windows, target)
        if before is None or not late:
            return loss, loss
        return loss + CHAINED * self._distance(self.student.chained(ids, hidden), windows, target), loss

    def _distance(self, hidden: Tensor, windows: Sequence[Window], target: Tensor) -> Tensor:
        """hidden [B, T, H] against target [n, H], which has the places of all windows one after another."""
        rows = torch.cat([hidden[row, window.places] for row, window in enumerate(windows)])
        return divergence(rows, target, self.own, self.head, self.student.cap)

    # ---- looking and keeping
    def _look(self, loss: float) -> None:
        agreement, overlap = self.judge.acceptance()
        self.curve.append(Point(self.step, self.tokens, loss, agreement, overlap))
        self._sum, self._count = 0.0, 0

    def _report(self) -> None:
        last, way = self.curve[-1], self.schedule.progress(self.step, self.seconds)
        loss = self._sum / self._count if self._count else last.loss
        self.progress(Progress("train", round(way, 4), 1, f"loss {loss:.3f}, {100 * last.agreement:.1f} % of guesses right"))

    def _save(self) -> None:
        tensors = {f"value.{name}": value for name, value in self.student.values().items()}
        for name, parameter in self.student.trained.items():
            state = self.optimizer.state[parameter]
            tensors |= {f"{key}.{name}": state[key] for key in ("exp_avg", "exp_avg_sq", "step")}
        facts = {"step": self.step, "seconds": self.seconds, "tokens": self.tokens, "sum": self._sum, "count": self._count,
                 "curve": [asdict(point) for point in self.curve]}
        self.parts.save("training", tensors, facts)

    def _resume(self) -> None:
        if not self.parts.has("training"):
            return
        tensors, facts = self.parts.load("training")
        self.student.set({name: tensors[f"value.{name}"] for name in self.student.trained})
        for name, parameter in self.student.trained.items():
            self.optimizer.state[parameter] = {
                key: tensors[f"{key}.{name}"].to("cpu" if key == "step" else self.student.device)
                for key in ("exp_avg", "exp_avg_sq", "step")}
        self.step, self.seconds, self.tokens = facts["step"], facts["seconds"], facts["tokens"]
        self._sum, self._count = facts["sum"], facts["count"]
        self.curve = [Point(**point) for point in facts["curve"]]


def batch_at(count: int, batch: int, step: int, seed: int) -> list[int]:
    """The windows of one step: a new order every time all have been seen."""
    found: list[int] = []
    for place in range(step * batch, (step + 1) * batch):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + place // count))
        found.append(int(order[place % count]))
    return found


class Judge:
    """How often the teacher would take the draft's guess, on held-out windows and over the whole vocabulary."""

    def __init__(self, student: Student, lessons: Lessons, head_ids: Sequence[int] | None, most: int | None = None) -> None:
        """``most``: only that many windows are judged."""
        self.student, self.lessons, self.windows = student, lessons, lessons.windows[:most]
        self.whole, self.own = student.head(), student.own_head(head_ids)
        self.ids = None if head_ids is None else torch.tensor(head_ids, device=student.device)

    @torch.no_grad()
    def acceptance(self, report: Callable[[int], Any] = lambda number: None, chained: bool = False) -> tuple[float, float]:
        """(share of places where both find the same token most probable, mean of sum min(p, q)): what speculation takes at
        temperature 0, and the most that any rule can take at 1. ``chained``: of guesses behind a guess, for which a student that
        reads states has only its own."""
        same, shared, count = 0.0, 0.0, 0
        for number, window in enumerate(self.windows):
            hidden = self._hidden(number, chained)[0, window.places]
            target = self.lessons.states(number).to(self.student.device)
            for mine, theirs in zip(hidden.split(ROWS), target.split(ROWS)):
                p = capped((theirs.to(self.whole.dtype) @ self.whole.T).float(), self.student.cap).softmax(-1)
                q = self._draft(mine)
                same += float((p.argmax(-1) == q.argmax(-1)).sum())
                shared += float(torch.minimum(p, q).sum())
                count += len(p)
            report(number)
        return same / max(count, 1), shared / max(count, 1)

    def _hidden(self, number: int, chained: bool) -> Tensor:
        ids = torch.tensor([self.windows[number].tokens], device=self.student.device)
        found = self.student.hidden(ids, self.lessons.before([number]))
        return self.student.chained(ids, found) if chained else found

    def _draft(self, rows: Tensor) -> Tensor:
        """The draft's probabilities, 0 outside its ids."""
        found = capped((rows.to(self.own.dtype) @ self.own.T).float(), self.student.cap).softmax(-1)
        return found if self.ids is None else found.new_zeros(len(found), len(self.whole)).index_copy_(1, self.ids, found)
