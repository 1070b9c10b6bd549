"""The table of rooms in docs/architecture.md: who may import what, read from every file and tried in fresh processes.

An import under ``if TYPE_CHECKING`` costs nothing at run time and is free. "Lazily" is an import inside a function.
"""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "optimum", "gguf", "safetensors", "tokenizers", "triton")
WEB = ("gradio", "fastapi", "starlette", "uvicorn")
DEEP = ("backends.engine", "backends.kernels", "backends.compress", "backends.evaluate")
FILES = sorted(path.relative_to(ROOT).as_posix() for folder in ("gainz_ui", "backends")
               for path in (ROOT / folder).rglob("*.py")) + ["app.py"]
TOP = tuple(file for file in FILES if file.startswith("backends/") and file.count("/") == 1)


@dataclass(frozen=True)
class Import:
    module: str              # "backends.engine.kv"; of "from a import b" both "a" and "a.b"
    line: int
    lazy: bool               # inside a function


@dataclass(frozen=True)
class Room:
    """``files``: patterns. ``never``: not even lazily. ``late``: only lazily. ``ours``: all of ours it may have."""

    name: str
    files: tuple[str, ...]
    never: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    ours: tuple[str, ...] | None = None


def defines_backend(file: str) -> bool:
    """One file of backends/ is one backend when it assigns BACKEND."""
    assigned = [node for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    return any(isinstance(target, ast.Name) and target.id == "BACKEND" for node in assigned for target in node.targets)


BACKENDS = tuple(file for file in TOP if defines_backend(file))
BACKEND_MODULES = tuple(file.removesuffix(".py").replace("/", ".") for file in BACKENDS)
ROOMS = (
    Room("vocabulary", ("backends/base.py", "backends/characters.py", "backends/errors.py"),
         never=HEAVY + WEB + ("numpy",), ours=("backends.characters", "backends.errors")),
    Room("tabs and what draws them", tuple(f"gainz_ui/{name}.py" for name in (
        "tabs/*", "shell", "forms", "plots", "page", "widgets", "header", "html", "theme", "i18n", "early")),
        never=HEAVY + DEEP + BACKEND_MODULES),
    Room("api", ("gainz_ui/api/*.py",),
         never=HEAVY + DEEP + BACKEND_MODULES + ("gradio", "gainz_ui.tabs", "gainz_ui.shell")),
    Room("services", ("gainz_ui/services/*.py", "gainz_ui/services/bench/*.py"),
         never=HEAVY + WEB + DEEP + BACKEND_MODULES + ("gainz_ui.tabs", "gainz_ui.shell", "gainz_ui.api", "gainz_ui.forms")),
    Room("front", ("app.py", "gainz_ui/*.py"), late=HEAVY + DEEP),
    Room("command line", ("app.py", "gainz_ui/cli.py", "gainz_ui/settings.py", "gainz_ui/commands/*.py"),
         late=HEAVY + WEB + DEEP),
    Room("library", ("backends/*.py",), never=WEB + ("gainz_ui",)),
    Room("backend files", BACKENDS, late=HEAVY + DEEP + ("numpy",)),
    Room("light library", tuple(file for file in TOP if file != "backends/evaluate.py"), late=HEAVY + DEEP),
    Room("engine", ("backends/engine/*.py", "backends/engine/arch/*.py", "backends/compress/*.py", "backends/evaluate.py"),
         never=WEB + ("gainz_ui", "backends.host", "backends.registry", "backends.answer") + BACKEND_MODULES),
    Room("kernels", ("backends/kernels/*.py",), never=WEB, ours=("backends.kernels", "backends.errors")),
)
EXCEPTIONS = {              # file → what it may import all the same
    "backends/host.py": ("backends.engine.worker",),        # the values it sends to the engine process, and its entry
    "backends/engine/worker.py": ("backends.registry",),    # the engine process loads by backend
}


# ---------------------------------------------------------------------------------------------- reading
def imports(source: str) -> list[Import]:
    return list(_walk(ast.parse(source), lazy=False))


def _walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: a relative import hides where it goes"
            yield Import(child.module, child.lineno, lazy)
            yield from (Import(f"{child.module}.{alias.name}", child.lineno, lazy) for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from (found for part in child.orelse for found in _walk(part, lazy))
        else:
            yield from _walk(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def within(module: str, roots: tuple[str, ...]) -> bool:
    return any(module == root or module.startswith(root + ".") for root in roots)


def breaches(room: Room, source: str, allowed: tuple[str, ...] = ()) -> list[str]:
    found = []
    for item in imports(source):
        if within(item.module, allowed) or any(within(other, (item.module,)) for other in allowed):
            continue
        early = not item.lazy and within(item.module, room.late)
        if within(item.module, room.never) or early or _foreign(item.module, room.ours):
            found.append(f"line {item.line}: {item.module}")
    return found


def _foreign(module: str, ours: tuple[str, ...] | None) -> bool:
    if ours is None or not within(module, ("backends", "gainz_ui")):
        return False
    return not within(module, ours) and not any(within(own, (module,)) for own in ours)


def in_room(file: str, room: Room) -> bool:
    """A pattern's * stays within one folder."""
    return any(fnmatch.fnmatch(file, pattern) and file.count("/") == pattern.count("/") for pattern in room.files)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_files_import_what_their_room_may(room):
    wrong = {file: found for file in FILES if in_room(file, room)
             if (found := breaches(room, (ROOT / file).read_text(encoding="utf-8"), EXCEPTIONS.get(file, ())))}
    assert not wrong


def test_every_file_has_a_room():
    homeless = [file for file in FILES if not any(in_room(file, room) for room in ROOMS)]
    assert [file for file in homeless if not file.endswith("__init__.py")] == []


def test_the_reader_sees_through_the_ways_to_import():
    source = ("import torch\nfrom backends import engine\nfrom typing import TYPE_CHECKING\n"
              "if TYPE_CHECKING:\n    import gradio\n"
              "try:\n    import fastapi\nexcept ImportError:\n    pass\n"
              "class A:\n    import starlette\n    def f(self):\n        import transformers\n")
    seen = {(item.module, item.lazy) for item in imports(source)}
    assert ("torch", False) in seen and ("fastapi", False) in seen and ("starlette", False) in seen
    assert ("backends.engine", False) in seen and ("transformers", True) in seen
    assert not any(module == "gradio" for module, _ in seen)
    assert breaches(Room("x", (), never=("torch",), late=("transformers",)), source) == ["line 1: torch"]
    narrow = Room("x", (), ours=("backends.errors",))
    assert breaches(narrow, "import backends.base\nimport backends.errors\n") == ["line 1: backends.base"]


# ---------------------------------------------------------------------------------------------- trying
TRY = """
import importlib, sys
sys.path.insert(0, {root!r})
for name in {names!r}:
    importlib.import_module(name)
    loaded = [heavy for heavy in {heavy!r} if heavy in sys.modules]
    if loaded:
        sys.exit(f"importing {{name}} loaded {{', '.join(loaded)}}")
"""


def modules(*patterns: str) -> list[str]:
    chosen = [file for file in FILES if in_room(file, Room("", patterns))]
    return [file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in chosen]


LIGHT = {
    "vocabulary": (modules("backends/base.py", "backends/errors.py"), HEAVY + WEB + ("numpy", "psutil")),
    "library": (modules(*(f"backends/{name}.py" for name in (
        "registry", "host", "estimate", "facts", "gguf_file", "memory", "link", "answer", "speculative")), *BACKENDS),
        HEAVY + WEB),
    "settings and command line": (
        modules("app.py", "gainz_ui/settings.py", "gainz_ui/cli.py", "gainz_ui/commands/*.py"), HEAVY + WEB),
    "services": (modules("gainz_ui/services/*.py"), HEAVY + WEB),
    "api": (modules("gainz_ui/api/*.py"), HEAVY + ("gradio",)),
    "page": (modules("gainz_ui/*.py", "gainz_ui/tabs/*.py"), ("torch", "transformers")),
}


@pytest.mark.parametrize("room", LIGHT)
def test_importing_a_light_room_leaves_the_heavy_modules_alone(room):
    names, heavy = LIGHT[room]
    assert names
    script = TRY.format(root=str(ROOT), names=names, heavy=heavy)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
