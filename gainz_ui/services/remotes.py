"""Another server's model as one of ours: look what a server has, and make the folder whose manifest names it.

Knows manifests and keys; how such a model answers, the backend knows. The key goes to the file of keys, never into the folder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from backends.base import Cancel, InvalidRequest, NameTaken, RemoteUnreachable
from backends.reach import Address
from backends.remote_list import Listed, look
from gainz_ui.services.imports import plain_name
from gainz_ui.services.store import Store, check_name


def listed(studio: Any, address: str, key: str = "", cancel: Cancel | None = None) -> list[Listed]:
    """What the server says it has, asked with ``key`` or else the one that is kept. AddressRefused, RemoteUnreachable, RemoteFailed."""
    where, reach = Address.parse(address), studio.reach
    if key:
        reach = replace(reach, key=lambda origin: key if origin == where.origin else None)
    try:
        return look(where, reach, cancel or Cancel())
    except RemoteUnreachable as error:
        error.remedy = "Start that server, or correct the address."     # it is no model yet, and has no manifest
        raise


def add(studio: Any, store: Store, address: str, model: str = "", name: str = "", key: str = "", cancel: Cancel | None = None) -> str:
    """The name of the new entry of models/. ``model`` may be left out where the server has one only. Asked first, then written:
    a server that does not answer becomes no model. What `listed` raises; InvalidRequest; NameTaken, NameRefused."""
    where = Address.parse(address)
    name = check_name(name) if name else ""
    found = [row.name for row in listed(studio, address, key, cancel)]
    model = _chosen(model, found)
    name = name or plain_name(model.rpartition("/")[2])
    if store.path(name).exists():
        raise NameTaken(f"There is a model {name!r} already; it is not overwritten.", field="name")
    if key:
        studio.remote_keys.put(where, key)
    with store.gather(name, cancel=cancel) as staging:
        return store.admit(staging, name, manifest(where, model))


def _chosen(model: str, found: list[str]) -> str:
    if model and (model in found or not found):
        return model
    if not model and len(found) == 1:
        return found[0]
    what = f"The server has no model {model!r}." if model else "The server names no model; say which one." if not found else \
        "The server has several models; name one."
    raise InvalidRequest(what, field="model", remedy=f"It has: {', '.join(found[:20]) or 'none that it lists'}.")


def manifest(address: Address, model: str) -> dict[str, Any]:
    """What a folder needs in order to be a server's model; it may be written by hand as well."""
    return {"source": str(address), "revision": None, "how": "answered by another server", "format": "OpenAI API", "bits": None,
            "files": [], "remote": {"address": str(address), "model": model}}
