"""What could draft for a loaded model: the rules of `backends.speculative` over what the studio has. Knows no page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends import speculative
from backends.base import ModelInfo
from backends.speculative import Difference, Pairing


class Pairs:
    """``studio``: the facade whose models are paired. Where two vocabularies part is asked of the engine once."""

    def __init__(self, studio: Any) -> None:
        self._studio = studio
        self._known: dict[tuple[str, str], Difference | None] = {}

    def of(self, target: ModelInfo) -> list[Pairing]:
        """Everything that could draft for it, and of what does not fit the reason."""
        loaded = self._studio.loaded()
        return speculative.pairings(target, loaded.values(), lambda draft: self._differ(target, loaded[draft]),
                                    self._absent(loaded))

    def _differ(self, target: ModelInfo, draft: ModelInfo) -> Difference | None:
        pair = target.vocab_fingerprint, draft.vocab_fingerprint
        if pair not in self._known:
            found = self._studio.host.difference(target.name, draft.name)
            if found == speculative.UNCOMPARED:
                return found
            self._known[pair] = found
        return self._known[pair]

    def _absent(self, loaded: Mapping[str, ModelInfo]) -> dict[str, tuple[int, int]]:
        """Local models that are not loaded: bytes that they need, and that are free."""
        sizes = {entry.name: self._studio.estimate(entry.name) for entry in self._studio.catalog()
                 if entry.ready and entry.local and entry.name not in loaded}
        return {name: (size.total, size.free) for name, size in sizes.items()}
