"""Keys of other servers: in the environment, or in a file that only its owner may read. Never in a manifest, a log or a setting.

A key belongs to an origin ("https://host:443"), not to a model's name: whoever can change a manifest cannot send it elsewhere.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from backends.base import BadSetting, InvalidRequest
from backends.reach import Address
from gainz_ui.services.private import write_private

VARIABLE = "GAINZ_REMOTE_KEY"           # "http://host:8000=KEY https://other=KEY"
LONGEST = 4096


class RemoteKeys:
    """``environment``: where `VARIABLE` may be; it goes before the file. Read at each use: a key that is changed holds at once."""

    def __init__(self, path: Path, environment: Mapping[str, str] | None = None) -> None:
        self.path, self._environment = Path(path), os.environ if environment is None else environment

    def find(self, origin: str) -> str | None:
        """BadSetting for a file that others may read, or that is none of ours."""
        return self._from_environment().get(origin) or self._read().get(origin)

    def put(self, address: Address, key: str) -> None:
        """Keep a server's key; "" forgets it. InvalidRequest for what no header can carry; DiskFull."""
        if key and (not key.isascii() or not key.isprintable() or " " in key or len(key) > LONGEST):
            raise InvalidRequest("A key is one line of plain characters, without blanks.", field="key")
        with FileLock(f"{self.path}.lock"):
            keys = self._read()
            keys = {origin: kept for origin, kept in keys.items() if origin != address.origin} | ({address.origin: key} if key else {})
            write_private(self.path, keys)

    def origins(self) -> list[str]:
        """Of which servers there is a key. What a diagnosis may tell."""
        return sorted({*self._read(), *self._from_environment()})

    def _from_environment(self) -> dict[str, str]:
        found = {}
        for pair in self._environment.get(VARIABLE, "").split():
            place, sign, key = pair.partition("=")
            try:
                origin = Address.parse(place).origin
            except InvalidRequest as error:
                raise BadSetting(f"{VARIABLE} is no list of ADDRESS=KEY.", field=VARIABLE) from error    # without the pair: it holds a key
            if not sign or not key:
                raise BadSetting(f"{VARIABLE} is no list of ADDRESS=KEY.", field=VARIABLE)
            found[origin] = key
        return found

    def _read(self) -> dict[str, str]:
        try:
            with self.path.open(encoding="utf-8") as file:
                if os.name == "posix" and os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                    raise BadSetting(f"{self.path} holds keys, and others may read it.", file=self.path, remedy=f"chmod 600 {self.path}")
                found = json.load(file)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise BadSetting(f"{self.path} cannot be read as keys of other servers.", file=self.path,
                             reason=type(error).__name__) from error
        if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
            raise BadSetting(f"{self.path} holds no keys of other servers.", file=self.path)
        return found
