"""Embeddings: the mean of a model's last hidden states over a prompt, computed between the steps of running answers.

Knows a decoder's slots and hidden states, chunk by chunk, so that no answer waits for a long text. Refuses to know how prompts
became tokens and what a caller does with vectors.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from backends.base import Cancel, Cancelled, Embeddings, GainzError, OutOfMemory
from backends.engine.process import typed


@dataclass(eq=False)
class EmbedJob:
    """``prompts``: token ids, none empty. `result` waits."""

    prompts: list[list[int]]
    cancel: Cancel
    vectors: list[tuple[float, ...]] = field(default_factory=list)
    error: GainzError | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def result(self) -> Embeddings:
        self.ended.wait()
        if self.error is not None:
            raise self.error
        return Embeddings(tuple(self.vectors), tuple(len(prompt) for prompt in self.prompts))

    def end(self, error: GainzError | None = None) -> None:
        self.error = error
        self.ended.set()


class EmbedQueue:
    """One decoder's jobs, first come first served. Stepped by the loop; `add` from any thread."""

    def __init__(self, decoder: Any) -> None:
        """``decoder``: with `states`, beside what `Decoder` has."""
        self._decoder = decoder
        self.jobs: deque[EmbedJob] = deque()
        self._slot: Any = None
        self._sum: Tensor | None = None

    def add(self, job: EmbedJob) -> None:
        self.jobs.append(job)

    def step(self, budget: int, alone: bool) -> bool:
        """Compute at most ``budget`` tokens of the first job. ``alone``: nobody else could give pages back. True: it worked."""
        if not self.jobs:
            return False
        job = self.jobs[0]
        try:
            if job.cancel.is_set():
                raise Cancelled("The embedding was cancelled.")
            return self._advance(job, job.prompts[len(job.vectors)], budget, alone)
        except Exception as error:  # noqa: BLE001  a kernel may raise anything: this job ends, typed, and the loop goes on
            self._end(typed(error, "embedding a text"))
            return True

    def _advance(self, job: EmbedJob, prompt: Sequence[int], budget: int, alone: bool) -> bool:
        if self._slot is None:
            self._slot = self._decoder.open(prompt, reuse=False)
        part = prompt[self._slot.length:self._slot.length + budget]
        if not self._decoder.reserve(self._slot, len(part)):
            if alone:
                raise OutOfMemory("There are no pages left for this text.", tokens=len(prompt))
            return False
        found = self._decoder.states(self._slot, part).sum(0, dtype=torch.float64)
        self._sum = found if self._sum is None else self._sum + found
        if self._slot.length == len(prompt):
            job.vectors.append(tuple((self._sum / len(prompt)).tolist()))
            self._let_go()
            if len(job.vectors) == len(job.prompts):
                self._end()
        return True

    def _let_go(self) -> None:
        if self._slot is not None:
            self._decoder.release(self._slot)
        self._slot = self._sum = None

    def _end(self, error: GainzError | None = None) -> None:
        self._let_go()
        self.jobs.popleft().end(error)

    def close(self, error: GainzError) -> None:
        """End all jobs with ``error``."""
        while self.jobs:
            self._end(error)
