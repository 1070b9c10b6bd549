"""The weights: which are given, which are made here. The starter in four forms, the synthetic 1.2 B in two.

Knows paths and who can make what; a model that is not there is a reason to show, and what needs it is skipped.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from backends import gguf_file
from benchmarks.peers import plan
from benchmarks.peers.envs import NotThere
from benchmarks.peers.link import Worker

ROOT = Path(__file__).parents[2]
STARTER = "SmolLM2-135M-Instruct"
MOSTLY_Q4_0 = 2                        # llama.cpp's number of the file type


class Files:
    """``given``: model key → path. ``llama`` starts llama.cpp's worker, which requantizes as its own tool does."""

    def __init__(self, folder: Path, given: Mapping[str, Path], llama: Callable[[], Worker]) -> None:
        self.folder, self.given, self._llama = folder, given, llama
        for key in given:
            if key not in KNOWN:
                raise NotThere(f"no model is called {key!r}; known: {', '.join(KNOWN)}")

    def path(self, key: str) -> Path:
        """Made now where it can be. Raises NotThere."""
        found = self.given.get(key) or self._made(key)
        if not found.exists():
            raise NotThere(f"the model {key} is not at {found}; name it with --file {key}=PATH")
        return found

    def _made(self, key: str) -> Path:
        if key in (plan.Q40, plan.PURE):
            return self._requantized(key, pure=key == plan.PURE)
        if key in (plan.BIG, plan.BIG16):
            return self._synthetic(key)
        return ROOT / "models" / {plan.Q41: f"{STARTER}.Q4_1/{STARTER}.Q4_1.gguf", plan.BF16: f"{STARTER}-FP16",
                                  plan.OWN: f"{STARTER}-gptq-g64-h4"}[key]

    def _requantized(self, key: str, pure: bool) -> Path:
        target = self.folder / f"{key}.gguf"
        if not target.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            worker = self._llama()
            worker.ask("requantize", source=str(self.path(plan.Q41)), target=f"{target}.part", type=MOSTLY_Q4_0, threads=2,
                       pure=pure)
            Path(f"{target}.part").rename(target)
        return target

    def _synthetic(self, key: str) -> Path:
        target = self.folder / (f"{key}.gguf" if key == plan.BIG else key)
        if not target.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            kind, tokenizer = ("Q4_0", plan.Q41) if key == plan.BIG else ("BF16", plan.BF16)
            part = target.with_name(f"part-{target.name}")
            subprocess.run([sys.executable, "-m", "benchmarks.synthetic", str(part), "--type", kind, "--tokenizer",
                            str(self.path(tokenizer))], check=True, cwd=ROOT)
            part.rename(target)
        return target

    def read_bytes(self, key: str) -> int:
        """What decoding one token reads of a GGUF file: every tensor, the embeddings only where they are the head too."""
        tensors = gguf_file.read(self.path(key)).tensors
        return sum(t.bytes for name, t in tensors.items() if name != "token_embd.weight" or "output.weight" not in tensors)


KNOWN = (plan.Q41, plan.Q40, plan.PURE, plan.OWN, plan.BF16, plan.BIG, plan.BIG16)
