"""The benchmark on the real starter: what it finds where there is nothing, and where something was planted. Minutes: `make slow`."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from statistics import median

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
TOKENS = 24                             # of an answer: long enough for a speed, short enough for hundreds of pairs
OVERHEAD = 0.01                         # of decode speed that the benchmark itself may take
EVIDENCE = (64, 128, 256)               # pairs after which it is looked whether that is shown
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
    began = time.monotonic()
    found = bench(studio, Ask((Config(name), Config(name)), Design(bundled("prose", tokens=TOKENS), seed=seed, **more), plant=plant), "test",
                  lambda _: None, Cancel())
    half = f"± {100 * (math.sqrt(found['interval'][1] / found['interval'][0]) - 1):.1f} %" if found["interval"] else "no interval"
    print(f"{seed}: {word(found)} {found['ratio']:.3f} {half}, {len(found['pairs'])} pairs, {found['noisy']} noisy, {found['repeated']} again, "
          f"{time.monotonic() - began:.1f} s", flush=True)
    return found


def word(found):
    """What the interval says, also where the verdict is withheld from a person: a machine that is too coarse must not hide errors."""
    return stats.verdict(stats.Estimate(found["units"], found["ratio"], found["geometric_mean"], found["interval"], found["level"])).word


@pytest.mark.parametrize("busy", [False, True])
def test_a_against_a_finds_nothing(studio, busy):
    """40 runs; also beside a program that takes half a core all the time. One that errs too often ends as soon as it has."""
    stranger = subprocess.Popen([sys.executable, "-c", LOAD]) if busy else None
    try:
        wrong = 0
        for seed in range(RUNS):
            wrong += word(ask(studio, seed, pairs=8)) in (stats.FASTER, stats.SLOWER)
            assert wrong <= WRONG, f"{wrong} of {seed + 1}"
    finally:
        if stranger is not None:
            stranger.kill()
            stranger.wait()


def test_five_percent_are_found_in_nine_of_ten(studio):
    """Of 32 pairs each; a quiet machine is assumed."""
    missed = 0
    for seed in range(10):
        missed += word(ask(studio, seed, pairs=32, plant=0.05)) != stats.SLOWER
        assert missed <= 1, f"{missed} of {seed + 1}"


def test_thirty_percent_are_found_at_the_first_look(studio):
    found = ask(studio, plant=0.30)
    assert found["verdict"] == stats.SLOWER and len(found["pairs"]) == stats.LOOKS[0]


def test_the_benchmark_takes_hardly_anything(studio):
    """Beside a loop that only empties the stream, pairs in random order: at most one percent of the engine's own decode speed is lost,
    which the interval has to show, and of a token's time at most one percent is work of this process that the bare loop has not."""
    model, chance, logs, work = studio.model(), random.Random(0), [], []
    prompt = model.tokenize("Once upon a time", special=True)
    bare = lambda request: [event.timing for event in model.generate(request, Cancel()) if event.timing][-1].decode_tokens_per_second  # noqa: E731
    ways = {"bench": lambda request: timed(model, request, Cancel(), time.perf_counter).decode, "bare": bare}
    order: list[str] = []
    for pairs in EVIDENCE:
        while len(logs) < pairs:
            found, spent = {}, {}
            order = order[::-1] if len(logs) % 2 else chance.sample(tuple(ways), 2)     # each order as often as the other
            for way in order:
                before = time.process_time()
                found[way] = ways[way](Request(prompt, Sampling(max_tokens=64, ignore_eos=True)))
                spent[way] = time.process_time() - before
            logs.append(math.log(found["bench"] / found["bare"]))
            work.append((spent["bench"] - spent["bare"]) / 64 * found["bare"])
        estimate = stats.estimate(logs, 0.05)
        print(f"{pairs} pairs: bench / bare {estimate.ratio:.4f}, interval {estimate.interval}; own work {median(work):.2%} of a token's time")
        if estimate.interval[0] >= 1 - OVERHEAD:
            break
    assert estimate.interval[0] >= 1 - OVERHEAD, estimate
    assert median(work) <= OVERHEAD
