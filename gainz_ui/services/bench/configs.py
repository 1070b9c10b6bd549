"""The two sides of a comparison: what was asked for, what it became, and in what they differ.

Knows settings and their names; nothing of time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.base import DraftSpec, InvalidRequest, ModelInfo

DRAFT = "draft"
OF_MODEL = ("backend", "format", "architecture", "bits", "parameters", "revision", "vocab_size", "path")
RESOLVED = ("kernels", "device", "dtype", "context", "kv_type", "streams", "threads")


@dataclass(frozen=True)
class Config:
    """``options``: of the load, by name. ``draft``: None = plain decoding."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    draft: DraftSpec | None = None

    @classmethod
    def parse(cls, text: str) -> Config:
        """"NAME" or "NAME,kv_type=int8,threads=2,draft=lookup:4": what `bench --a` takes. InvalidRequest."""
        name, *pairs = text.split(",")
        if not name.strip():
            raise InvalidRequest("A side of a benchmark begins with the name of a model.", field="a", given=text)
        options: dict[str, Any] = {}
        for pair in pairs:
            key, sign, value = pair.partition("=")
            key = key.strip()
            if not sign or not key or key in options:
                raise InvalidRequest(f"{pair!r} is not key=value, or its key was given before.", field="a", given=text,
                                     remedy="Write NAME,key=value,key=value.")
            options[key] = _value(value.strip())
        draft = options.pop(DRAFT, None)
        return cls(name.strip(), options, _draft(str(draft)) if draft is not None else None)

    def __str__(self) -> str:
        parts = [f"{key}={value}" for key, value in self.options.items()]
        if self.draft is not None:
            parts.append(f"draft={self.draft.name}" + (f":{self.draft.length}" if self.draft.length else ""))
        return ",".join((self.model, *parts))


def resolved(config: Config, info: ModelInfo) -> dict[str, Any]:
    """What the side really is, after the load has chosen what was left open: flat, in JSON's values."""
    said = {"model": config.model, **{key: getattr(info, key) for key in (*OF_MODEL, *RESOLVED)},
            "prefix_cache": dict(info.options).get("prefix_cache"),
            "draft": config.draft.name if config.draft else None,
            "draft_length": (config.draft.length or "auto") if config.draft else None}
    known = {key for key in said} | {"kernels", "context"}
    return said | {key: value for key, value in dict(info.options).items() if key not in known}


def digest(values: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits: the same for the same configuration, whenever and wherever it ran."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]


def differences(a: Mapping[str, Any], b: Mapping[str, Any], asked: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Settings that are not the same, with both values. Where the model is another one, what follows from that is not counted
    again (its format, and what was chosen for it without being ``asked`` for); neither is the length of a draft where only one
    side has a draft."""
    found = {key: (a.get(key), b.get(key)) for key in sorted({*a, *b}) if a.get(key) != b.get(key)}
    if "model" in found:
        counted = {"model", DRAFT, "draft_length", *asked} - {*OF_MODEL}
        found = {key: pair for key, pair in found.items() if key in counted}
    if None in found.get(DRAFT, ()):
        found.pop("draft_length", None)
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)


def _draft(text: str) -> DraftSpec | None:
    """"lookup", "NAME:4", "off"."""
    if text in ("off", "none", ""):
        return None
    name, sign, length = text.rpartition(":")
    if not sign or length == "auto":
        return DraftSpec(name if sign else text)
    if not length.isdecimal():
        raise InvalidRequest(f"A draft is NAME or NAME:LENGTH, not {text!r}.", field="draft")
    return DraftSpec(name, int(length))
