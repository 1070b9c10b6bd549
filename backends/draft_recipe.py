"""What can be chosen when a draft is made. Light: no torch here. Forms and the command line are made from these fields."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from backends.base import InvalidRequest
from backends.recipe import check_field

CHOICES = ("auto", "greedy", "block", "first")
TOKENS, STATES = "tokens", "states"
HERE = ("device", "threads")            # where it runs: no part of what comes of it


@dataclass(frozen=True)
class DraftOptions:
    """``minutes`` 0: pruned and not trained, a whole model of its own. ``steps`` and ``tokens`` 0: as many as the minutes
    allow; with both given the outcome does not depend on the machine's speed. Raises InvalidRequest naming the field."""

    layers: int = field(default=4, metadata={"label": "Layers of the draft", "low": 1, "high": 512})
    minutes: float = field(default=45.0, metadata={"label": "Minutes of training, all in all (0 = only leave layers out)",
                                                   "low": 0.0, "high": 100_000.0})
    head_ids: int = field(default=8192, metadata={"label": "Tokens that the draft may propose (0 = all)", "low": 0,
                                                  "high": 1 << 20})
    bits: int = field(default=4, metadata={"label": "Bits of the draft's layers", "choices": (4, 16)})
    reads: str = field(default=TOKENS, metadata={
        "label": "What the draft reads (states: also the verifier's last hidden state of the token before; it guesses better, and "
                 "only for its parent and variants of it)", "choices": (TOKENS, STATES)})
    choose: str = field(default="auto", metadata={
        "label": "Choice of layers (greedy: by the rise in loss; block: in one pass; first: those at the beginning)", "choices": CHOICES})
    tokens: int = field(default=0, metadata={"label": "Tokens that the model says to its draft (0 = by the minutes)", "low": 0,
                                             "high": 1 << 32})
    steps: int = field(default=0, metadata={"label": "Training steps (0 = by the minutes)", "low": 0, "high": 1 << 24})
    window: int = field(default=512, metadata={"label": "Tokens in a window", "low": 16, "high": 8192})
    batch: int = field(default=4, metadata={"label": "Windows in a step", "low": 1, "high": 1024})
    rate: float = field(default=1e-3, metadata={"label": "Learning rate at its highest", "low": 1e-7, "high": 1.0})
    streams: int = field(default=64, metadata={"label": "Texts said at once", "low": 1, "high": 1024})
    seed: int = field(default=0, metadata={"label": "Seed", "low": 0, "high": 2**53})
    device: str = field(default="auto", metadata={"label": "Device", "choices": ("auto", "cpu", "cuda")})
    precision: str = field(default="auto", metadata={"label": "Type of the products", "choices": ("auto", "float32", "bfloat16")})
    threads: int = field(default=0, metadata={"label": "Threads (0 = auto)", "low": 0, "high": 1024})

    def __post_init__(self) -> None:
        for item in fields(self):
            check_field(item.name, getattr(self, item.name), item.metadata, type(item.default))
        if self.reads_states and not self.trained:
            raise InvalidRequest("A draft learns to read states: without training it cannot.", field="reads", reads=self.reads,
                                 remedy="Allow minutes or steps, or let the draft read tokens.")

    @property
    def trained(self) -> bool:
        return bool(self.minutes or self.steps)

    @property
    def reads_states(self) -> bool:
        return self.reads == STATES

    @property
    def chooses(self) -> str:
        """A draft that reads states does best with the first layers."""
        return "first" if self.choose == "auto" and self.reads_states else self.choose

    def public(self) -> dict[str, Any]:
        """What decides the outcome, for a manifest."""
        return {key: value for key, value in asdict(self).items() if key not in HERE}
