"""The benchmark from its command line, over real (tiny) models in a real engine process; and its report's arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.base import Cancel, ModelInfo
from gainz_ui import cli
from gainz_ui.services.bench import protocol, stage as staging
from gainz_ui.services.bench.configs import Config
from gainz_ui.services.bench.protocol import Design
from gainz_ui.services.bench.roofline import roofline
from gainz_ui.services.bench.run import Ask, bench
from gainz_ui.services.bench.workloads import Workload, from_file
from gainz_ui.services.studio import Studio
from gainz_ui.settings import Settings

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def house(tmp_path):
    return furnished(tmp_path)


def furnished(folder: Path) -> Path:
    (folder / "models").mkdir()
    for name in ("llama-fp16", "llama-autogptq-4bit-g128"):
        (folder / "models" / name).symlink_to(FIXTURES / name, target_is_directory=True)
    (folder / "prompts.txt").write_text("one\ntwo\nthree\nfour\nfive\nsix\n")
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A studio whose engine process and calibration serve several tests, and its house."""
    folder = furnished(tmp_path_factory.mktemp("bench"))
    studio = Studio(settings(folder))
    yield studio, folder
    studio.close()


@pytest.fixture
def studio(engine):
    yield engine[0]
    for name in list(engine[0].loaded()):
        engine[0].unload(name)


@pytest.fixture
def six(engine) -> Workload:
    return from_file(engine[1] / "prompts.txt", 8)


def settings(house):
    return Settings(models=house / "models", outputs=house / "outputs", logs=house / "logs")


def test_from_the_command_line(house, capsys, monkeypatch):
    monkeypatch.chdir(house)
    target = house / "found.json"
    code = cli.main(["bench", "--a", "llama-fp16", "--b", "llama-autogptq-4bit-g128", "--workload", str(house / "prompts.txt"),
                     "--tokens", "8", "--pairs", "6", "--models", str(house / "models"), "--json", str(target)])
    out, err = capsys.readouterr()
    assert code == 0 and "pair 6 of 6" in err
    found = json.loads(target.read_text(encoding="utf-8"))
    assert found["schema"] == "gainz-bench/1" and len(found["pairs"]) == 6 and found["units"] == 6
    low, high = found["interval"]
    assert low <= found["ratio"] <= high and found["verdict"] in ("FASTER", "SLOWER", "SAME", "CAN'T TELL")
    assert found["sentence"] in out and found["cause"] == "model" and set(found["differs"]) == {"model"}
    for side in "ab":
        assert all(pair[side]["tokens"] == 8 and pair[side]["cached"] == 0 for pair in found["pairs"])
        assert found[side]["decode"] > 0 and found[side]["roofline"]["ceiling"] > 0
    assert found["a"]["hash"] != found["b"]["hash"]
    assert [path.parent.name for path in (house / "outputs").rglob("*.json")] == ["calibration"]
    assert found["calibration"]["pairs"] == 8 and (found["energy"]["source"] or found["energy"]["reason"])


@pytest.mark.parametrize("words", [
    ["--a", "llama-fp16", "--b", "no-such-model"], ["--a", "llama-fp16", "--b", "llama-fp16,colour=red"],
    ["--a", "llama-fp16", "--b", "llama-fp16", "--pairs", "0"], ["--a", "llama-fp16", "--b", "llama-fp16", "--workload", "poems"],
    ["--a", "llama-fp16", "--b", "llama-fp16,draft=no-such-draft"],
    ["--a", "llama-fp16", "--b", "llama-fp16", "--json", "no-such-folder/found.json"]])
def test_what_cannot_be_measured_is_one_line(house, capsys, monkeypatch, words):
    monkeypatch.chdir(house)
    code = cli.main(["bench", *words, "--models", str(house / "models")])
    out, err = capsys.readouterr()
    assert code in (1, 2) and out == "" and err.count("Error:") == 1 and "Traceback" not in err


def test_one_model_against_itself_with_another_setting_leaves_no_trace(studio, six):
    studio.load("llama-fp16", {"context": 256, "streams": 1})
    found = bench(studio, Ask((Config("llama-fp16"), Config("llama-fp16", {"kv_type": "int8"})), Design(six, pairs=6)), "test",
                  lambda _: None, Cancel())
    assert found["cause"] == "kv_type" and found["block"] == 1
    assert list(studio.loaded()) == ["llama-fp16"]
    assert found["a"]["resolved"]["context"] == found["b"]["resolved"]["context"] == 256


def test_plain_against_drafted_is_one_load(studio, six):
    """Both sides are the same model with the same settings: it is in memory once, and gone afterwards."""
    seen = []
    ask = Ask((Config("llama-fp16"), Config.parse("llama-fp16,draft=lookup:2")), Design(six, pairs=6))
    found = bench(studio, ask, "test", lambda _: seen.append(len(studio.loaded())), Cancel())
    assert found["cause"] == "draft" and max(seen) == 1 and not studio.loaded() and len(found["pairs"]) == 6


def test_sides_that_do_not_fit_together_take_turns(studio, six, monkeypatch):
    """Each is loaded when its turn comes and not for a look at what it is: to be known, to calibrate, to warm up, for the block."""
    monkeypatch.setattr(staging, "free_memory", lambda device: 1)
    monkeypatch.setattr(protocol, "AGAIN", 0)                   # once more, because of noise, is two more loads
    seen, loads = [], []
    monkeypatch.setattr(studio.host, "load", lambda name, *rest, load=studio.host.load: loads.append(name) or load(name, *rest))
    ask = Ask((Config("llama-fp16"), Config("llama-autogptq-4bit-g128")), Design(six, pairs=staging.BLOCK))
    found = bench(studio, ask, "test", lambda _: seen.append(len(studio.loaded())), Cancel())
    assert found["block"] == len(found["pairs"]) == staging.BLOCK and max(seen) == 1 and len(loads) <= 7, loads
    assert not studio.loaded()


def test_the_ceiling_is_bytes_over_bandwidth():
    info = ModelInfo("m", "gguf", "GGUF", weights_bytes=100_000_000, kv_bytes_per_token=1000)
    found = roofline(info, depth=1000, bandwidth=20e9, decode=150.0, prefill=2000.0)
    assert found.bytes == 101_000_000 and found.ceiling == pytest.approx(20e9 / 101e6) and found.bound == "bandwidth"
    assert found.share == pytest.approx(150 / (20e9 / 101e6))
    assert roofline(info, 0, 20e9, 20.0, 2000.0).bound == "overhead"
    assert roofline(info, 0, 200e9, 180.0, 200.0).bound == "compute"
    assert roofline(info, 0, 200e9, 180.0, 200.0, alone=False).bound is None
    assert roofline(info, 0, 20e9, 300.0, None, tokens_per_pass=2.0).ceiling == pytest.approx(400)
    assert roofline(ModelInfo("far", "remote", "remote"), 0, 20e9, 30.0, None) is None
