"""API keys: several, revocable, each with limits of its own. The file holds digests, never a key; it is read again when it changes,
so that a revoked key stops at once and without a restart.

A key is 256 random bits, so that one round of SHA-256 hides it: there is nothing to guess from. Knows nothing of HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from backends.base import BadSetting, NameTaken
from backends.characters import check_characters
from gainz_ui.services.private import write_private

log = logging.getLogger(__name__)
PREFIX, MINUTE = "gz-", 60.0
LOOK_SECONDS = 0.5              # how old what is known of the file may be
PLACE = "gainz.key"             # where a request's scope holds whose key it came with


@dataclass(frozen=True)
class KeyLimits:
    """0 = none. ``output_tokens`` and ``prompt_tokens`` hold for one request, all its choices together."""

    per_minute: int = 0
    concurrent: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 10**9:
                raise BadSetting(f"The limit {name} is a whole number from 0 to 1000000000.", field=name, value=value)

    @property
    def any(self) -> bool:
        return any(asdict(self).values())


@dataclass(frozen=True)
class Key:
    """``id`` names it in lists and logs; ``revoked``: when, "" = it is valid."""

    id: str
    name: str
    digest: str
    created: str
    limits: KeyLimits = KeyLimits()
    revoked: str = ""


def digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


class KeyFile:
    """The keys on disk. Changes are made whole under a lock; only this user can read the file."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def read(self) -> list[Key]:
        """BadSetting where it is no file of keys: a server must not take that for no keys."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BadSetting(f"{self.path} cannot be read.", field="keys", reason=error.strerror) from error
        try:
            return [Key(**{**item, "limits": KeyLimits(**item["limits"])}) for item in json.loads(text)["keys"]]
        except (ValueError, TypeError, KeyError) as error:
            raise BadSetting(f"{self.path} is no file of keys.", field="keys", reason=error,
                             remedy="Restore it, or delete it and make new keys.") from error

    def add(self, name: str, limits: KeyLimits = KeyLimits()) -> tuple[Key, str]:
        """The entry, and the key itself: the only time that it is seen. NameTaken."""
        secret = PREFIX + secrets.token_urlsafe(32)
        made = Key(secrets.token_hex(4), check_characters("name", name), digest(secret), _now(), limits)
        with self._changing() as keys:
            if any(key.name == name and not key.revoked for key in keys):
                raise NameTaken(f"There is a key named {name!r} already.", field="name", remedy="Choose another name, or revoke it first.")
            keys.append(made)
        return made, secret

    def revoke(self, which: str) -> Key:
        """By id or name. BadSetting lists what there is."""
        with self._changing() as keys:
            for place, key in enumerate(keys):
                if which in (key.id, key.name) and not key.revoked:
                    keys[place] = replace(key, revoked=_now())
                    return keys[place]
            valid = ", ".join(f"{key.name} ({key.id})" for key in keys if not key.revoked)
            raise BadSetting(f"There is no valid key {which!r}.", field="key", remedy=f"Valid keys: {valid or 'none'}.")

    @contextmanager
    def _changing(self):
        with FileLock(f"{self.path}.lock"):
            keys = self.read()
            before = list(keys)
            yield keys
            if keys != before:
                write_private(self.path, {"keys": [asdict(key) for key in keys]})


# ---------------------------------------------------------------------------------------------- in use
@dataclass(eq=False)
class Holder:
    """One key in use: what of its limits is left."""

    id: str
    name: str
    limits: KeyLimits
    running: int = 0
    recent: deque = field(default_factory=deque)        # when requests of the last minute came

    def refusal(self, now: float) -> tuple[str, float] | None:
        """Why no request may begin now, and in how many seconds it may; None: it may."""
        while self.recent and self.recent[0] <= now - MINUTE:
            self.recent.popleft()
        limits = self.limits
        if limits.per_minute and len(self.recent) >= limits.per_minute:
            return f"This key may begin {limits.per_minute} requests a minute.", self.recent[0] + MINUTE - now
        if limits.concurrent and self.running >= limits.concurrent:
            return f"This key may have {limits.concurrent} requests at once.", 1.0
        return None


class KeyRing:
    """Who presents which key. ``single``: the one of the settings, without limits. Thread-safe; asked for every request."""

    def __init__(self, file: KeyFile | None = None, single: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock, self._lock = file, clock, threading.Lock()
        self._own = (digest(single), Holder("settings", "settings", KeyLimits())) if single else None
        self._holders: dict[str, Holder] = {}
        self._digests: tuple[tuple[str, str], ...] = ()      # (digest, id) of valid keys
        self._listed = False
        self._seen: Any = None
        self._looked = -LOOK_SECONDS
        self._look()

    @property
    def required(self) -> bool:
        """Whether a key is asked for. A file of which all keys were revoked opens nothing."""
        self._look()
        return self._own is not None or self._listed

    def find(self, presented: str) -> Holder | None:
        """Compares with every key, in constant time, so that the time says nothing about where it differs."""
        self._look()
        given, found = digest(presented), None
        if self._own is not None and hmac.compare_digest(given, self._own[0]):
            found = self._own[1]
        for known, name in self._digests:
            if hmac.compare_digest(given, known):
                found = self._holders[name]
        return found

    def begin(self, holder: Holder) -> tuple[str, float] | None:
        """Count a request that begins; the refusal where the key has no more."""
        with self._lock:
            now = self._clock()
            refused = holder.refusal(now)
            if refused is None:
                holder.recent.append(now)
                holder.running += 1
            return refused

    def end(self, holder: Holder) -> None:
        with self._lock:
            holder.running -= 1

    def _look(self) -> None:
        """Read the file again if it has changed. One that became unreadable leaves no key valid."""
        if self._file is None or self._clock() - self._looked < LOOK_SECONDS:
            return
        with self._lock:
            self._looked = self._clock()
            seen = _signature(self._file.path)
            if seen == self._seen:
                return
            first, self._seen = self._seen is None and not self._listed, seen
            self._listed, self._digests = bool(seen), ()
            try:
                keys = self._file.read()
            except BadSetting:
                if first:
                    raise
                log.exception("the file of keys cannot be read: nobody may come in")
                return
            valid = [key for key in keys if not key.revoked]
            self._listed = bool(keys)
            self._holders = {key.id: self._kept(key) for key in valid}
            self._digests = tuple((key.digest, key.id) for key in valid)

    def _kept(self, key: Key) -> Holder:
        known = self._holders.get(key.id)
        if known is None:
            return Holder(key.id, key.name, key.limits)
        known.limits = key.limits
        return known


def label(scope: Mapping[str, Any]) -> str:
    """How the key of a request is called, "" = none was asked for. Never the key itself."""
    found = scope.get(PLACE)
    return found.name if found else ""


def _signature(path: Path) -> Any:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
