"""What could draft for several models at once, and for which of them it does not: for pages where one choice serves many.

Knows the studio's pairings. A model that is not in memory is judged when it is loaded; until then nothing speaks against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backends.base import DraftSpec
from backends.speculative import LOOKUP, Pairing, parts

LATER = "seen_when_loaded"              # code of a pairing that nobody has judged yet


def offers(studio: Any, models: Sequence[str]) -> list[Pairing]:
    """Each possible draft once: as it fits the first of the models that it fits, else with the first one's reason."""
    loaded = studio.loaded()
    found: dict[str, Pairing] = {}
    for model in models:
        for pair in studio.drafts(model) if model in loaded else _unjudged(loaded):
            if pair.name not in found or pair.fits and not found[pair.name].fits:
                found[pair.name] = pair
    return list(found.values())


def _unjudged(loaded: Any) -> list[Pairing]:
    return [Pairing(LOOKUP, "lookup", "lookup"), *(Pairing(name, "tokens", LATER) for name in loaded)]


def pairing(studio: Any, model: str, spec: DraftSpec) -> Pairing:
    """How the draft asked for fits a model that is loaded. Of lookup stacked on a model: how that model fits."""
    name = parts(spec.name)[1] or LOOKUP
    found = next((pair for pair in studio.drafts(model) if pair.name == name), None)
    return found or Pairing(name, "", "not_loaded")


def unfit(studio: Any, models: Sequence[str], spec: DraftSpec | None) -> dict[str, Pairing]:
    """Of the models that are loaded those that cannot be drafted for so, each with the reason."""
    if spec is None:
        return {}
    found = {model: pairing(studio, model, spec) for model in models if model in studio.loaded()}
    return {model: pair for model, pair in found.items() if not pair.fits}
