"""A decoder without weights: its logits are a pure function of the KV contents, so any mistake with the cache shows.

With it come a byte vocabulary for its codec and `naive`, the plain loop that every engine has to equal.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from backends.base import Cancel, Event, ModelInfo, Request, Sampling, Step, Vocab
from backends.engine import noise
from backends.engine.local import LocalModel
from backends.engine.loop import Engine
from backends.engine.sampler import History, choose
from backends.engine.text import TextCodec
from tests.test_detokenize import byte_tokenizer

SIZE, EOS = 257, 256        # 0 … 255 are bytes


@dataclass(eq=False)
class ToySlot:
    length: int = 0
    kv: list[int] = field(default_factory=list)
    room: int = 0           # tokens reserved


def random_logits(kv: Sequence[int], size: int = SIZE, base: str = "base", noise_of: str = "",
                  amount: float = 0.0) -> np.ndarray:
    end = tuple(kv[-6:]), len(kv) % 7
    found = _drawn(base, *end, size)
    return found + amount * _drawn(noise_of, *end, size) if amount else found.copy()


@lru_cache(1 << 14)         # each is asked for by the engine, by its draft and by the plain loop
def _drawn(salt: str, end: tuple[int, ...], phase: int, size: int) -> np.ndarray:
    seed = hashlib.blake2b(repr((salt, end, phase)).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(seed, "little")).standard_normal(size).astype(np.float32) * 3


def forced(text: Sequence[int], prompt: int, peak: float = 20.0) -> Callable[[Sequence[int]], np.ndarray]:
    """Logits that say ``text`` after a prompt of ``prompt`` tokens, then the end."""
    def logits(kv: Sequence[int]) -> np.ndarray:
        place = len(kv) - prompt
        row = np.zeros(SIZE, np.float32)
        row[text[place] if 0 <= place < len(text) else EOS] = peak
        return row
    return logits


class ToyDecoder:
    """``room``: tokens all slots may hold together. Checks the engine's invariants on the way."""

    def __init__(self, logits: Callable[[Sequence[int]], np.ndarray] = random_logits, *, room: int = 10**9,
                 context: int = 4096, eos: frozenset[int] = frozenset({EOS}), reuse: bool = True,
                 fingerprint: str = "toy") -> None:
        self.logits, self.room, self.context, self.may_reuse = logits, room, context, reuse
        self.vocab = Vocab(SIZE, eos, fingerprint)
        self.reserved = self.calls = self.rows = 0
        self.open_slots: set[ToySlot] = set()
        self.prefixes: list[list[int]] = []
        self.largest = 0                       # tokens of the largest step
        self.fault: Callable[[Sequence[Step]], BaseException | None] = lambda steps: None

    def open(self, tokens: Sequence[int], *, reuse: bool = True) -> ToySlot:
        slot = ToySlot()
        known = [*self.prefixes, *[other.kv for other in self.open_slots]] if reuse and self.may_reuse else []
        best = min(max((_common(prefix, tokens) for prefix in known), default=0), len(tokens) - 1)
        if best and self.reserved + best <= self.room:
            slot.kv, slot.length, slot.room = list(tokens[:best]), best, best
            self.reserved += best
        self.open_slots.add(slot)
        return slot

    def reserve(self, slot: ToySlot, n: int) -> bool:
        assert slot in self.open_slots and slot.length + n <= self.context
        missing = max(0, slot.length + n - slot.room)
        if self.reserved + missing > self.room:
            return False
        self.reserved += missing
        slot.room += missing
        return True

    def extend(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        self.calls += 1
        self.largest = max(self.largest, sum(len(step.tokens) for step in steps))
        assert len({id(step.slot) for step in steps}) == len(steps)
        error = self.fault(steps)
        if error is not None:
            for step in steps[:1]:             # leaves a mess, as a real failure may
                step.slot.kv += step.tokens
                step.slot.length += len(step.tokens)
            raise error
        out = []
        for step in steps:
            assert step.slot in self.open_slots and step.tokens and 0 <= step.want <= len(step.tokens)
            assert step.slot.length + len(step.tokens) <= step.slot.room, "extend without reserve"
            rows = []
            for i, token in enumerate(step.tokens):
                step.slot.kv.append(token)
                step.slot.length += 1
                if i >= len(step.tokens) - step.want:
                    rows.append(self.logits(step.slot.kv))
            self.rows += len(rows)
            out.append(torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, SIZE))
        return out

    def truncate(self, slot: ToySlot, length: int) -> None:
        del slot.kv[length:]
        slot.length = len(slot.kv)
        self.reserved -= slot.room - slot.length
        slot.room = slot.length

    def release(self, slot: ToySlot) -> None:
        self.prefixes = [*self.prefixes, list(slot.kv)][-4:]
        self.truncate(slot, 0)
        self.open_slots.remove(slot)

    def stats(self) -> dict[str, int]:
        return {"pages_total": self.room, "pages_used": self.reserved, "pages_free": self.room - self.reserved,
                "page_size": 1}

    def close(self) -> None:
        self.prefixes.clear()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    place = 0
    while place < min(len(one), len(other)) and one[place] == other[place]:
        place += 1
    return place


