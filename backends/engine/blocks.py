"""Pages as integers: who holds which, which content is cached, what is evicted first.

A page is free, held (one or more references), or cached (no holder, but its content is findable as a prefix). The prefix
index is a chain: the key of a page is (serial of the page before it, its tokens), compared token by token, never by hash
alone. A serial is never used twice, so a key can only match content that is still there. The pool knows nothing of what
is stored in a page, nor where; one pool belongs to one decoder, so the model, its revision, its type and the KV type
are part of every key without being spelled out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

ROOT = 0                     # serial of "before the first page"


@dataclass
class _Entry:
    key: tuple[int, tuple[int, ...]]
    serial: int
    before: int | None                                        # page
    children: set[int] = field(default_factory=set)          # pages


class PagePool:
    """``total`` pages of ``size`` tokens. Not thread safe: it belongs to the engine's loop."""

    def __init__(self, total: int, size: int) -> None:
        self.total, self.size = total, size
        self.references = [0] * total
        self._free = list(range(total - 1, -1, -1))          # low pages first: untouched ones cost no memory
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._index: dict[tuple[int, tuple[int, ...]], int] = {}
        self._entries: dict[int, _Entry] = {}
        self._serials = ROOT
        self.evictions = 0

    # ------------------------------------------------------------------------------------------ counts
    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.free - self.cached

    # ------------------------------------------------------------------------------------------ holding
    def take(self, count: int) -> list[int] | None:
        """``count`` private pages, evicting cached ones; None if there are not so many, and then nothing changed."""
        if count > self.free + self.cached:
            return None
        while len(self._free) < count:
            self._evict()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        return pages

    def hold(self, page: int) -> None:
        """One more reference to a held or cached page."""
        self._cached.pop(page, None)
        self.references[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Give references back, in the order of the sequence: the deepest page becomes the first to be evicted."""
        for page in reversed(pages):
            assert self.references[page] > 0, f"page {page} dropped without a reference"
            self.references[page] -= 1
            if self.references[page] == 0:
                if page in self._entries:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    # ------------------------------------------------------------------------------------------ prefixes
    def match(self, tokens: Sequence[int]) -> list[int]:
        """Pages that hold the longest cached prefix shorter than ``tokens``, each with a reference for the caller."""
        pages: list[int] = []
        parent = ROOT
        for start in range(0, len(tokens) - self.size, self.size):
            page = self._index.get((parent, tuple(tokens[start:start + self.size])))
            if page is None:
                break
            pages.append(page)
            parent = self._entries[page].serial
        for page in pages:
            self.hold(page)
        return pages

    def publish(self, before: int | None, page: int, tokens: Sequence[int]) -> int:
        """Make the held ``page`` findable as ``tokens`` after page ``before`` (published too, None for the first).

        Returns the page to hold: ``page``, or the one that already has this content; the reference then moves to it.
        """
        parent = ROOT if before is None else self._entries[before].serial
        key = (parent, tuple(tokens))
        known = self._index.get(key)
        if known is not None and known != page:
            self.hold(known)
            self.drop((page,))
            return known
        self._serials += 1
        self._index[key] = page
        self._entries[page] = _Entry(key, self._serials, before)
        if before is not None:
            self._entries[before].children.add(page)
        return page

    def published(self, page: int) -> bool:
        return page in self._entries

    def forget(self, page: int) -> None:
        """Take ``page`` and all that follows it out of the index: its content is about to change."""
        parent = self._entries.get(self._entries[page].before)
        if parent is not None:
            parent.children.discard(page)
        doomed = [page]
        while doomed:
            page = doomed.pop()
            entry = self._entries.pop(page)
            del self._index[entry.key]
            doomed.extend(entry.children)
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def clear(self) -> None:
        """Forget every prefix."""
        for page in list(self._entries):
            if page in self._entries:
                self.forget(page)

    def _evict(self) -> None:
        self.forget(next(iter(self._cached)))
        self.evictions += 1

    # ------------------------------------------------------------------------------------------ invariants
    def check(self) -> None:
        """Raises AssertionError where the books do not balance. For tests and debugging: linear in the pages."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, "a page is free and cached"
        held = {page for page, count in enumerate(self.references) if count}
        assert held == set(range(self.total)) - free - cached, "held pages and references differ"
        assert all(count >= 0 for count in self.references), "a negative reference count"
        assert cached <= set(self._entries) and not free & set(self._entries), "the index and the cached pages differ"
        assert {entry.key: page for page, entry in self._entries.items()} == self._index, "index and entries differ"
        serials = {entry.serial for entry in self._entries.values()}
        assert len(serials) == len(self._entries), "a serial is used twice"
        for page, entry in self._entries.items():
            assert len(entry.key[1]) == self.size, "a page that is not full is published"
            parent = None if entry.before is None else self._entries[entry.before]
            assert entry.key[0] == (ROOT if parent is None else parent.serial), "a published page whose parent is gone"
            assert parent is None or page in parent.children, "a parent does not know its child"
            dangling = parent is not None and self.references[page] and not self.references[entry.before]
            assert not dangling, "a held page after one that nobody holds"
