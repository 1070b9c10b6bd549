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
SET_UP, TURNS = 2, 6        # passes of a number of rows that set kernels up, and that are measured
TOGETHER = 3                # numbers of rows that are measured in turns: few, since whoever comes ends it
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
    """Passes of a throw-away text, those of some numbers of rows and those of one in turns, again and again, so that all see the same
    machine: each step of the iterator is one. Gives its room back when it ends or is closed."""
    missing = [count for count in rows if count > 1 and costs.vague(count)]
    if not missing or BEFORE + max(missing) > decoder.context or not costs.seen(1):
        return
    text = _words(BEFORE + max(missing), decoder.vocab.size)
    slot = decoder.open(text, reuse=False)
    try:
        if not decoder.reserve(slot, len(text)):
            return
        decoder.extend([Step(slot, text[:BEFORE], 0)])
        yield
        for at in range(0, len(missing), TOGETHER):
            fastest = {count: [math.inf, math.inf] for count in missing[at:at + TOGETHER]}
            for turn in range(SET_UP + TURNS):
                for count, best in fastest.items():
                    for place, size in enumerate((1, count)):
                        decoder.reserve(slot, size)
                        began = clock()
                        decoder.extend([Step(slot, text[BEFORE - turn:BEFORE - turn + size], size)])
                        if turn >= SET_UP:
                            best[place] = min(best[place], clock() - began)
                        decoder.truncate(slot, BEFORE)
                        yield
            plain = costs.expected(1)
            for count, (one, many) in fastest.items():
                costs.learn(count, plain * max(1.0, many / one))
    finally:
        decoder.release(slot)


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
