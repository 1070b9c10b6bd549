"""The benchmark on the real starter: what it finds where there is nothing, and where something was planted. Minutes: `make slow`."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time

import pytest

from backends.base import Cancel, Request, Sampling
from gainz_ui.services import stats
from gainz_ui.services.bench.asking import timed
from gainz_ui.services.bench.configs import Config
from gainz_ui.services.bench.protocol import Design
from gainz_ui.services.bench.run import Ask, bench
from gainz_ui.services.bench.workloads import bundled
from gainz_ui.services.studio import Studio
from gainz_ui.settings import Settings
from tests.test_gguf_backend import starter

pytestmark = [pytest.mark.slow, pytest.mark.starter]
NAME = "starter.gguf"
RUNS, WRONG = 40, 5                     # A against A: so many runs, of which no more may find a difference
OVERHEAD = 0.01                         # of decode speed that the benchmark itself may take
LOAD = "import time\nwhile True:\n    end = time.time() + 0.05\n    while time.time() < end: pass\n    time.sleep(0.05)"


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    home = tmp_path_factory.mktemp("bench")
    (home / "models").mkdir()
    os.link(starter(), home / "models" / NAME) if os.stat(starter()).st_dev == os.stat(home).st_dev else \
        (home / "models" / NAME).symlink_to(starter())
    made = Studio(Settings(models=home / "models", outputs=home / "outputs", logs=home / "logs"))
    made.load(next(entry.name for entry in made.catalog()), {"context": 1024, "streams": 1})
    yield made
    made.close()


def ask(studio, seed=0, **more):
    name = next(iter(studio.loaded()))
    plant = more.pop("plant", 0.0)
    return bench(studio, Ask((Config(name), Config(name)), Design(bundled("prose", tokens=32), seed=seed, **more), plant=plant), "test",
                 lambda _: None, Cancel())


@pytest.mark.parametrize("busy", [False, True])
def test_a_against_a_finds_nothing(studio, busy):
    """40 runs; also beside a program that takes half a core all the time."""
    stranger = subprocess.Popen([sys.executable, "-c", LOAD]) if busy else None
    try:
        words = [ask(studio, seed, pairs=8)["verdict"] for seed in range(RUNS)]
    finally:
        if stranger is not None:
            stranger.kill()
            stranger.wait()
    assert sum(word in (stats.FASTER, stats.SLOWER) for word in words) <= WRONG, words


def test_five_percent_are_found_in_nine_of_ten(studio):
    """Of 32 pairs each; a quiet machine is assumed."""
    words = [ask(studio, seed, pairs=32, plant=0.05)["verdict"] for seed in range(10)]
    assert words.count(stats.SLOWER) >= 9, words


def test_thirty_percent_are_found_at_the_first_look(studio):
    found = ask(studio, plant=0.30)
    assert found["verdict"] == stats.SLOWER and len(found["pairs"]) == stats.LOOKS[0]


def test_the_benchmark_takes_hardly_anything(studio):
    """The engine's own decode speed, read by the benchmark and by a loop that only empties the stream; pairs in random order."""
    model, chance, logs = studio.model(), random.Random(0), []
    prompt = model.tokenize("Once upon a time", special=True)
    for _ in range(32):
        request, found = Request(prompt, Sampling(max_tokens=64, ignore_eos=True)), {}
        for way in chance.sample(("bench", "bare"), 2):
            if way == "bench":
                found[way] = timed(model, request, Cancel(), time.perf_counter).decode
            else:
                found[way] = [event.timing for event in model.generate(request, Cancel()) if event.timing][-1].decode_tokens_per_second
        logs.append(math.log(found["bench"] / found["bare"]))
    estimate = stats.estimate(logs)
    print(f"\nbench / bare: {estimate.ratio:.4f}, interval {estimate.interval}")
    assert estimate.ratio >= 1 - OVERHEAD or estimate.interval[1] >= 1, estimate
