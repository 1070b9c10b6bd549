"""Which backends there are and which of them a model belongs to.

Knows how to find the files of a package that define ``BACKEND`` and how to ask them for their claims. Refuses to know any
backend by name: a new format is a new file. Nothing here imports torch; a backend imports its libraries when it loads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backends.base import (
    Backend, Cancel, Claim, Decoder, InvalidRequest, MissingRequirement, Model, ModelDir, NotSupported, Progress,
    ProgressFn, RegistryError, UnknownFormat, make_options)
from backends.sizes import check_config

_DEFINES = re.compile(r"^BACKEND\b\s*[:=]", re.MULTILINE)


def _quiet(_: Progress) -> None:
    """The progress of somebody who does not watch."""


def _candidates(package: str) -> list[tuple[str, Path]]:
    """(module, file) of every file of ``package`` that defines BACKEND. Read as text: the other files of the folder are
    none of the registry's business, and some of them are heavy to import."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RegistryError(f"{package!r} is no package to look for backends in.", package=package)
    files = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.py"))
    return [(f"{package}.{file.stem}", file) for file in files
            if file.stem.isidentifier() and _DEFINES.search(file.read_text(encoding="utf-8"))]


def _unavailable(module: str, needs: str) -> Backend:
    """Stands in for a file that cannot even be imported: it is shown with its reason and claims nothing."""

    def refuse(*_: Any) -> Model:
        raise MissingRequirement(f"The backend {module} needs {needs}.", backend=module, needs=needs)

    name = module.rpartition(".")[2]
    return Backend(name, name, (needs.partition(".")[0],), object, lambda _: None, refuse)


def _import(module: str, file: Path) -> Backend:
    try:
        found = import_module(module).BACKEND
    except ModuleNotFoundError as error:
        if error.name is None or find_spec(error.name.partition(".")[0]) is not None:
            raise RegistryError(f"{file.name} cannot be imported.", file=file, reason=error) from error
        return _unavailable(module, error.name)
    if not isinstance(found, Backend):
        raise RegistryError(f"BACKEND in {file.name} is no Backend.", file=file, type=type(found).__name__)
    return found


@dataclass(frozen=True)
class Registry:
    """The backends of one package, by (order, name)."""

    backends: tuple[Backend, ...]

    @classmethod
    def scan(cls, package: str = "backends") -> Registry:
        """RegistryError where two files define the same name, or a file's BACKEND is none."""
        return cls.of({str(file): _import(module, file) for module, file in _candidates(package)})

    @classmethod
    def of(cls, found: dict[str, Backend]) -> Registry:
        """From place → backend; the places are named when two backends share a name."""
        homes: dict[str, str] = {}
        for place, backend in found.items():
            if backend.name in homes:
                raise RegistryError(f"Two files define a backend {backend.name!r}: {homes[backend.name]} and {place}.",
                                    name=backend.name, first=homes[backend.name], second=place)
            homes[backend.name] = place
        return cls(tuple(sorted(found.values(), key=lambda backend: (backend.order, backend.name))))

    def get(self, name: str) -> Backend:
        for backend in self.backends:
            if backend.name == name:
                return backend
        raise InvalidRequest(f"There is no backend {name!r}.", field="backend",
                             remedy=f"Known backends: {', '.join(backend.name for backend in self.backends)}.")

    def claim(self, model: ModelDir) -> tuple[Backend, Claim]:
        """The backend with the highest claim. UnknownFormat: nobody claims it; RegistryError: two claim it alike; BrokenFile: its
        config names impossible sizes; a backend's own refusal (a pickle, a contradiction between two files) is raised as it is,
        since a backend that sees less of the model must not load it in its place."""
        check_config(model.config)
        claims = [(claim, backend) for backend in self.backends if (claim := backend.claims(model)) is not None]
        if not claims:
            raise UnknownFormat(f"No backend reads {model.name!r}.", model=model.name, files=_some(model.files))
        best = max(claim.score for claim, _ in claims)
        first, *others = [(claim, backend) for claim, backend in claims if claim.score == best]
        if others:
            names = [backend.name for _, backend in (first, *others)]
            raise RegistryError(f"The backends {' and '.join(names)} claim {model.name!r} alike.", model=model.name,
                                score=best, reasons="; ".join(claim.reason for claim, _ in (first, *others)))
        return first[1], first[0]

    def pick(self, model: ModelDir, name: str | None = None) -> Backend:
        """The backend asked for by name, or the one that claims the model; MissingRequirement where it cannot run here."""
        backend = self.claim(model)[0] if name is None else self.get(name)
        if missing := backend.missing():
            raise MissingRequirement(f"The backend {backend.name} needs {', '.join(missing)}.", backend=backend.name,
                                     needs=", ".join(missing))
        return backend


def _some(names: tuple[str, ...], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "none"


def load_model(path: str | Path, *, backend: str | None = None, progress: ProgressFn = _quiet, cancel: Cancel | None = None,
               **options: Any) -> Model:
    """The model at ``path``, in this process: for tests, tools and quality reports. Options are those of its backend."""
    model = ModelDir.of(path)
    chosen = Registry.scan().pick(model, backend)
    return chosen.load(model, make_options(chosen.options, options), progress, cancel or Cancel())


def load_decoder(path: str | Path, *, backend: str | None = None, **options: Any) -> Decoder:
    """The token level of the model at ``path``, in this process. NotSupported for a model that is only reached by text."""
    model = load_model(path, backend=backend, **options)
    decoder = getattr(model, "decoder", None)
    if decoder is None:
        model.close()
        raise NotSupported(f"{model.info.name!r} has no token level.", backend=model.info.backend)
    return decoder