def toy_model(decoder: ToyDecoder | None = None, *, name: str = "toy", streams: int = 8, template: str | None = None,
              bos_id: int | None = None) -> LocalModel:
    decoder = decoder or ToyDecoder()
    text = TextCodec(byte_tokenizer(), template=template, bos_id=bos_id, eos_ids=decoder.vocab.eos_ids)
    info = ModelInfo(name, "toy", "toy", context=decoder.context, streams=streams, capabilities=("batch", "prefix", "draft"),
                     vocab_fingerprint=decoder.vocab.fingerprint)
    return LocalModel(info, decoder, text)


def naive(decoder: ToyDecoder, prompt: Sequence[int], sampling: Sampling, limit: int, choice: int = 0) -> list[int]:
    """The answer's ids by the plainest loop there is: whole text in, one token out."""
    tokens, history = list(prompt), History.of(sampling, prompt)
    ends = set(sampling.stop_ids) | (set() if sampling.ignore_eos else decoder.vocab.eos_ids)
    seed = noise.choice_seed(sampling.seed or 0, choice)
    while len(tokens) < limit:
        banned = tuple(sorted(ends)) if len(tokens) - len(prompt) < sampling.min_tokens else ()
        token = choose(decoder.logits(tokens), sampling, seed, len(tokens), history, banned)
        tokens.append(token)
        if history is not None:
            history.add(token)
        if token in ends:
            break
    return tokens[len(prompt):]


@dataclass
class Got:
    """What a sink received, taken apart; `check` holds the contract of `Event`."""

    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def done(self) -> bool:
        return bool(self.events) and self.events[-1].last

    @property
    def last(self) -> Event:
        return self.events[-1]

    def of(self, index: int = 0) -> list[Event]:
        return [event for event in self.events if event.index == index and event.progress is None]

    def ids(self, index: int = 0) -> list[int]:
        return [token for event in self.of(index) for token in event.ids]

    def text(self, index: int = 0) -> str:
        return "".join(event.text for event in self.of(index))

    def finish(self, index: int = 0) -> str | None:
        return self.of(index)[-1].finish

    def drafted(self, index: int = 0) -> list[bool]:
        return [flag for event in self.of(index) for flag in event.drafted]

    def check(self, choices: int = 1) -> Got:
        assert self.done and sum(event.last for event in self.events) == 1
        assert {event.index for event in self.events} == {-1, *range(choices)}
        for index in range(choices):
            events = self.of(index)
            assert [event.finish is not None for event in events] == [False] * (len(events) - 1) + [True]
            assert all(len(event.drafted) == len(event.ids) for event in events)
        assert self.last.usage.completion_tokens == sum(len(self.ids(index)) for index in range(choices))
        assert self.last.usage.cached_tokens < self.last.usage.prompt_tokens
        assert 0 <= self.last.usage.accepted <= self.last.usage.drafted
        return self


def shown(ids: Sequence[int], cut: bool) -> str:
    """The text of a toy answer as Python's own decoder has it; where the answer was ``cut``, without a character just begun."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(id for id in ids if id < 256), final=not cut)


def ask(engine: Engine, model: LocalModel, prompt, sampling: Sampling = Sampling(), cancel: Cancel | None = None,
        **more) -> Got:
    """Submit; the caller steps."""
    got = Got()
    engine.submit(model, Request(prompt, sampling, **more), cancel or Cancel(), got)
    return got


def drain(engine: Engine, most: int = 100_000) -> int:
    steps = 0
    while engine.step():
        steps += 1
        assert steps < most, "the engine does not come to an end"
    return steps
