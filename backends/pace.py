"""How fast a decoder makes one token after another, alone: blocks of single steps, with the spread between them.

The steps of two models take turns block by block, so that a machine which is busy for a while slows both. Knows decoders;
sampling, detokenizing and the page are not in the figure.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from backends.base import Cancel, Decoder, Progress, ProgressFn, Step, StepFailed

BLOCKS, STEPS, WARM = 6, 24, 8
T95 = 2.570582                          # Student's t for six blocks


@dataclass(frozen=True)
class Pace:
    """Tokens a second of one stream, its 95 % interval over ``blocks`` of ``steps`` tokens, after ``prompt`` tokens."""

    speed: float
    low: float
    high: float
    blocks: int
    steps: int
    prompt: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def race(decoders: Sequence[Decoder], tokens: Sequence[int], progress: ProgressFn = lambda _: None,
         cancel: Cancel | None = None) -> list[Pace]:
    """Each decoder continues ``tokens`` greedily; blocks in turn."""
    runners = [_Runner(decoder, tokens) for decoder in decoders]
    try:
        for number in range(BLOCKS):
            progress(Progress("pace", number, BLOCKS))
            for runner in runners:
                if cancel is not None:
                    cancel.raise_if_set("The measurement")
                runner.block()
        return [runner.pace(len(tokens)) for runner in runners]
    finally:
        for runner in runners:
            runner.decoder.release(runner.slot)


class _Runner:
    def __init__(self, decoder: Decoder, tokens: Sequence[int]) -> None:
        self.decoder, self.speeds = decoder, []
        self.slot = decoder.open(tokens, reuse=False)
        need = len(tokens) + WARM + BLOCKS * STEPS
        if need > decoder.context or not decoder.reserve(self.slot, need):
            decoder.release(self.slot)
            raise StepFailed("There is no room in the cache to measure the speed.", tokens=need, context=decoder.context)
        self.next = self._step(tokens)
        for _ in range(WARM):
            self.next = self._step([self.next])

    def _step(self, tokens: Sequence[int]) -> int:
        return int(self.decoder.extend([Step(self.slot, tokens, 1)])[0][-1].argmax())

    def block(self) -> None:
        began = time.perf_counter()
        for _ in range(STEPS):
            self.next = self._step([self.next])
        self.speeds.append(STEPS / (time.perf_counter() - began))

    def pace(self, prompt: int) -> Pace:
        mean = statistics.fmean(self.speeds)
        spread = T95 * statistics.stdev(self.speeds) / math.sqrt(BLOCKS)
        return Pace(mean, max(mean - spread, 0.0), mean + spread, BLOCKS, STEPS, prompt)
