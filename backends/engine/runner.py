"""Steps → batch → forward: the `Decoder` over an architecture, KV pages and a prefix index.

It knows slots, pages and rows; nothing of requests, sampling or text. One caller at a time (the engine's loop).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from backends.base import ContextTooLong, Step, Vocab
from backends.engine.arch import Arch
from backends.engine.batches import Batches
from backends.engine.blocks import PagePool
from backends.engine.kept import Kept
from backends.engine.kv import PAGE, PagedKV
from backends.engine.transfer import fetch
from backends.kernels import Ahead, Guesses


@dataclass(eq=False)
class PagedSlot:
    """A sequence's tokens and the pages that hold them; ``published`` leading pages are in the prefix index."""

    tokens: list[int] = field(default_factory=list)
    pages: array = field(default_factory=lambda: array("i"))
    published: int = 0
    kept: Kept | None = None            # where a draft reads this sequence's states

    @property
    def length(self) -> int:
        return len(self.tokens)


class PagedDecoder:
    """See `backends.base.Decoder`. ``prefixes`` False: nothing is published, nothing is reused. ``columns``: int64, the ids
    that a draft's head has rows of, rising; None: all."""

    def __init__(self, arch: Arch, kv: PagedKV, vocab: Vocab, context: int, *, device: torch.device | str = "cpu",
                 prefixes: bool = True) -> None:
        self.arch, self.kv, self.vocab, self.context = arch, kv, vocab, context
        self.device, self.prefixes = torch.device(device), prefixes
        self.pool = PagePool(kv.pages, PAGE)
        named = getattr(arch, "columns", None)
        self.columns = None if named is None else named[named < vocab.size].cpu().numpy()
        self._width = vocab.size if self.columns is None else len(self.columns)       # of a narrow row
        self._batch = Batches(arch, self.device, kv.pages)
        self.steps = self.rows = self.asked = self.reused = 0

    # ------------------------------------------------------------------------------------------ slots
    def open(self, tokens: Sequence[int], *, reuse: bool = True) -> PagedSlot:
        pages = self.pool.match(tokens) if reuse and self.prefixes else []
        self.asked += len(tokens)
        self.reused += len(pages) * PAGE
        return PagedSlot(list(tokens[:len(pages) * PAGE]), array("i", pages), len(pages))

    def reserve(self, slot: PagedSlot, n: int) -> bool:
        """Raises ContextTooLong where the slot would outgrow the context; False where pages are lacking."""
        if slot.length + n > self.context:
            raise ContextTooLong(f"{slot.length + n} tokens do not fit the context of {self.context}.",
                                 tokens=slot.length + n, context=self.context)
        missing = -(-(slot.length + n) // PAGE) - len(slot.pages)
        fork = n > 0 and self._shared_tail(slot)
        pages = self.pool.take(max(0, missing) + fork)
        if pages is None:
            return False
        if fork:
            self._fork(slot, pages.pop())
        slot.pages.extend(pages)
        return True

    def truncate(self, slot: PagedSlot, length: int) -> None:
        keep = -(-length // PAGE)
        if length < slot.length:
            del slot.tokens[length:]
            if slot.kept is not None:
                slot.kept.cut(length)
        if keep < len(slot.pages):
            self.pool.drop(slot.pages[keep:])
            del slot.pages[keep:]
        slot.published = min(slot.published, keep)            # a page cut in its middle stays published until written to

    def release(self, slot: PagedSlot) -> None:
        self.pool.drop(slot.pages)
        slot.tokens, slot.pages, slot.published, slot.kept = [], array("i"), 0, None

    def close(self) -> None:
        self.pool.clear()

    def stats(self) -> Mapping[str, int]:
        pool = self.pool
        return {"pages_total": pool.total, "pages_free": pool.free, "pages_cached": pool.cached, "pages_used": pool.used,
                "page_size": PAGE, "steps": self.steps, "rows": self.rows, "evictions": pool.evictions,
                "prefix_tokens_asked": self.asked, "prefix_tokens_reused": self.reused}

    def _shared_tail(self, slot: PagedSlot) -> bool:
        """Is the page that the next token goes into partly filled, and held by another sequence too?"""
        page = slot.length // PAGE
        return bool(slot.length % PAGE) and page < len(slot.pages) and self.pool.references[slot.pages[page]] > 1

    def _fork(self, slot: PagedSlot, fresh: int) -> None:
        """Go on in a copy: others still read the shared page."""
        place = slot.length // PAGE
        shared = slot.pages[place]
        self.kv.copy_page(shared, fresh)
        slot.pages[place] = fresh
        slot.published = min(slot.published, place)
        self.pool.drop((shared,))

    # ------------------------------------------------------------------------------------------ the forward verb
    def extend(self, steps: Sequence[Step], *, narrow: bool = False) -> list[Tensor]:
        """``narrow``: of ``columns`` only, float32 [want, columns]; the others would be -inf."""
        rows = self._in_one_call(steps[0]) if len(steps) == 1 and (narrow or self.columns is None) else None
        return self._extend(steps, narrow) if rows is None else [rows]

    def _in_one_call(self, step: Step) -> Tensor | None:
        """Few rows of one sequence, all of them wanted, as nearly always where one answer is made; None: not so, or not yet."""
        slot, count, chain = step.slot, len(step.tokens), self._chain
        if chain is None or step.want != count or not count or not chain.ready(slot.length, count):
            return None
        self._make_writable(slot, count)
        logits, hidden = chain.run(slot.length, slot.pages, step.tokens)
        if slot.kept is not None:
            slot.kept.add(hidden, 0, count)
        self._settle((step,), count)
        return logits if logits.shape[1] == self._width else logits[:, :self._width]

    @torch.inference_mode()
    def _extend(self, steps: Sequence[Step], narrow: bool) -> list[Tensor]:
        head, width = (self.arch.narrow, self._width) if narrow else (self.arch.logits, self.vocab.size)
        for step in steps:
            self._make_writable(step.slot, len(step.tokens))
        hidden = self.arch.forward(batch := self._batch(steps), self.kv.layers)
        logits = fetch(head(_of(hidden, batch.wanted))[:, :width]) if len(batch.wanted) else hidden[:0]
        self._keep(steps, hidden)
        self._settle(steps, len(batch.ids))
        return list(logits.split([step.want for step in steps])) if len(batch.wanted) else [
            torch.empty(0, width) for _ in steps]

    @torch.inference_mode()
    def follow(self, steps: Sequence[Step], states: Tensor) -> tuple[list[Tensor], Tensor]:
        """`extend` of a draft that reads ``states``, [rows of all steps, H]: its verifier's residual stream, or its own, at the
        token before each. Returns logits of ``columns`` for each step, and its own stream of the wanted rows, [wanted, H], which the
        next pass may write over."""
        for step in steps:
            self._make_writable(step.slot, len(step.tokens))
        batch = self._batch(steps)
        batch.states = self._readable(states)
        hidden = self.arch.forward(batch, self.kv.layers)
        rows = _of(hidden, batch.wanted)
        logits = fetch(self.arch.narrow(rows)[:, :self._width]) if len(rows) else rows
        self._settle(steps, len(batch.ids))
        return list(logits.split([step.want for step in steps])), rows

    def ahead(self, slot: PagedSlot, feed: Sequence[int], states: Tensor | None, want: Ahead) -> Guesses | None:
        """Ids guessed one after another, in one call, after ``feed`` (of a draft that reads them with ``states``, as `follow`). None: this
        decoder, or its target, has no such way, or not yet, or there is no room; then nothing has changed."""
        rows = len(feed) + want.most - 1
        if not self.chains or not self._chain.can_guess(slot.length, len(feed), want.most) or slot.length + rows > self.context \
                or not self.reserve(slot, rows):
            return None
        self._take_back(slot)
        guesses = self._chain.guess(slot.length, slot.pages, feed, None if states is None else self._readable(states), want)
        slot.tokens.extend(guesses.read)
        self._publish(slot)
        self.steps += 1 + len(guesses.read) - len(feed)
        self.rows += len(guesses.read)
        return guesses

    def _readable(self, states: Tensor) -> Tensor:
        """As the ops take them: another target's verifier may have them in another type, or elsewhere."""
        ready = states.dtype == torch.float32 and states.is_contiguous() and states.device == self.device
        return states if ready else states.to(self.device, torch.float32).contiguous()

    @property
    def chains(self) -> bool:
        """Is there any use in asking for `ahead`?"""
        return self._chain is not None

    @cached_property
    def _chain(self) -> Any:
        chain = getattr(self.arch, "chain", None)
        return chain and chain(self.kv.layers, self._width)

    def _keep(self, steps: Sequence[Step], hidden: Tensor) -> None:
        """The rows of sequences whose states a draft reads; the next pass writes over ``hidden``."""
        row = 0
        for step in steps:
            count = len(step.tokens)
            if step.slot.kept is not None:
                step.slot.kept.add(hidden, row, count)
            row += count

    @torch.inference_mode()
    def states(self, slot: PagedSlot, tokens: Sequence[int]) -> Tensor:
        """As `extend` of one step, but what comes back is the last hidden state of each token, as the head reads it:
        float32 [tokens, hidden]."""
        step = Step(slot, tokens, 0)
        self._make_writable(slot, len(tokens))
        found = self.arch.states(self.arch.forward(batch := self._batch([step]), self.kv.layers))
        self._settle([step], len(batch.ids))
        return found

    def _settle(self, steps: Sequence[Step], rows: int) -> None:
        for step in steps:
            step.slot.tokens.extend(step.tokens)
            self._publish(step.slot)
        self.steps += 1
        self.rows += rows

    def _make_writable(self, slot: PagedSlot, n: int) -> None:
        if not self.reserve(slot, n):
            raise RuntimeError(f"extend without room: {slot.length} + {n} tokens, {len(slot.pages)} pages; reserve first")
        self._take_back(slot)

    def _take_back(self, slot: PagedSlot) -> None:
        """No page that is written to from now on is findable."""
        for place in range(slot.length // PAGE, slot.published):
            if self.pool.published(slot.pages[place]):
                self.pool.forget(slot.pages[place])
        slot.published = min(slot.published, slot.length // PAGE)

    def _publish(self, slot: PagedSlot) -> None:
        """Make the pages that are now full findable; where the same content is known already, hold that page instead."""
        if not self.prefixes:
            return
        for place in range(slot.published, slot.length // PAGE):
            before = slot.pages[place - 1] if place else None
            content = slot.tokens[place * PAGE:(place + 1) * PAGE]
            slot.pages[place] = self.pool.publish(before, slot.pages[place], content)
            slot.published = place + 1


def _of(rows: Tensor, wanted: Tensor) -> Tensor:
    """Rows ``wanted`` (distinct, rising) of all; no copy where that is all of them."""
    return rows if len(wanted) == len(rows) else rows[wanted]
