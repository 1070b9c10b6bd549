"""Half of a surrogate pair, as JSON can carry it ("\\udc00"): no character, and nothing that UTF-8 has bytes for, so that no file, log or
tokenizer can hold it. What comes from a client is refused (`check_characters`); what is told of it is mended (`printable`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from backends.errors import InvalidRequest

HALF = re.compile("[\ud800-\udfff]")
LONGEST = 255                           # signs of a name that a record or a message holds: what a file's may have


def check_characters(name: str, value: Any) -> Any:
    """``value``, of JSON, unless a text or a field's name anywhere in it holds one: InvalidRequest with the way there. ``name``: what the
    value is called; "" = a whole body."""
    if _broken(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)):     # at once: a body has many texts
        _point(name, value)
    return value


def _point(way: str, value: Any) -> None:
    if isinstance(value, str) and _broken(value):
        raise _fault(way)
    if isinstance(value, Mapping):
        for key, item in value.items():
            inner = f"{way}.{key}" if way else key
            if _broken(key):
                raise _fault(inner, "The name of the field ")
            _point(inner, item)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            _point(f"{way}.{place}" if way else str(place), item)


def _broken(text: str) -> bool:
    return not text.isascii() and HALF.search(text) is not None


def _fault(way: str, what: str = "") -> InvalidRequest:
    return InvalidRequest(f"{what}{printable(way) or 'it'} holds half of a surrogate pair, which is no character.", field=printable(way) or None)


def printable(text: str, most: int = LONGEST) -> str:
    """For a record, a log or a message: U+FFFD where half a pair stood, and no longer than ``most`` signs."""
    return HALF.sub("\ufffd", text if len(text) <= most else text[:most - 1] + "…")
