"""auto-gptq and autoawq themselves load what we write and give our logits. Run by `make interop`, in their own
environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.test_quantize import FIXTURES, IDS, logits, make, relative

PYTHON = os.environ.get("GAINZ_INTEROP_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs the interop environment: make interop")

CHOICES = [
    {"method": "gptq"}, {"method": "gptq", "sym": True, "act_order": False}, {"method": "gptq", "static_groups": False},
    {"method": "gptq", "group": -1},
    {"method": "gptq", "bits": 8}, {"method": "gptq", "bits": 2, "group": 32}, {"method": "awq"},
    {"method": "awq", "group": 32}]


@pytest.mark.parametrize("choices", CHOICES, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize("source", ["llama-fp16", "qwen2-fp16"])
def test_the_original_package_gives_our_logits(tmp_path, source, choices):
    folder, _ = make(tmp_path, FIXTURES / source, **choices)
    out = tmp_path / "logits.safetensors"
    script = Path(__file__).with_name("interop_load.py")
    done = subprocess.run([PYTHON, str(script), str(folder), str(out), *map(str, IDS)], capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = load_file(out)["logits"]
    assert relative(theirs, logits(folder, IDS)) < 1e-3
