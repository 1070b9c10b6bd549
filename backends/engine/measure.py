"""What verifying several tokens costs beside one, and what a draft costs, measured while nobody waits for an answer.

One pass at a time, so that a request that comes in meanwhile waits for one pass at most. Beside the first answers, which
measure what they happen to need, this fills the table and has the kernels set up for those numbers of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from backends.base import Decoder, Drafter, DraftJob, Sampling, Step
from backends.engine.costs import WARM, DraftCosts, PassCosts

BEFORE = 32                 # tokens of the throw-away text in front
FEW = (1, 2, 3, 4)          # rows that are set up beforehand: most drafts need no more
SET_UP, TURNS, ENOUGH = 2, 6, 3     # passes of a number of rows that set kernels up, that are measured, and that will do
LONGER = 3                  # ids of a longer draft
NOBODY = -1                 # the throw-away text's number among a drafter's sequences


def set_up(decoder: Decoder) -> Iterator[None]:
    """Passes of few rows, so that the target has set itself up for them before anybody waits: each step of the iterator is one."""
    text, reads = _words(len(FEW) + SET_UP, decoder.vocab.size), getattr(getattr(decoder, "arch", None), "reads_states", False)
    slot = decoder.open(text, reuse=False)
    try:
        for count in FEW:
            for turn in range(SET_UP):
                if not decoder.reserve(slot, count):
                    return
                step = Step(slot, text[turn:turn + count], 1)
                decoder.follow([step], torch.zeros(count, decoder.arch.hidden)) if reads else decoder.extend([step])
                decoder.truncate(slot, 0)
                yield
    finally:
        decoder.release(slot)


def measure(decoder: Decoder, costs: PassCosts, rows: tuple[int, ...], clock: Callable[[], float]) -> Iterator[None]:
    """Passes of a throw-away text, those of each number of rows and those of one in turns, again and again, so that all see the same
    machine: each step of the iterator is one. Gives its room back when it ends or is closed, and what it has measured counts if that
    were `ENOUGH` turns."""
    missing = [count for count in rows if costs.vague(count)]
    most = BEFORE + max(missing, default=1)
    if not missing or most > decoder.context:
        return
    text, fastest = _words(most, decoder.vocab.size), {count: [math.inf, math.inf] for count in missing}
    slot, turn = decoder.open(text, reuse=False), 0
    try:
        if not decoder.reserve(slot, most):
            return
        decoder.extend([Step(slot, text[:BEFORE], 0)])
        yield
        for turn in range(SET_UP + TURNS):
            for count in missing:
                for place, size in enumerate((1, count)):
                    decoder.reserve(slot, size)
                    began = clock()
                    decoder.extend([Step(slot, text[BEFORE - turn:BEFORE - turn + size], size)])
                    if turn >= SET_UP:
                        fastest[count][place] = min(fastest[count][place], clock() - began)
                    decoder.truncate(slot, BEFORE)
                    yield
    finally:
        decoder.release(slot)
        for count, (one, many) in fastest.items():
            if turn >= SET_UP + ENOUGH and count > 1 and costs.seen(1):
                costs.learn(count, costs.expected(1) * many / one)


def measure_draft(decoder: Decoder, drafter: Drafter, costs: DraftCosts, clock: Callable[[], float]) -> Iterator[None]:
    """Drafts of one id for a text that grows by one or two tokens, as after a wrong and after a right one, then some of `LONGER`,
    since further ids cost less than the first: each step of the iterator is one. Before each goes a pass of ``decoder``, the target,
    as there always does: it leaves nothing of the draft in the processor's caches."""
    text, size = _words(BEFORE + 5 * WARM + 2, decoder.vocab.size), BEFORE
    slot = decoder.open(text[:1], reuse=False)
    try:
        for most, grows in ((1, 1), (1, 2)) * (WARM + 1) + ((LONGER, 1),) * WARM:
            if decoder.reserve(slot, 1):
                decoder.extend([Step(slot, text[:1], 1)])
                decoder.truncate(slot, 0)
            began = clock()
            ids = sum(map(len, drafter.propose([DraftJob(text[:size], most, Sampling(), 0, NOBODY)])))
            if ids:
                costs.saw(clock() - began, ids, BEFORE if size == BEFORE else 0)
            yield
            size += grows
    finally:
        decoder.release(slot)
        drafter.forget(NOBODY)


def _words(count: int, vocabulary: int) -> list[int]:
    """Ids of which nothing comes twice, so that nothing can be looked up."""
    return [(7919 * place + 11) % vocabulary for place in range(count)]
