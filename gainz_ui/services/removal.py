"""A model leaves models/ under a running server: whether it may, and why not. What is deleted, the store knows."""

from __future__ import annotations

from typing import Any

from backends.base import InvalidRequest


def check(studio: Any, name: str) -> Any:
    """Its entry. InvalidRequest while it is in memory, or another model borrows from it; ModelNotFound."""
    entry = studio.entry(name)
    if entry.loaded:
        raise InvalidRequest(f"{name} is loaded.", field="model", remedy="Unload it first.")
    if any(item.name == name for item in studio.snapshot().loading):
        raise InvalidRequest(f"{name} is being loaded.", field="model", remedy="Cancel that first.")
    drafts = [other.name for other in studio.catalog() if other.helper and other.parent == name]
    if drafts:
        raise InvalidRequest(f"{', '.join(drafts)} borrows embeddings and head from {name}.", field="model", remedy="Remove the draft first.")
    return entry


def remove(studio: Any, store: Any, name: str) -> None:
    """For good, with the revisions that are kept of it; everybody is told. What `check` raises."""
    check(studio, name)
    store.remove(name)
    studio.changed.emit()
