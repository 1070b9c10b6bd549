"""What a server says it has: its /models, before or after it is one of ours."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.base import Cancel, RemoteFailed
from backends.reach import Address, Reach
from backends.remote_http import Client, Exchange, Interrupted

LOOK = 15.0                             # seconds that a list of models may take


@dataclass(frozen=True)
class Listed:
    """One model of a server's list. ``context``: where the server says it."""

    name: str
    owner: str = ""
    context: int | None = None


def models(client: Client, cancel: Cancel) -> list[Listed]:
    """What a server says it has; raises as `Client.open`, and RemoteFailed where its list is none. Cancelled."""
    exchange = Exchange(time.monotonic() + LOOK)
    cancel.on_set(exchange.interrupt)
    try:
        raw = client.open("GET", "/models", None, exchange).read_all()
    except Interrupted:
        cancel.raise_if_set("The load")
        raise RemoteFailed(f"The server did not list its models within {LOOK:g} s.", address=client.address) from None
    finally:
        exchange.close()
    try:
        data = json.loads(raw)
        rows = data["data"] if isinstance(data, Mapping) else data
        return [_listed(row) for row in rows]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RemoteFailed("The server's list of models is none.", address=client.address, text=client.quote(raw[:200]),
                           remedy="Check the address: it ends where /models would follow, mostly with /v1.") from error


def _listed(row: Any) -> Listed:
    meta = row.get("meta") if isinstance(row.get("meta"), Mapping) else {}
    context = next((value for value in (row.get("max_model_len"), row.get("context_length"), meta.get("n_ctx"), row.get("context"))
                    if isinstance(value, int) and not isinstance(value, bool) and value > 0), None)
    return Listed(str(row["id"]), str(row.get("owned_by") or ""), context)


def look(address: Address, reach: Reach, cancel: Cancel) -> list[Listed]:
    """The models of a server that is not yet one of ours."""
    client = Client(address, reach, connect=10, silence=LOOK, retries=0)
    try:
        return models(client, cancel)
    finally:
        client.close()
