"""Logits to a token id. Pure: the same logits, history, seed and position give the same id, whatever else runs.

Order: logit bias, penalties, bans and the mask of a grammar, temperature, top-k, top-p on the mass that top-k left, min-p;
then the survivor with the largest ``logit / temperature + Gumbel noise`` of its place (`noise.py`), which is a draw from their
softmax. Rules:

* temperature 0, top_k 1 and top_p 0 are the most probable token; of equals the lowest id.
* top-k keeps exactly k (of equals the lowest ids); more than the vocabulary, 0 and -1 keep all.
* top-p keeps the fewest tokens whose mass reaches p, min-p those with p times the best one's; within 1e-6 counts as reached.
  The first always stays.
* repetition_penalty counts prompt and answer; frequency and presence penalties count the answer alone.
* log-probabilities are of the model's own distribution, before all of the above.

NumPy on the host: for one row of a vocabulary it is several times faster than torch. Does not know sequences or text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from backends.base import Sampling
from backends.engine import noise
from backends.errors import StepFailed

SLACK = 1e-6
COLDEST = 1e-6               # a temperature below is greedy: logits over it would leave the range of float32
NEAR = 6.0                   # nats below the best within which nearly all of the mass is
BANDS = (4.0, 7.0, 10.0, 15.0, 25.0)     # nats below the best where the leading tokens are looked for first


# ------------------------------------------------------------------------------------------- history
@dataclass
class History:
    """What the penalties of one sequence count; kept only as far as they are on."""

    sampling: Sampling
    seen: dict[int, None] = field(default_factory=dict)      # prompt and answer, each once
    counts: dict[int, int] = field(default_factory=dict)     # answer

    @staticmethod
    def of(sampling: Sampling, prompt: Sequence[int]) -> History | None:
        """None where no penalty is on."""
        if sampling.repetition_penalty == 1 and not sampling.frequency_penalty and not sampling.presence_penalty:
            return None
        return History(sampling, dict.fromkeys(prompt) if sampling.repetition_penalty != 1 else {})

    def add(self, token: int) -> None:
        if self.sampling.repetition_penalty != 1:
            self.seen[token] = None
        if self.sampling.frequency_penalty or self.sampling.presence_penalty:
            self.counts[token] = self.counts.get(token, 0) + 1

    def apply(self, logits: np.ndarray) -> None:
        """Penalise in place."""
        if self.seen:
            ids, by = np.fromiter(self.seen, np.int64, len(self.seen)), self.sampling.repetition_penalty
            some = logits[ids]
            logits[ids] = np.where(some > 0, some / by, some * by)
        if self.counts:
            ids = np.fromiter(self.counts, np.int64, len(self.counts))
            often = np.fromiter(self.counts.values(), np.float32, len(self.counts))
            logits[ids] -= self.sampling.frequency_penalty * often + np.float32(self.sampling.presence_penalty)


# ------------------------------------------------------------------------------------------- looking through a vocabulary
class Scan(Protocol):
    def above(self, logits: np.ndarray, level: float) -> np.ndarray:
        """Ids, rising, of the logits (float32 [vocabulary]) that reach ``level``, rounded to float32. int64."""

    def lucky(self, logits: np.ndarray, level: float, place: np.uint64, bound: int) -> tuple[np.ndarray, np.ndarray]:
        """Of those the ids whose `noise.bits` of ``place`` are at least ``bound``, and these bits as uint64."""


class PlainScan:
    def above(self, logits: np.ndarray, level: float) -> np.ndarray:
        return np.flatnonzero(logits >= np.float32(level))

    def lucky(self, logits: np.ndarray, level: float, place: np.uint64, bound: int) -> tuple[np.ndarray, np.ndarray]:
        ids = self.above(logits, level)
        random = noise.bits(place, ids)
        keep = random >= np.uint64(bound)
        return ids[keep], random[keep]


PLAIN = PlainScan()


class NamedScan(PlainScan):
    """Where a head has the rows of some ids only: columns are found, and the noise is that of the ids they stand for."""

    def __init__(self, names: np.ndarray) -> None:
        self._names = names

    def lucky(self, logits: np.ndarray, level: float, place: np.uint64, bound: int) -> tuple[np.ndarray, np.ndarray]:
        columns = self.above(logits, level)
        random = noise.bits(place, self._names[columns])
        keep = random >= np.uint64(bound)
        return columns[keep], random[keep]


# ------------------------------------------------------------------------------------------- choosing
def rows(logits: Tensor) -> np.ndarray:
    """float32 [rows, vocabulary] on the host; no copy where the logits are there already."""
    return logits.numpy() if logits.device.type == "cpu" else logits.cpu().numpy()


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < COLDEST or sampling.top_k == 1 or sampling.top_p == 0


def is_plain(sampling: Sampling, history: History | None, banned: Sequence[int]) -> bool:
    """Whether the token is simply the largest logit."""
    return is_greedy(sampling) and history is None and not banned and not sampling.logit_bias


def choose(logits: np.ndarray, sampling: Sampling, seed: int, position: int, history: History | None = None,
           banned: Sequence[int] = (), allowed: np.ndarray | None = None, scan: Scan | None = None,
           names: np.ndarray | None = None) -> int:
    """The token at ``position``. ``logits``: float32 [vocabulary], left unchanged; ``banned`` ids cannot be chosen, nor any
    outside ``allowed`` (bool [vocabulary]). ``scan`` looks through a vocabulary, in some faster way that finds the same.
    ``names``: rising ids [columns], where the logits are of these alone; bias, bans and the like then count columns.

    Raises StepFailed when the logits are no numbers, or when nothing may be chosen.
    """
    if sampling.logit_bias or history is not None or len(banned) or allowed is not None:
        logits = _adjusted(logits, sampling, history, banned, allowed)
    best = int(logits.argmax())
    top = float(logits[best])
    if not np.isfinite(top):
        raise StepFailed("The model's output is not a number.", logit=top, position=position)
    if is_greedy(sampling):
        return best if names is None else int(names[best])
    token = _draw(logits, top, sampling, noise.key(seed, position), (scan or PLAIN) if names is None else NamedScan(names), names)
    return token if names is None else int(names[token])


def _draw(logits: np.ndarray, top: float, sampling: Sampling, place: np.uint64, scan: Scan, names: np.ndarray | None) -> int:
    if not 0 < sampling.top_k < len(logits) and sampling.top_p >= 1 and sampling.min_p == 0:
        return _draw_from_all(logits, top, sampling.temperature, place, scan, names)
    ids, values = _survivors(logits, top, sampling, scan)
    return int(ids[_scores(values, top, sampling.temperature, _bits(place, ids, names)).argmax()])


def _bits(place: np.uint64, columns: np.ndarray, names: np.ndarray | None) -> np.ndarray:
    return noise.bits(place, columns if names is None else names[columns])


def _adjusted(logits: np.ndarray, sampling: Sampling, history: History | None, banned: Sequence[int],
              allowed: np.ndarray | None) -> np.ndarray:
    logits = logits.copy()
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if history is not None:
        history.apply(logits)
    if len(banned):
        logits[list(banned)] = -np.inf
    if allowed is not None:
        logits[~allowed] = -np.inf
    return logits


def _scores(values: np.ndarray, top: float, temperature: float, random: np.ndarray) -> np.ndarray:
    return (values.astype(np.float64) - top) / temperature + noise.gumbel(random)


def _draw_from_all(logits: np.ndarray, top: float, temperature: float, place: np.uint64, scan: Scan,
                   names: np.ndarray | None) -> int:
    """Gumbel-max over the whole vocabulary, looking closely only at tokens that can still win.

    The leading ones are scored first. Any other would need noise above what separates it from their winner: out of reach
    for most (the noise has an upper end), and for the rest a comparison of integers.
    """
    near = scan.above(logits, top - BANDS[0] * temperature)
    scores = _scores(logits[near], top, temperature, _bits(place, near, names))
    winner = scores.argmax()
    token, score = int(near[winner]), float(scores[winner])
    far, random = scan.lucky(logits, top + (score - noise.HIGHEST) * temperature, place, noise.bits_above(score + BANDS[0]))
    if not len(far):                                          # the near ones may be there too: they change nothing
        return token
    scores = _scores(logits[far], top, temperature, random)
    winner = scores.argmax()
    return int(far[winner]) if scores[winner] > score else token


def _leading(logits: np.ndarray, top: float, temperature: float, enough: Callable[[np.ndarray], bool],
             scan: Scan) -> np.ndarray:
    """Ids of all tokens within some distance of the best, in order of id, such that ``enough(values)``; else all."""
    for band in BANDS:
        ids = scan.above(logits, top - band * temperature)
        if enough(logits[ids]):
            return ids
    return np.flatnonzero(logits > -np.inf)


def _ranked(ids: np.ndarray, values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``count`` largest, best first, of equals the lowest id: one sort of integers, value above id."""
    pattern = (values + np.float32(0)).view(np.uint32)        # -0.0 becomes 0.0
    falling = np.where(pattern >> np.uint32(31), pattern, pattern ^ np.uint32(0x7FFFFFFF))
    order = falling.astype(np.uint64) << np.uint64(32) | np.arange(len(ids), dtype=np.uint64)
    if count < len(ids):
        order = np.partition(order, count)[:count]
    place = (np.sort(order) & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return ids[place], values[place]


def _survivors(logits: np.ndarray, top: float, sampling: Sampling, scan: Scan) -> tuple[np.ndarray, np.ndarray]:
    """Ids and logits that top-k, top-p and min-p leave, the most probable first."""
    temperature, k, p = sampling.temperature, sampling.top_k, sampling.top_p
    by_count = 0 < k < len(logits)
    total = None
    if by_count:
        ids = _leading(logits, top, temperature, lambda values: len(values) >= k, scan)
    elif p < 1:
        total = float(_mass(logits, top, temperature).sum(dtype=np.float64))
        part = p * total
        ids = _leading(logits, top, temperature,
                       lambda values: _mass(values, top, temperature).sum(dtype=np.float64) >= part, scan)
    else:
        ids = scan.above(logits, top + temperature * math.log(sampling.min_p) - 1e-4)         # a little more; sieved below
    values = logits[ids]
    ids, values = _ranked(ids, values, k if by_count else len(ids))
    if p < 1:
        mass = _mass(values.astype(np.float64), top, temperature)
        reached = mass.cumsum() / (mass.sum() if total is None else total) >= p - SLACK
        keep = int(reached.argmax()) + 1 if reached.any() else len(ids)
        ids, values = ids[:keep], values[:keep]
    if sampling.min_p > 0:
        keep = max(1, int(np.count_nonzero(_mass(values, top, temperature) >= sampling.min_p * (1 - SLACK))))
        ids, values = ids[:keep], values[:keep]
    return ids, values


def _mass(values: np.ndarray, top: float, temperature: float) -> np.ndarray:
    """Probability relative to the best token's."""
    return np.exp((values - values.dtype.type(top)) * values.dtype.type(1 / temperature))


def probability(logits: np.ndarray, column: int, sampling: Sampling, scan: Scan | None = None) -> float:
    """Of the token in ``column``, at the temperature of ``sampling`` (greedy: at 1), before its filters; good to a few parts in a
    hundred, since only what is within `NEAR` of the best token is added up."""
    temperature = 1.0 if is_greedy(sampling) else sampling.temperature
    top = float(logits.max())
    near = logits[(scan or PLAIN).above(logits, top - NEAR * temperature)]
    return float(_mass(logits[column:column + 1], top, temperature)[0] / max(1.0, float(_mass(near, top, temperature).sum())))


# ------------------------------------------------------------------------------------------- log-probabilities
def logprobs(logits: np.ndarray, token: int, best: int) -> tuple[float, list[tuple[int, float]]]:
    """Natural-log probability of ``token`` and the ``best`` most probable (id, logprob), before all filters."""
    top = float(logits.max())
    if not np.isfinite(top):
        raise StepFailed("The model's output is not a number.", logit=top)
    total = top + float(np.log(_mass(logits, top, 1.0).sum(dtype=np.float64)))
    leaders: list[tuple[int, float]] = []
    if best:
        ids = _leading(logits, top, 1.0, lambda values: len(values) >= best, PLAIN)
        ids, values = _ranked(ids, logits[ids], best)
        leaders = [(id, value - total) for id, value in zip(ids.tolist(), values.tolist())]
    return float(logits[token]) - total, leaders
