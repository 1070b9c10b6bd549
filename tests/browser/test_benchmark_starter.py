"""The benchmark tab as a person uses it, on the starter in float weights against its GPTQ variant: from the click to the verdict, the
check of the machine included, in under two minutes. On a quiet machine: `make slow`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from benchmarks.peers import plan
from benchmarks.peers.files import Files
from tests.browser.conftest import ROOT, _wait_for, free_port
from tests.browser.steps import tab
from tests.browser.test_benchmark import choose

pytestmark = [pytest.mark.slow, pytest.mark.starter]
SECONDS = 120                           # from the click to the verdict
PLOTS = ("ratio", "time", "slopes", "gaps", "roofline")


@pytest.fixture(scope="module")
def starter(tmp_path_factory):
    """(address, name of the float model, name of its variant): the whole program over these two."""
    files, home, port = Files(ROOT / "models", {}, None), tmp_path_factory.mktemp("gainz"), free_port()
    (home / "models").mkdir()
    paths = [files._made(key) for key in (plan.BF16, plan.OWN)]
    for path in paths:
        if not path.exists():
            pytest.skip(f"{path.name} is not in models/: make it from the starter (`python app.py quantize`)")
        (home / "models" / path.name).symlink_to(path.resolve(), target_is_directory=True)
    command = [sys.executable, str(ROOT / "app.py"), "--port", str(port)]
    command += [part for name in ("models", "outputs", "logs") for part in (f"--{name}", str(home / name))]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=home, stdout=log, stderr=log, env=os.environ)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}/", *(path.name for path in paths)
    finally:
        process.terminate()
        process.wait(30)


def test_float_against_gptq_in_two_minutes(starter, visit):
    address, one, other = starter
    page = visit(address)
    tab(page, "Benchmark")
    choose(page, "#gz-bench-a-model", one)
    choose(page, "#gz-bench-b-model", other)
    page.fill("#gz-bench-tokens input", "64")
    page.locator("#gz-bench-pairs input").first.click()
    page.get_by_role("option", name="8", exact=True).first.click()
    began = time.monotonic()
    page.click("#gz-bench-run")
    expect(page.locator("#gz-bench-verdict strong")).to_contain_text(other, timeout=1000 * SECONDS)
    for name in PLOTS:
        expect(page.locator(f"#gz-plot-bench-{name} svg.main-svg").first).to_be_visible()
    taken = time.monotonic() - began
    with page.expect_download() as caught:
        page.click("#gz-bench-json")
    report = json.loads(Path(caught.value.path()).read_text())
    print(f"\n{taken:.0f} s: {report['sentence']} Calibration: {report['calibration']}")
    assert taken < SECONDS
    assert len(report["pairs"]) == 8 and report["tokens"] == 64 and report["calibration"]["pairs"] == 8
    assert report["verdict"] == "FASTER", "a third of the bytes are read"
