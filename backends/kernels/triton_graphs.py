"""Passes of few rows recorded once and replayed: at one row the host takes longer to launch a pass than the device to run it.

A recording belongs to a *bucket*: rows, sequences and width of the page table rounded up to powers of two. A pass is copied
into the bucket's buffers; rows and sequences that are not there are padding that no sequence owns, whose keys go nowhere. A
bucket is recorded when it is met for the second time, and trusted after it has given the ordinary pass's bits `CHECKS` times;
one that does not, or that cannot be recorded, keeps the ordinary way for good, and says so.

Knows batches and a recorder; what a stream or a graph is, only `CudaRecorder` knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from backends.kernels import Batch, KVLayer

log = logging.getLogger(__name__)
CHECKS = 2                  # batches on which a recording is compared with the ordinary pass
LEAST_PAGES = 8
MOST_BUCKETS = 64           # recorded for one decoder: each keeps a few hundred launches in the device's memory
Forward = Callable[[Batch, Sequence[KVLayer]], Tensor]


@dataclass(frozen=True)
class Recorded:
    """``replay`` computes anew, from what the buffers then hold, what is read in ``result``."""

    result: Tensor
    replay: Callable[[], None]


class Recorder(Protocol):
    def record(self, work: Callable[[], Tensor]) -> Recorded:
        """Raises RuntimeError where the work cannot be recorded."""


class CudaRecorder:
    """CUDA graphs that share one memory pool: a result holds until the next replay of any of them."""

    def __init__(self) -> None:
        self._pool = None

    def record(self, work: Callable[[], Tensor]) -> Recorded:
        aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):                      # compiles and allocates what may not be done while recording
            work()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        self._pool = self._pool or graph.pool()
        return Recorded(result, graph.replay)


@dataclass(frozen=True)
class Bucket:
    rows: int
    sequences: int
    pages: int

    @staticmethod
    def of(batch: Batch) -> Bucket:
        up = lambda n: 1 << max(0, n - 1).bit_length()  # noqa: E731
        return Bucket(up(batch.ids.shape[0]), up(batch.lengths.shape[0]), max(LEAST_PAGES, up(batch.pages.shape[1])))


class Buffers:
    """A batch of a bucket's shape that passes are copied into. What lies beyond a pass is stale but harmless, save for
    ``slots`` and ``starts``, which say that nobody owns it."""

    def __init__(self, bucket: Bucket, like: Batch) -> None:
        new = lambda name, *shape: torch.zeros(shape, dtype=getattr(like, name).dtype, device=like.ids.device)  # noqa: E731
        rows, sequences = bucket.rows, bucket.sequences
        tables, _, half = like.cos.shape
        self.batch = Batch(new("ids", rows), new("positions", rows), new("starts", sequences + 1), new("lengths", sequences),
                           new("pages", sequences, bucket.pages), new("slots", rows), new("wanted", 0),
                           new("cos", tables, rows, half), new("sin", tables, rows, half),
                           None if like.states is None else new("states", rows, like.states.shape[1]))
        self._shape = (0, 0)

    def fill(self, batch: Batch) -> None:
        rows, sequences = batch.ids.shape[0], batch.lengths.shape[0]
        own = self.batch
        if self._shape != (rows, sequences):
            own.slots[rows:], own.starts[sequences + 1:] = -1, rows
            self._shape = (rows, sequences)
        own.ids[:rows], own.positions[:rows], own.slots[:rows] = batch.ids, batch.positions, batch.slots
        own.starts[:sequences + 1], own.lengths[:sequences] = batch.starts, batch.lengths
        own.pages[:sequences, :batch.pages.shape[1]] = batch.pages
        if batch.states is not None:
            own.states[:rows] = batch.states
        if batch.cos.numel():
            own.cos[:, :rows], own.sin[:, :rows] = batch.cos, batch.sin


@dataclass(eq=False)
class Recording:
    buffers: Buffers
    recorded: Recorded
    checks: int = CHECKS


class Graphs:
    """Passes of one decoder. One caller at a time, as for the ops themselves. ``note``: told what could not be recorded."""

    def __init__(self, recorder: Recorder, few: int, note: Callable[[str], None]) -> None:
        self._recorder, self._few, self._note = recorder, few, note
        self._known: dict[Bucket, Recording | None] = {}
        self._met: set[Bucket] = set()
        self._kv: Sequence[KVLayer] | None = None

    def run(self, forward: Forward, batch: Batch, kv: Sequence[KVLayer]) -> Tensor:
        """What ``forward(batch, kv)`` returns; ``forward`` is always the same pass, made of ops."""
        if batch.ids.shape[0] > self._few:
            return forward(batch, kv)
        if kv is not self._kv:                              # recordings hold the addresses of other pages
            self._known, self._met, self._kv = {}, set(), kv
        bucket = Bucket.of(batch)
        if bucket not in self._met:
            self._met.add(bucket)
            return forward(batch, kv)
        if bucket not in self._known:
            self._known[bucket] = self._record(bucket, forward, batch, kv)
        known = self._known[bucket]
        if known is None:
            return forward(batch, kv)
        replayed = self._replay(known, batch)
        return replayed if known.checks == 0 else self._check(bucket, known, replayed, forward(batch, kv))

    def replays(self, batch: Batch) -> bool:
        """Are passes of this shape replayed unchecked by now?"""
        known = self._known.get(Bucket.of(batch))
        return known is not None and known.checks == 0

    def _record(self, bucket: Bucket, forward: Forward, batch: Batch, kv: Sequence[KVLayer]) -> Recording | None:
        if len(self._known) >= MOST_BUCKETS:
            return None
        buffers = Buffers(bucket, batch)
        buffers.fill(batch)
        try:
            return Recording(buffers, self._recorder.record(lambda: forward(buffers.batch, kv)))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:                       # what the driver refuses comes as this
            self._refuse(bucket, f"could not be recorded: {str(error).splitlines()[0]}")
            return None

    def _replay(self, known: Recording, batch: Batch) -> Tensor:
        known.buffers.fill(batch)
        known.recorded.replay()
        return known.recorded.result[:batch.ids.shape[0]]

    def _check(self, bucket: Bucket, known: Recording, replayed: Tensor, ordinary: Tensor) -> Tensor:
        """The ordinary pass has written the same keys and values again."""
        if torch.equal(replayed, ordinary):
            known.checks -= 1
        else:
            self._known[bucket] = None
            self._refuse(bucket, "differ from the ordinary ones")
        return ordinary

    def _refuse(self, bucket: Bucket, why: str) -> None:
        text = f"CUDA graphs: recorded passes of {bucket.rows} rows {why}"
        log.warning("%s (%s)", text, bucket)
        self._note(text)
