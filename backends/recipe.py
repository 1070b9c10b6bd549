"""What can be chosen when a smaller variant of a model is made, and which group sizes fit a model. Light: no torch here.

Knows the values and their limits; forms and the command line are made from them. How a weight is rounded, `compress` knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from backends.base import InvalidRequest

METHODS = ("gptq", "awq")
GPTQ_BITS, AWQ_BITS = (2, 3, 4, 8), (4,)
GROUPS = (16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class QuantizeOptions:
    """``group`` -1: one scale a row. ``head_bits`` 0: the output head stays float. ``refine``: how many times scales and
    codes
    are fitted to each other again. Raises InvalidRequest naming the field."""

    method: str = field(default="gptq", metadata={"label": "Method", "choices": METHODS})
    bits: int = field(default=4, metadata={"label": "Bits", "choices": GPTQ_BITS})
    group: int = field(default=64, metadata={"label": "Group (input columns that share a scale; -1 = a whole row)",
                                             "choices": (-1, *GROUPS)})
    sym: bool = field(default=False, metadata={"label": "Symmetric (no zero points)"})
    act_order: bool = field(default=True, metadata={"label": "GPTQ: important columns first"})
    static_groups: bool = field(default=True, metadata={
        "label": "GPTQ: groups of neighbours even with important columns first (faster kernels)"})
    mse: bool = field(default=True, metadata={"label": "Search the clipping range"})
    refine: int = field(default=1, metadata={"label": "Rounds of refitting scales (0 = plain GPTQ or AWQ)", "low": 0,
                                             "high": 8})
    damp: float = field(default=0.01, metadata={"label": "GPTQ: damping, share of the mean diagonal", "low": 1e-6,
                                                "high": 1.0})
    head_bits: int = field(default=0, metadata={"label": "Bits of the output head (0 = float)", "choices": (0, 4, 8)})
    samples: int = field(default=64, metadata={"label": "Calibration windows", "low": 1, "high": 65_536})
    sample_tokens: int = field(default=512, metadata={"label": "Tokens in a window", "low": 16, "high": 32_768})
    device: str = field(default="auto", metadata={"label": "Device", "choices": ("auto", "cpu", "cuda")})
    precision: str = field(default="auto", metadata={"label": "Type of the calibration passes",
                                                     "choices": ("auto", "float32", "bfloat16")})
    threads: int = field(default=0, metadata={"label": "Threads (0 = auto)", "low": 0, "high": 1024})

    def __post_init__(self) -> None:
        for item in fields(self):
            check_field(item.name, getattr(self, item.name), item.metadata, type(item.default))
        if self.method == "awq" and self.bits not in AWQ_BITS:
            raise InvalidRequest(f"AWQ files hold 4-bit weights, not {self.bits}-bit ones.", field="bits", bits=self.bits,
                                 remedy="Choose 4 bits, or GPTQ for 2, 3 or 8.")
        if self.method == "awq" and self.sym:
            raise InvalidRequest("AWQ variants always have zero points.", field="sym",
                                 remedy="Leave symmetric off, or choose GPTQ.")
        if self.method == "awq" and self.head_bits not in (0, 4):
            raise InvalidRequest("The head of an AWQ file has 4 bits or stays float.", field="head_bits",
                                 head_bits=self.head_bits)
        if self.method == "gptq" and self.head_bits not in (0, self.bits):
            raise InvalidRequest("A GPTQ file has one number of bits for all its matrices, the head's too.",
                                 field="head_bits",
                                 bits=self.bits, head_bits=self.head_bits, remedy=f"Choose head bits 0 or {self.bits}.")

    def public(self) -> dict[str, Any]:
        """What decides the outcome, for a manifest; device and threads do not belong to it."""
        chosen = asdict(self)
        for name in ("device", "threads"):
            del chosen[name]
        if self.method == "awq":
            for name in ("act_order", "static_groups", "damp"):
                del chosen[name]
        return chosen


def check_field(name: str, value: Any, meta: Any, kind: type) -> None:
    number = int if kind is int else (int, float)
    if kind in (int, float) and (isinstance(value, bool) or not isinstance(value, number)) or not isinstance(value,
            kind) and kind in (bool, str):
        raise InvalidRequest(f"{name} must be of the type {kind.__name__}, not {type(value).__name__}.", field=name,
                             **{name: value})
    if "choices" in meta and value not in meta["choices"]:
        raise InvalidRequest(f"{name} must be one of {', '.join(map(str, meta['choices']))}.", field=name, **{name: value})
    if "low" in meta and not meta["low"] <= value <= meta["high"]:
        raise InvalidRequest(f"{name} must be from {meta['low']} to {meta['high']}.", field=name, **{name: value})


def fitting_groups(widths: Iterable[int]) -> tuple[int, ...]:
    """The group sizes that divide every width, and -1, which always fits."""
    wide = set(widths)
    return (-1, *(group for group in GROUPS if all(width % group == 0 for width in wide)))


def check_group(group: int, widths: Iterable[int]) -> None:
    """InvalidRequest naming the groups that fit, where ``group`` does not divide a width (input features of a matrix)."""
    wide = sorted(set(widths))
    odd = [width for width in wide if group > 0 and width % group]
    if odd:
        fits = fitting_groups(wide)
        raise InvalidRequest(
            f"Groups of {group} do not divide this model's matrices: {', '.join(map(str, odd))} input features.",
            field="group",
            group=group, remedy=f"Choose one of the groups that fit: {', '.join(map(str, fits))}.")
