"""Page storage and the paged decoder: what is held, shared, forked and given back. The model here remembers, in its cache,
the tokens it was fed, so that any mistake about pages shows in its logits."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backends.base import ContextTooLong, InvalidRequest, LayerKV, OutOfMemory, Step, Vocab
from backends.engine.kv import PAGE, TYPES, PagedKV, bytes_per_token
from backends.engine.room import plan_room
from backends.engine.runner import PagedDecoder
from backends.kernels import Batch

WORDS = 50


class Recorder:
    """An `Arch` whose logits are the tokens that its cache holds for the row's sequence, weighted by position."""

    layers, hidden = (LayerKV(1, 1, 1),), 64 * PAGE

    def rotation(self, positions, last, run=False):
        return torch.empty(0), torch.empty(0)

    def forward(self, batch: Batch, kv) -> torch.Tensor:
        flat = kv[0].k.view(-1)
        flat[batch.slots] = batch.ids.to(flat.dtype)
        rows = torch.full((len(batch.ids), self.hidden), -1.0)
        for s, (start, end) in enumerate(zip(batch.starts.tolist(), batch.starts.tolist()[1:])):
            for row in range(start, end):
                length = int(batch.positions[row]) + 1
                rows[row, :length] = kv[0].k[batch.pages[s].long()].view(-1)[:length]
        return rows

    def logits(self, rows):
        return rows

    def weights_bytes(self):
        return 0


def decoder(pages: int = 64, *, context: int = 64 * PAGE, prefixes: bool = True, kind: str = "float32") -> PagedDecoder:
    vocab = Vocab(Recorder.hidden, frozenset(), "x")
    return PagedDecoder(Recorder(), PagedKV(Recorder.layers, pages, kind), vocab, context, prefixes=prefixes)


