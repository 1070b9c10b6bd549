"""Many at once on the whole program, with some that leave, some that are wrong and a model that comes and goes: short here, half an
hour by `make slow` (`benchmarks/soak.py`). Cases KV-09, KV-11, SV-02: pages come back, texts are those of a request alone.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import soak

ROOT = Path(__file__).parents[1]


@pytest.fixture
def models(tmp_path):
    for name in ("llama-fp16", "qwen2-fp16"):
        shutil.copytree(ROOT / "tests" / "fixtures" / name, tmp_path / name)
    return tmp_path


def test_kv_09_kv_11_a_short_soak(models, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seen = soak.soak(soak.Plan(models, "llama-fp16", "qwen2-fp16", seconds=6, churn=2.0, tokens=24))
    assert seen.faults(memory=False) == []
    assert seen.requests > 20 and seen.aborted > 0 and seen.loads > 0 and seen.tokens > 200, seen


@pytest.mark.slow
@pytest.mark.starter
def test_half_an_hour_changes_nothing(models):
    starter = ROOT / "models" / "starter"
    if not starter.exists():
        pytest.skip("the starter model is not here: make starter")
    (models / "starter").symlink_to(starter, target_is_directory=True)
    seen = soak.soak(soak.Plan(models, "starter", "llama-fp16", seconds=1800))
    assert seen.faults() == []
    assert seen.requests > 1000 and seen.loads > 20, replace(seen, memory=[])


def test_growth_is_that_of_medians_after_the_warm_up():
    memory = [(float(t), 100.0 if t < 25 else 200.0 if t < 75 else 210.0, 50.0) for t in range(100)]
    assert soak.growth(memory, 100.0) == {"engine": pytest.approx(0.05), "front": 0.0}
    assert soak.growth(memory[:10], 100.0) == {}


def test_every_fault_is_told():
    good = soak.Outcome(pages_used=0, running=0, stop_seconds=1.0)
    assert good.faults() == []
    for fault in ({"wrong": ["x"]}, {"failed": ["x"]}, {"growth": {"engine": 0.04}}, {"pages_used": 2.0}, {"running": 1.0}, {"stop_seconds": 6.0}):
        assert len(replace(good, **fault).faults()) == 1, fault
