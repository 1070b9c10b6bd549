"""What lies in models/: every entry, loadable or not, with the reason. Reads names and small JSON; loads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from backends.base import BrokenFile, GainzError, ModelDir, ModelNotFound, NameRefused
from backends.registry import Registry

UNFINISHED = "a fetch of it is unfinished: start it again, and it goes on where it stopped"


@dataclass(frozen=True)
class CatalogEntry:
    """One folder or .gguf file of models/. ``reason`` says why it cannot be loaded; "" = it can."""

    name: str
    path: Path
    size: int                           # bytes on disk
    reason: str = ""
    code: str = ""                      # the error's code behind ``reason``
    backend: str = ""                   # registry name, "" = nobody claims it
    title: str = ""                     # the backend's title
    format: str = ""                    # "GGUF Q4_1", "safetensors" …
    bits: float | None = None           # mean bits per weight, where the claim knows
    local: bool = True                  # False: answered by another server
    loaded: bool = False
    helper: bool = False                # a draft: it serves another model
    revision: str | None = None         # from manifest.json
    source: str = ""                    # where it came from, from manifest.json
    parent: str = ""                    # the model that it was made from here, from manifest.json
    notes: tuple[str, ...] = ()         # from manifest.json, e.g. "dequantized from Q4_1"

    @property
    def ready(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class BackendEntry:
    name: str
    title: str
    available: bool
    reason: str = ""                    # "needs X"
    local: bool = True


def backend_entries(registry: Registry) -> list[BackendEntry]:
    """Every backend, the unavailable ones with what they need."""
    lacks = {backend: ", ".join(backend.missing()) for backend in registry.backends}
    return [BackendEntry(backend.name, backend.title, not missing, f"needs {missing}" if missing else "", backend.local)
            for backend, missing in lacks.items()]


def places(models: Path) -> dict[str, Path]:
    """Name → folder or .gguf file, in order. Hidden entries and other files are none; a file whose stem is a folder's name
    keeps its ending, so that every name means one thing."""
    if not models.is_dir():
        return {}
    found = sorted((path for path in models.iterdir() if not path.name.startswith(".")), key=lambda path: path.name.lower())
    folders = {path.name: path for path in found if path.is_dir()}
    files = {path.name if path.stem in folders else path.stem: path for path in found
             if path.is_file() and path.name.lower().endswith((".gguf", ".gguf.part"))}
    return dict(sorted({**folders, **files}.items(), key=lambda item: item[0].lower()))


def locate(models: Path, name: str) -> Path:
    """The place of one entry. NameRefused for a name that would leave the folder, ModelNotFound listing the names."""
    if not isinstance(name, str) or not name or name in {".", ".."} or any(sign in name for sign in "/\\\0"):
        raise NameRefused(f"{name!r} is no name of a model.", field="model")
    found = places(models)
    if name not in found:
        raise ModelNotFound(f"There is no model {name!r}.", field="model",
                            remedy=f"Models here: {', '.join(found) or 'none yet'}.")
    return found[name]


def unfinished(model: ModelDir) -> str:
    """Why the files are not all there yet, or "": a partial one, or one of the manifest that is missing or short."""
    if model.path.name.endswith(".part") or model.ending(".part"):
        return UNFINISHED
    for name, size in _listed(model.manifest):
        path = model.folder / name
        if not path.is_file():
            return f"{name} of its manifest is missing: {UNFINISHED}"
        if size is not None and path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, its manifest says {size}: {UNFINISHED}"
    return ""


def _listed(manifest: Mapping) -> Iterator[tuple[str, int | None]]:
    """(name, bytes) of the manifest's files, which it gives as a mapping by name or as a list of objects."""
    files = manifest.get("files", ())
    items = files.items() if isinstance(files, Mapping) else \
        [(entry.get("path") or entry.get("name"), entry) for entry in files if isinstance(entry, Mapping)]
    for name, facts in items:
        if isinstance(name, str) and ".." not in Path(name).parts and not Path(name).is_absolute():
            size = facts.get("size", facts.get("bytes")) if isinstance(facts, Mapping) else None
            yield name, size if isinstance(size, int) else None


def disk_bytes(model: ModelDir) -> int:
    return sum((model.folder / name).stat().st_size for name in model.files if (model.folder / name).is_file())


def examine(registry: Registry, name: str, path: Path, loaded: bool = False) -> CatalogEntry:
    """One entry. Its faults end up in ``reason``: the catalog shows them, a load raises them."""
    try:
        model = ModelDir.of(path, name)
    except BrokenFile as error:
        return CatalogEntry(name, path, 0, reason=str(error), code=error.code, loaded=loaded)
    facts = dict(size=disk_bytes(model), loaded=loaded, **_origin(model.manifest))
    if reason := unfinished(model):
        return CatalogEntry(name, path, reason=reason, code="unfinished", **facts)
    try:
        backend, claim = registry.claim(model)
    except GainzError as error:
        return CatalogEntry(name, path, reason=str(error), code=error.code, **facts)
    missing = backend.missing()
    return CatalogEntry(name, path, backend=backend.name, title=backend.title, format=claim.format, bits=claim.bits,
                        local=backend.local, helper=backend.helper, reason=f"unavailable: needs {', '.join(missing)}" if missing else "",
                        code="missing_requirement" if missing else "", **facts)


def _origin(manifest: Mapping) -> dict:
    notes, parent = manifest.get("notes", ()), manifest.get("parent")
    return {"parent": str(parent.get("name") or "") if isinstance(parent, Mapping) else "",
            "revision": manifest.get("revision") or None, "source": str(manifest.get("source") or ""),
            "notes": (notes,) if isinstance(notes, str) else tuple(str(note) for note in notes)}
