"""Values of a client that JSON cannot promise the kind of: checked by name, so that a wrong one is one clear error. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from backends.base import InvalidRequest


def whole(value: Any) -> Any:
    """Some clients send whole numbers as 16.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def count(name: str, value: Any) -> int | None:
    """Nothing, or a whole number."""
    found = whole(value)
    if found is not None and (isinstance(found, bool) or not isinstance(found, int)):
        raise InvalidRequest(f"{name} takes a whole number, not {value!r:.40}.", field=name)
    return found


def listed(name: str, value: Any) -> tuple:
    """Nothing, or a list."""
    if value is not None and not isinstance(value, (list, tuple)):
        raise InvalidRequest(f"{name} takes a list, not {type(value).__name__}.", field=name)
    return tuple(value or ())


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be text, not {type(value).__name__}.", field=name)
    return value


def optional_text(name: str, value: Any) -> str | None:
    return None if value is None else text(name, value)


def mapping(name: str, value: Any) -> dict[str, Any]:
    """Nothing, or an object."""
    if value is not None and not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} takes an object of names and values, not {type(value).__name__}.", field=name)
    return dict(value or {})


def biases(given: Any) -> tuple[tuple[int, float], ...]:
    """JSON has only text as keys: they must be token ids all the same. Which ids and values there may be, `Sampling` says."""
    found = mapping("logit_bias", given)
    for key in found:
        if not re.fullmatch(r"-?[0-9]{1,11}", str(key)):
            raise InvalidRequest("logit_bias maps token ids to numbers.", field="logit_bias", key=str(key)[:40])
    return tuple((int(key), value) for key, value in found.items())