def feed(d: PagedDecoder, slot, tokens: list[int]) -> list[int]:
    """Extend; the tokens that the cache shows before the last row."""
    assert d.reserve(slot, len(tokens))
    row = d.extend([Step(slot, tokens, 1)])[0][0].tolist()
    return [int(x) for x in row[:slot.length]]


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 5 * PAGE + 3])
def test_same_prompt_three_times(length: int) -> None:
    """KV-02."""
    d, tokens = decoder(), [random.randrange(WORDS) for _ in range(length)]
    for turn in range(3):
        slot = d.open(tokens)
        assert slot.length == (0 if turn == 0 else (length - 1) // PAGE * PAGE) and slot.length < length
        assert feed(d, slot, tokens[slot.length:]) == tokens
        d.release(slot)
        d.pool.check()
    assert d.stats()["pages_used"] == 0


def test_a_decoding_batch_says_what_a_ragged_one_says() -> None:
    """The short way for one token a sequence, against the first rows of the same sequences going on by two."""
    d = decoder(prefixes=False)
    slots = [d.open([1]) for _ in range(4)]
    for slot, length in zip(slots, (1, PAGE - 1, PAGE, 3 * PAGE + 5)):
        feed(d, slot, list(range(length)))
        assert d.reserve(slot, 2)
    tokens = [random.randrange(WORDS) for _ in slots]
    short = d._batch([Step(slot, [token], 1) for slot, token in zip(slots, tokens)])
    ragged = d._batch([Step(slot, [token, 0], 2) for slot, token in zip(slots, tokens)])
    for name in ("ids", "positions", "slots"):
        assert torch.equal(getattr(short, name), getattr(ragged, name)[::2]), name
        assert getattr(short, name).dtype == getattr(ragged, name).dtype
    assert torch.equal(short.lengths + 1, ragged.lengths) and torch.equal(short.starts * 2, ragged.starts)
    assert torch.equal(short.wanted, torch.arange(4)) and short.pages.dtype == ragged.pages.dtype == torch.int32
    used = [-(-length // PAGE) for length in short.lengths.tolist()]
    assert all(torch.equal(one[:n], two[:n]) for one, two, n in zip(short.pages, ragged.pages, used))


@pytest.mark.parametrize(("length", "count", "want"), [(0, 1, 1), (0, PAGE, 2), (5, 3, 3), (3 * PAGE + 14, 2, 1), (4 * PAGE, 4, 0)])
def test_a_batch_within_a_page_says_what_a_ragged_one_says(length: int, count: int, want: int) -> None:
    """The short way for one sequence and few tokens, of a slot whose pages lie anywhere."""
    d = decoder(prefixes=False)
    first, slot = d.open([1]), d.open([1])
    feed(d, first, list(range(2 * PAGE)))
    if length:
        feed(d, slot, list(range(length)))
    assert d.reserve(slot, count)
    step = Step(slot, list(range(7, 7 + count)), want)
    short, ragged = d._batch([step]), d._batch._ragged([step])
    for name in ("ids", "positions", "starts", "lengths", "pages", "slots", "wanted"):
        one, two = getattr(short, name), getattr(ragged, name)
        assert torch.equal(one, two) and one.dtype == two.dtype and one.is_contiguous(), name


def test_open_without_reuse_reads_no_cached_prefix() -> None:
    d, tokens = decoder(), list(range(40))
    slot = d.open(tokens)
    feed(d, slot, tokens)
    assert d.open(tokens, reuse=False).length == 0 and d.open(tokens).length == 32
    assert decoder(prefixes=False).open(tokens).length == 0


def test_truncating_into_a_shared_page_does_not_corrupt_it() -> None:
    d, tokens = decoder(), list(range(40))
    first = d.open(tokens)
    feed(d, first, tokens)
    second = d.open(tokens)
    assert second.length == 32 and second.pages[:2] == first.pages[:2]
    d.truncate(second, 20)
    assert feed(d, second, [49] * 12) == tokens[:20] + [49] * 12
    assert second.pages[1] != first.pages[1]
    d.pool.check()
    assert feed(d, first, [7]) == tokens + [7]
    third = d.open(tokens)
    assert third.length == 32 and feed(d, third, tokens[32:]) == tokens


def test_truncating_into_an_own_published_page_unpublishes_it_when_written() -> None:
    d, tokens = decoder(), list(range(40))
    slot = d.open(tokens)
    feed(d, slot, tokens)
    d.truncate(slot, 20)
    assert feed(d, slot, [49] * 20) == tokens[:20] + [49] * 20
    d.release(slot)
    again = d.open(tokens)
    assert again.length == 16 and feed(d, again, tokens[16:]) == tokens
    d.pool.check()


def test_rejected_drafts_across_a_page_border() -> None:
    d, tokens = decoder(), list(range(15))
    slot = d.open(tokens)
    feed(d, slot, tokens)
    for _ in range(20):
        feed(d, slot, [40, 41, 42])                       # a draft, all rejected
        d.truncate(slot, len(tokens))
        tokens.append(random.randrange(WORDS))
        assert feed(d, slot, tokens[-1:]) == tokens
        d.pool.check()


def test_reserve_is_all_or_nothing() -> None:
    d = decoder(3)
    slot, other = d.open([1]), d.open([2])
    assert d.reserve(slot, 2 * PAGE) and d.reserve(other, PAGE)
    before = (list(slot.pages), d.stats())
    assert not d.reserve(slot, 2 * PAGE + 1) and (list(slot.pages), d.stats()) == before
    with pytest.raises(RuntimeError):
        d.extend([Step(slot, [0] * (2 * PAGE + 1), 1)])
    assert slot.length == 0


def test_the_context_is_a_limit() -> None:
    d = decoder(context=20)
    slot = d.open([1])
    feed(d, slot, [3] * 20)
    with pytest.raises(ContextTooLong):
        d.reserve(slot, 1)


def test_a_failed_forward_changes_no_slot() -> None:
    d = decoder()
    slot = d.open([1])
    feed(d, slot, [1, 2, 3])
    good, d.arch.forward = d.arch.forward, lambda batch, kv: 1 / 0
    with pytest.raises(ZeroDivisionError):
        d.extend([Step(slot, [4] * PAGE, 1)])
    d.arch.forward = good
    assert slot.length == 3 and feed(d, slot, [5]) == [1, 2, 3, 5]
    d.pool.check()


def test_rows_wanted() -> None:
    d = decoder()
    a, b, c = (d.open([1]) for _ in range(3))
    for slot in (a, b, c):
        d.reserve(slot, 3)
    got = d.extend([Step(a, [1, 2, 3], 0), Step(b, [4, 5, 6], 2), Step(c, [7, 8, 9], 3)])
    assert [x.shape[0] for x in got] == [0, 2, 3]
    assert got[1][0, :3].tolist() == [4, 5, -1] and got[2][0, :2].tolist() == [7, -1]
    assert d.extend([Step(a, [4], 0)])[0].shape == (0, d.vocab.size)


@pytest.mark.parametrize("prefixes", [True, False])
def test_many_sequences_come_and_go(prefixes: bool) -> None:
    """KV-09 and KV-11 at the level of the decoder: every sequence sees its own tokens; at the end nothing is in use."""
    rng = random.Random(1)
    d, live = decoder(40, prefixes=prefixes), []
    shared = [rng.randrange(WORDS) for _ in range(60)]
    for round_ in range(400):
        if rng.random() < .4 and len(live) < 8:
            tokens = shared[:rng.randrange(1, 60)] + [rng.randrange(WORDS) for _ in range(rng.randrange(1, 20))]
            live.append([d.open(tokens), tokens])
        rng.shuffle(live)
        steps = []
        for entry in list(live):
            slot, tokens = entry
            if slot.length > 1 and rng.random() < .2:
                d.truncate(slot, rng.randrange(slot.length))
            n = min(rng.randrange(1, 30), len(tokens) - slot.length)
            if n < 1 or not d.reserve(slot, n):
                d.release(slot)
                live.remove(entry)
                continue
            steps.append(Step(slot, tokens[slot.length:slot.length + n], 1))
        for step, rows in zip(steps, d.extend(steps) if steps else []):
            wanted = next(tokens for slot, tokens in live if slot is step.slot)[:step.slot.length]
            assert [int(x) for x in rows[0][:step.slot.length]] == wanted, round_
        d.pool.check()
    for slot, _ in live:
        d.release(slot)
    stats = d.stats()
    assert stats["pages_used"] == 0 and stats["pages_free"] + stats["pages_cached"] == 40
    assert bool(stats["pages_cached"]) == prefixes


# ---------------------------------------------------------------------------------------------- storage and room
@pytest.mark.parametrize("kind", TYPES)
def test_storage(kind: str) -> None:
    layers = (LayerKV(3, 64, 64), LayerKV(2, 40, 24, 128))
    kv = PagedKV(layers, 5, kind)
    assert kv.layers[0].k.shape == (5, 3, PAGE, 64) and kv.layers[1].v.shape == (5, 2, PAGE, 24)
    tensors = [t for layer in kv.layers for t in vars(layer).values() if t is not None]
    assert sum(t.nbytes for t in tensors) == 5 * PAGE * bytes_per_token(layers, kind) == 5 * PAGE * kv.bytes_per_token
    assert all(t.data_ptr() % 64 == 0 and not t.any() for t in tensors)
    for t in tensors:
        t[1] = 1
    kv.copy_page(1, 3)
    assert all(torch.equal(t[1], t[3]) and not t[2].any() for t in tensors)


def test_untouched_pages_take_no_memory() -> None:
    """In a process of its own: what other tests have left in this one's heap would be counted too."""
    script = ("import psutil\nfrom backends.base import LayerKV\nfrom backends.engine.kv import PAGE, PagedKV\n"
              "before = psutil.Process().memory_info().rss\n"
              "kv = PagedKV((LayerKV(8, 128, 128),) * 8, 4096, 'bfloat16')\n"
              "assert kv.bytes_per_token * 4096 * PAGE > 2 * 10**9\n"
              "print(psutil.Process().memory_info().rss - before)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 50 * 10**6


def test_room() -> None:
    layers = (LayerKV(1, 16, 16),)                        # float32: 128 bytes a token, 2048 a page
    assert plan_room(layers, "float32", 0, 256, 2, 10**9).pages == 32
    tight = plan_room(layers, "float32", 0, 1024, 1, 2048 * 20)
    assert tight.context == 160 and tight.pages == 10 and "1,024" in tight.notes[0]
    asked = plan_room(layers, "float32", 200, 1024, 4, 2048 * 20)
    assert (asked.context, asked.pages) == (200, 18) and "shared" in asked.notes[0]
    assert "beyond" in plan_room(layers, "float32", 2048, 1024, 1, 10**9).notes[0]
    with pytest.raises(OutOfMemory) as error:
        plan_room(layers, "float32", 1024, 1024, 1, 2048 * 20)
    assert error.value.evidence["needed"] == 64 * 2048
    with pytest.raises(InvalidRequest, match="own context has 256 tokens; 999,999") as beyond:
        plan_room(layers, "float32", 999_999, 256, 1, 2048 * 20)
    assert beyond.value.remedy == "Choose 256 tokens at most."
