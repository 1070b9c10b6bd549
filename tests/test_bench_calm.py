"""The barometer sees others' work and not our own."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from gainz_ui.services.bench.calm import USUAL, Barometer, Weather

BUSY = "import time\nend = time.time() + 30\nwhile time.time() < end: pass"


def spinner():
    return subprocess.Popen([sys.executable, "-c", BUSY])


def test_a_busy_stranger_is_seen_and_our_own_work_is_not():
    stranger = spinner()
    try:
        mine = Barometer(lambda: (os.getpid(), stranger.pid))
        theirs = Barometer(lambda: (os.getpid(),))
        time.sleep(1.0)
        apart = theirs.read().foreign - mine.read().foreign
    finally:
        stranger.kill()
        stranger.wait()
    assert apart > 0.2                    # whatever else runs here is in both


def test_one_of_ours_that_ends_is_no_stranger():
    """Its seconds stay ours: they are not taken back, which would look like others' work."""
    child = spinner()
    pids = [os.getpid(), child.pid]
    barometer = Barometer(lambda: tuple(pids))
    time.sleep(0.5)
    barometer.read()
    before = barometer._last.ours
    child.kill()
    child.wait()
    pids.remove(child.pid)
    barometer.read()
    assert before > 0.1 and barometer._last.ours >= before


def test_bandwidth_is_a_speed_of_memory():
    assert 5e8 < Barometer(lambda: ()).read().bandwidth < 1e12


def test_complaints():
    barometer = Barometer(lambda: ())
    barometer._seen = [10e9] * USUAL
    assert barometer.complaint(Weather(9.9e9, 0.1, 0.0, 0)) == ""
    assert "70 %" in barometer.complaint(Weather(7e9)).replace("%", " %")
    assert "1.5 cores" in barometer.complaint(Weather(10e9, 1.5))
    assert "hypervisor" in barometer.complaint(Weather(10e9, 0.0, 0.1))
    assert "3 MiB" in barometer.complaint(Weather(10e9, 0.0, 0.0, 3 << 20))
    assert barometer.complaint(Weather(10e9)) == ""              # what is not known is no complaint
