"""Gumbel noise that belongs to a place: a pure function of (seed, position, token id), for the ids that ask for it.

A counter-based generator (the finalizer of SplitMix64 over key + id · golden ratio), so that batching, chunking, preemption
and drafting cannot move a sample, and the noise of ten survivors costs ten hashes, not a vocabulary's. 32 bits of it are
used: the noise lies between LOWEST and HIGHEST, and a token 23 nats behind cannot win. Knows nothing of logits.
"""

from __future__ import annotations

import hashlib
import math
import secrets

import numpy as np

MASK = 2**64 - 1
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
TOP = np.uint64(32)
SCALE = 2.0**-32
HIGHEST = -math.log(-math.log1p(-SCALE / 2))      # 22.87…
LOWEST = -math.log(-math.log(SCALE / 2))          # -3.13…


def fresh_seed() -> int:
    """A seed nobody chose, from the system's entropy. 53 bits, so that JSON and JavaScript carry it unharmed."""
    return secrets.randbits(53)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice ``choice`` of n; the first has the request's own, so that n changes nothing for it."""
    return seed & MASK if choice == 0 else _digest(b"choice", seed, choice)


def key(seed: int, position: int) -> np.uint64:
    """The place's 64-bit key."""
    return np.uint64(_digest(b"place", seed, position))


def _digest(what: bytes, seed: int, number: int) -> int:
    data = what + (seed & MASK).to_bytes(8, "little") + number.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def bits(place: np.uint64, ids: np.ndarray) -> np.ndarray:
    """32 random bits for each id, as uint64 [n]."""
    x = ids.astype(np.uint64)
    shifted = np.empty_like(x)                    # in place throughout: for a whole vocabulary memory is what costs
    x += np.uint64(1)
    x *= GOLDEN
    x += place
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS):
        np.right_shift(x, shift, out=shifted)
        x ^= shifted
        x *= multiplier
    np.right_shift(x, SHIFTS[2], out=shifted)
    x ^= shifted
    x >>= TOP
    return x


def gumbel(random: np.ndarray) -> np.ndarray:
    """Standard Gumbel values, float64 [n], of `bits`."""
    uniform = random.astype(np.float64)
    uniform += 0.5
    uniform *= SCALE
    return -np.log(-np.log(uniform))


def bits_above(level: float) -> int:
    """The smallest `bits` whose Gumbel value may exceed ``level``: a test on integers that spares two logarithms an id."""
    return max(0, math.floor(math.exp(-math.exp(-level)) / SCALE) - 1) if level > -20 else 0
