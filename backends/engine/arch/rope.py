"""Rotary tables: inverse frequencies and a factor on cos and sin, by the scaling rule of the config.

Rules: default, linear, llama3, yarn. Those that depend on the length of the running sequence (dynamic, longrope) would
make a key depend on what comes after it; they are refused, so that such a model takes the generic path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backends.base import BrokenFile


@dataclass(frozen=True)
class Rope:
    """``kind`` default, linear, llama3 or yarn; ``width`` rotated columns of a head; ``rule`` the config's numbers."""

    width: int
    theta: float
    kind: str = "default"
    rule: tuple[tuple[str, Any], ...] = ()

    def frequencies(self) -> tuple[Tensor, float]:
        """float32 [width / 2], and what cos and sin are multiplied by."""
        return RULES[self.kind](self, dict(self.rule))


def parameters(config: Mapping[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    """rope_type, rope_theta and the rule's numbers, from the form of transformers 5 (``rope_parameters``) or the older one
    (``rope_theta``, ``rope_scaling``)."""
    rule = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    rule.setdefault("rope_type", rule.pop("type", None) or "default")
    rule.setdefault("rope_theta", config.get("rope_theta") or theta)
    return standard(rule, config)


def standard(rule: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The lengths that yarn and llama3 take from the config where the rule does not have them."""
    if rule["rope_type"] in ("yarn", "llama3"):
        longest, known = config.get("max_position_embeddings"), config.get("original_max_position_embeddings")
        trained = known or rule.get("original_max_position_embeddings") or longest
        rule["original_max_position_embeddings"] = trained
        if rule.get("factor") is None and longest and trained:
            rule["factor"] = longest / trained
    return rule


def rope(rule: Mapping[str, Any], head_dim: int, partial: float = 1.0) -> Rope | None:
    """None where the rule is not one of `RULES`. BrokenFile where it lacks a number that it cannot do without."""
    if rule["rope_type"] not in RULES:
        return None
    for key in NEEDED[rule["rope_type"]]:
        if not isinstance(rule.get(key), (int, float)):
            raise BrokenFile(f"The model's config asks for a {rule['rope_type']} rotation without {key}.", key=key,
                             remedy="Correct the config, or fetch the file again.")
    width = int(head_dim * (rule.get("partial_rotary_factor") or partial))
    rest = tuple(sorted((key, value) for key, value in rule.items()
                 if isinstance(value, (int, float)) and value is not None))
    return Rope(width, float(rule["rope_theta"]), rule["rope_type"], rest)


def tables(positions: Tensor, frequencies: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin float32 [T, R, width / 2] for positions [R], frequencies [T, width / 2] and factors [T]."""
    angles = positions.to(torch.float32)[None, :, None] * frequencies[:, None, :]
    return angles.cos() * factors[:, None, None], angles.sin() * factors[:, None, None]


def _plain(r: Rope, _: Mapping[str, Any] = {}) -> tuple[Tensor, float]:
    return 1.0 / r.theta ** (torch.arange(0, r.width, 2, dtype=torch.int64).to(torch.float32) / r.width), 1.0


def _linear(r: Rope, rule: Mapping[str, Any]) -> tuple[Tensor, float]:
    return _plain(r)[0] / rule["factor"], 1.0


def _llama3(r: Rope, rule: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Long wavelengths are stretched, short ones kept, those between interpolated."""
    plain, _ = _plain(r)
    trained, low, high = rule["original_max_position_embeddings"], rule["low_freq_factor"], rule["high_freq_factor"]
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > trained / low, plain / rule["factor"], plain)
    smooth = (trained / wavelength - low) / (high - low)
    between = (wavelength <= trained / low) & (wavelength >= trained / high)
    return torch.where(between, (1 - smooth) * stretched / rule["factor"] + smooth * stretched, stretched), 1.0


def _yarn(r: Rope, rule: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Peng et al. 2023: a ramp between interpolated and kept frequencies, and a temperature on the scores."""
    trained, factor = rule["original_max_position_embeddings"], rule["factor"]
    place = lambda turns: r.width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(r.theta))  # noqa: E731
    low, high = place(rule.get("beta_fast") or 32), place(rule.get("beta_slow") or 1)
    if rule.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r.width - 1)
    high = high + 0.001 if low == high else high
    kept = 1 - ((torch.arange(r.width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    plain = r.theta ** (torch.arange(0, r.width, 2).to(torch.float32) / r.width)
    return 1.0 / (factor * plain) * (1 - kept) + 1.0 / plain * kept, _yarn_factor(rule, factor)


def _yarn_factor(rule: Mapping[str, Any], factor: float) -> float:
    if rule.get("attention_factor") is not None:
        return float(rule["attention_factor"])
    grow = lambda m: 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0  # noqa: E731
    if rule.get("mscale") and rule.get("mscale_all_dim"):
        return grow(rule["mscale"]) / grow(rule["mscale_all_dim"])
    return grow(1.0)


NEEDED = {"default": (), "linear": ("factor",), "yarn": ("factor", "original_max_position_embeddings"),
          "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
RULES = {"default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
