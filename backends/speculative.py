"""Which draft fits which model, how, and why another does not: the one set of rules for page, API and engine.

Knows what a loaded model says of itself (`ModelInfo`) and where two vocabularies differ first. Drafting itself is the engine's
(`engine/drafters.py`, `lookup.py`, `bridge.py`; how long drafts are: `controller.py`). Standard library only.

Rules. A target has to give rows of logits for several tokens at once and to forget tokens again: models of other servers and
those that run one sequence at a time cannot. A draft has to forget tokens cheaply as well. With the same vocabulary it drafts
token by token, whatever the padding of the two heads; if one vocabulary only has more ids at its end, as far as the shorter one
goes; with any other tokenizer through text. A model may draft for itself. Sliding windows, contexts and sizes are no reasons:
a draft with less context reads the end of the text, and what does not pay turns itself off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from backends.base import DraftSpec, InvalidRequest, ModelInfo, ModelNotLoaded, NotSupported

LOOKUP = "lookup"
STACKED = LOOKUP + "+"

REASONS: Mapping[str, str] = {
    "needs_states": "It reads hidden states {width} wide of a fused decoder, which {target} does not give.",
    "target_remote": "{target} is answered by another server, which gives no logits to verify drafts with.",
    "target_sequential": "{target} runs one sequence at a time and cannot verify drafts.",
    "draft_remote": "It is answered by another server: each draft would be a request over the network.",
    "draft_sequential": "It runs one sequence at a time and cannot take tokens back without reading its text again.",
    "not_loaded": "It is not loaded.",
    "no_room": "It is not loaded, and with {need} bytes for {free} free ones it does not fit beside the others.",
    "seen_when_loaded": "Whether it fits is seen when the model is loaded.",
    "same": "Same vocabulary.",
    "states": "Same vocabulary; it reads this model's hidden states.",
    "itself": "The model itself: every draft is right, and costs as much as it saves.",
    "longer": "Same vocabulary up to id {id}; one of the two has more.",
    "text": "Another tokenizer (id {id} is {mine} here and {theirs} there): it drafts through text.",
    "text_somewhere": "Another tokenizer: it drafts through text.",
    "lookup": "Repeats what followed the same words in prompt and answer. Costs no memory.",
}


@dataclass(frozen=True)
class Difference:
    """The first id that two vocabularies do not share, and what it is in each; None: it is beyond that vocabulary's end."""

    id: int
    mine: str | None
    theirs: str | None


UNCOMPARED = Difference(-1, "", "")     # they differ, and where could not be asked


@dataclass(frozen=True)
class Pairing:
    """One possible draft for one target. ``name``: what a request says; ``how``: "" where it does not fit; ``code`` and
    ``values``: the reason, for whoever says it in another language; ``known``: ids below it mean the same to both."""

    name: str
    how: Literal["lookup", "tokens", "text", ""]
    code: str
    values: Mapping[str, Any] = field(default_factory=dict)
    known: int | None = None

    @property
    def fits(self) -> bool:
        return bool(self.how)

    @property
    def reason(self) -> str:
        return REASONS[self.code].format(**self.values)


def judge(target: ModelInfo, draft: ModelInfo, differ: Callable[[], Difference | None]) -> Pairing:
    """Can ``draft`` draft for ``target``? ``differ`` compares the vocabularies; asked only where their fingerprints differ."""
    if (refusal := refuses(target)) is not None:
        return Pairing(draft.name, "", refusal, {"target": target.name})
    if draft.path == "remote":
        return Pairing(draft.name, "", "draft_remote")
    if "draft" not in draft.capabilities:
        return Pairing(draft.name, "", "draft_sequential")
    if not draft.speaks:
        return _by_states(target, draft)
    if draft.name == target.name:
        return Pairing(draft.name, "tokens", "itself")
    first = None if draft.vocab_fingerprint == target.vocab_fingerprint else differ()
    if first is None:
        return Pairing(draft.name, "tokens", "same")
    if first.mine is None or first.theirs is None:
        return Pairing(draft.name, "tokens", "longer", {"id": first.id}, first.id)
    if first == UNCOMPARED:
        return Pairing(draft.name, "text", "text_somewhere")
    return Pairing(draft.name, "text", "text", {"id": first.id, "mine": repr(first.mine), "theirs": repr(first.theirs)})


def _by_states(target: ModelInfo, draft: ModelInfo) -> Pairing:
    """The parent and variants of it: their states are alike, and the tokens are the same."""
    fits = "states" in target.capabilities and target.hidden == draft.hidden and target.vocab_fingerprint == draft.vocab_fingerprint
    return Pairing(draft.name, "tokens", "states") if fits else Pairing(draft.name, "", "needs_states",
                                                                       {"width": draft.hidden, "target": target.name})


def refuses(target: ModelInfo) -> str | None:
    """The reason for which no draft at all fits this target."""
    if target.path == "remote":
        return "target_remote"
    return None if "draft" in target.capabilities else "target_sequential"


def pairings(target: ModelInfo, loaded: Iterable[ModelInfo], differ: Callable[[str], Difference | None],
             others: Mapping[str, tuple[int, int]] | None = None) -> list[Pairing]:
    """Every draft there could be: lookup, the loaded models, and ``others``: those not loaded, with the bytes that they need
    and that are free. ``differ``: of the target's vocabulary and that of the model so named."""
    refusal = refuses(target)
    lookup = Pairing(LOOKUP, "", refusal, {"target": target.name}) if refusal else Pairing(LOOKUP, "lookup", "lookup")
    found = [lookup, *(judge(target, draft, lambda name=draft.name: differ(name)) for draft in loaded)]
    for name, (need, free) in (others or {}).items():
        code = "no_room" if need > free else "not_loaded"
        found.append(Pairing(name, "", code, {"need": need, "free": free}))
    return found


def parts(name: str) -> tuple[bool, str | None]:
    """Of a draft's name: is text looked up, and which model drafts."""
    if name == LOOKUP:
        return True, None
    return (True, name.removeprefix(STACKED)) if name.startswith(STACKED) else (False, name)


def check(spec: DraftSpec, target: ModelInfo, loaded: Mapping[str, ModelInfo]) -> None:
    """Raises what is wrong with asking ``target`` for this draft, as far as the models' own words tell: NotSupported,
    ModelNotLoaded."""
    refusal = refuses(target)
    if refusal is not None:
        raise NotSupported(REASONS[refusal].format(target=target.name), field="draft", remedy="Ask without a draft.")
    _, name = parts(spec.name)
    if name is None:
        return
    if name not in loaded:
        raise ModelNotLoaded(f"The draft model {name!r} is not loaded.", field="draft", loaded=", ".join(loaded))
    refuse(judge(target, loaded[name], lambda: None))


def refuse(pairing: Pairing) -> None:
    """Raises InvalidRequest for a draft that does not fit."""
    if not pairing.fits:
        raise InvalidRequest(f"{pairing.name!r} cannot draft for this model. {pairing.reason}", field="draft",
                             remedy="Choose another draft, or draft by lookup.")
