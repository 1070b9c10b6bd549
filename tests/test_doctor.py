"""The doctor: every finding has its place, its words and its remedy; the port, the GPU pairing, the child that asks torch."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from backends.registry import Registry
from gainz_ui.services import doctor, gpu
from gainz_ui.services.ports import port_state
from gainz_ui.settings import Settings

ROOT = Path(__file__).parents[1]


@pytest.fixture
def settings(tmp_path):
    return Settings(models=tmp_path / "models", outputs=tmp_path / "outputs", logs=tmp_path / "logs", port=0)


def test_the_quick_examination_names_every_section_and_backend(settings):
    report = doctor.examine(settings, deep=False)
    sections = {check.section for check in report.checks}
    assert sections == {"system", "packages", "memory", "disk", "network", "compiler", "backends", "gpu"}
    titles = {check.name for check in report.checks if check.section == "backends"}
    assert titles == {backend.title for backend in Registry.scan().backends}
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


def test_what_is_wrong_has_a_remedy(settings):
    for check in doctor.examine(settings, deep=False).checks:
        assert check.status in ("ok", "info") or check.remedy, check
        assert check.value


def test_the_child_tells_torch_kernels_and_bandwidth():
    facts = doctor.probe()
    assert facts["torch"]["version"].split("+")[0] == doctor.TORCH
    assert {"ref", "aten", "cpu", "triton"} == {row["name"] for row in facts["kernels"]}
    ref = next(row for row in facts["kernels"] if row["name"] == "ref")
    assert ref["available"] and ref["detail"]
    assert all(row["detail"] for row in facts["kernels"])
    assert 1e9 < facts["bandwidth"] < 5e12           # bytes a second: no machine is outside of this


def test_the_pinned_torch_is_the_doctors():
    assert f"torch=={doctor.TORCH}" in (ROOT / "requirements.txt").read_text().splitlines()


def test_a_torch_that_does_not_start_is_a_finding(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    facts = doctor.probe()
    (check,) = doctor._probed(facts)
    assert check.status == "fail" and "exit code 1" in check.value and check.remedy


def test_examining_imports_no_torch():
    code = ("import sys; from gainz_ui.services import doctor; from gainz_ui.settings import Settings; "
            "doctor.examine(Settings(port=0), deep=False); sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# ---------------------------------------------------------------------------------------------- the port
def test_a_free_port_and_a_taken_one():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        assert port_state("127.0.0.1", port) == "free"
        held.listen()
        threading.Thread(target=lambda: held.accept()[0].close(), daemon=True).start()
        assert port_state("127.0.0.1", port) == "in use by another program"


def test_a_gainz_is_recognised():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = b'{"ready": true, "uptime_seconds": 1.0}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert port_state("127.0.0.1", server.server_port) == "Gainz answers there"
        server.shutdown()


# ---------------------------------------------------------------------------------------------- driver and CUDA
FOUND = gpu.Gpus((gpu.Gpu("H200", 141 << 30, 140 << 30, "9.0"),), "570.1", "12.8")


@pytest.mark.parametrize("torch,status,words", [
    ({"version": "2.13.0+cpu", "cuda": None}, "warn", "without CUDA"),
    ({"version": "2.13.0+cu130", "cuda": "13.0", "cuda_devices": []}, "fail", "built for CUDA 13.0"),
    ({"version": "2.13.0+cu126", "cuda": "12.6", "cuda_devices": []}, "fail", "sees no device"),
    ({"version": "2.13.0+cu126", "cuda": "12.6", "cuda_devices": [{"name": "H200"}]}, "ok", "up to CUDA 12.8")])
def test_driver_and_build_are_compared(torch, status, words):
    *_, check = gpu.checks(torch, FOUND)
    assert check.status == status and words in check.value
    assert check.status == "ok" or check.remedy


def test_no_gpu_is_an_answer():
    (check,) = gpu.checks(None, gpu.Gpus(reason="no NVIDIA driver"))
    assert check.status == "info" and "CPU" in check.value


def test_the_command_prints_words_or_json(tmp_path):
    run = subprocess.run([sys.executable, "app.py", "doctor", "--quick", "--json", "--port", "0", "--models", str(tmp_path)], cwd=ROOT,
                         capture_output=True, text=True)
    assert run.returncode == 0 and json.loads(run.stdout)["ok"] is True
    text = subprocess.run([sys.executable, "app.py", "doctor", "--quick", "--port", "0"], cwd=ROOT, capture_output=True, text=True)
    assert "Python" in text.stdout and "C++ compiler" in text.stdout
