"""The peers harness without any peer: pipes, stopping of idle workers, pairing, best opponents, the table, the synthetic file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time

import gguf
import numpy as np
import psutil
import pytest

from backends import gguf_file
from benchmarks import synthetic
from benchmarks.peers import envs, files, link, plan, plot, report, session
from benchmarks.peers.__main__ import publish

WORKER = '''
import os, sys
sys.path.insert(0, {folder!r})
from wire import Wire

class Echo:
    def versions(self): return {{"echo": "1"}}
    def load(self, name, model, threads, streams=1, context=0, **options): return {{"seconds": 0.0}}
    def run(self, name, prompt, tokens):
        print("chatter that must not break the protocol", flush=True)
        return {{"first": 0.5, "decode": {decode}, "tokens": tokens, "ids": prompt[:3]}}
    def fail(self): raise ValueError("cannot do that")
    def die(self): os._exit(7)

Wire().serve(Echo())
'''


@pytest.fixture
def workers(tmp_path, monkeypatch):
    """Two peers, "fast" and "slow", of 1 ms and 4 ms a token."""
    for peer, decode in (("fast", 0.031), ("slow", 0.124)):
        (tmp_path / f"{peer}_worker.py").write_text(WORKER.format(folder=str(link.WORKERS), decode=decode))
    monkeypatch.setattr(link, "WORKERS", tmp_path)
    monkeypatch.setattr(envs, "OURS", ("fast", "slow"))
    return tmp_path


@pytest.fixture
def worker(workers):
    made = link.Worker("fast", sys.executable, workers / "log", threads=1, timeout=30)
    yield made
    made.close()


def test_answers_pass_whatever_a_library_prints(worker):
    assert worker.versions == {"echo": "1"}
    found = worker.ask("run", name="x", prompt=[5, 6, 7, 8], tokens=4)
    assert found["ids"] == [5, 6, 7] and found["disturbed"] >= 0
    assert "chatter" in worker.log.read_text()


def test_an_idle_worker_is_stopped(worker):
    process = psutil.Process(worker._process.pid)
    until = time.monotonic() + 5
    while process.status() != psutil.STATUS_STOPPED and time.monotonic() < until:
        time.sleep(0.01)
    assert process.status() == psutil.STATUS_STOPPED
    assert worker.ask("run", name="x", prompt=[1], tokens=1)["first"] == 0.5       # and wakes when asked


def test_failures_are_answers(worker):
    with pytest.raises(link.WorkerFailed, match="ValueError: cannot do that"):
        worker.ask("fail")
    assert worker.ask("run", name="x", prompt=[1], tokens=1)["first"] == 0.5       # the worker lives on
    with pytest.raises(link.WorkerFailed, match="ended with 7"):
        worker.ask("die")


ARMS = (plan.Arm("fast", "m", tokens=32), plan.Arm("slow", "m", tokens=32), plan.Arm("gone", "m"))
WORK = plan.Workload("w", "some work", ARMS, (
    plan.Comparison("fast m", ("slow m", "gone m"), 3.0, "against the best"), plan.Comparison("fast m", ("gone m",), 1.0, "gone"),
    plan.Comparison("slow m", ("fast m",), 5.0, "time", most=True)))


def test_a_session(workers, monkeypatch, tmp_path):
    monkeypatch.setattr(envs, "RECIPES", {"gone": envs.Recipe(("x",))})
    bench = session.Bench(tmp_path, {"gone": tmp_path / "no-python"}, {}, threads=1)
    monkeypatch.setattr(bench.files, "path", lambda key: tmp_path / key)
    try:
        found = bench.measure(WORK, pairs=6)
    finally:
        bench.close()
    assert found.values == {"fast m": [pytest.approx(1000)] * 6, "slow m": [pytest.approx(250)] * 6}
    assert "does not exist" in found.skipped["gone m"]
    rows = report.lines([found], bench.files)
    assert [row.verdict for row in rows] == ["met", "not measured", "met"]
    assert rows[0].against == "slow m" and rows[0].ratio == report.Ratio(pytest.approx(4), pytest.approx(4), pytest.approx(4), 6)
    text = report.table(rows)
    assert text.count("\n") == 4 and "≥ 3 | met" in text and "≤ 5 | met" in text and "no-python" in text
    stored = json.loads(json.dumps(report.as_json([found], rows, bench.versions, 1)))
    assert stored["versions"]["fast"] == {"echo": "1"} and stored["workloads"]["w"]["same_ids"] == {"fast m": 3, "slow m": 3}
    assert plot.svg(rows).count("<circle") == 2


def test_a_later_piece_is_added_to_the_file(workers, tmp_path, capsys):
    """What is measured again replaces its like; the rest stays, with the versions of its peers."""
    known = {name: dataclasses.replace(WORK, name=name, arms=ARMS[:2], comparisons=WORK.comparisons[2:]) for name in ("a", "b")}
    given = argparse.Namespace(json=tmp_path / "r.json", merge=True, plot=tmp_path / "r.svg", threads=1)
    bench = session.Bench(tmp_path, {}, {}, threads=1)
    for speed, names in ((4.0, "ab"), (2.0, "b")):
        bench.versions = {f"peer of {names}": {}}
        publish([session.Figures(known[name], values={"slow m": [speed] * 6, "fast m": [1.0] * 6}) for name in names],
                known, bench, given)
    stored = json.loads(given.json.read_text())
    assert [line["ratio"]["value"] for line in stored["lines"]] == [pytest.approx(4), pytest.approx(2)]
    assert set(stored["versions"]) == {"peer of ab", "peer of b"} and given.plot.read_text().count("<circle") == 2
    assert capsys.readouterr().out.count("some work") == 4


def test_prompts_are_shared_in_a_round_and_fresh_in_the_next():
    ours, theirs = plan.Arm("a", "m", prompt=40), plan.Arm("b", "n", prompt=40)
    assert session.prompt(ours, 1, 0) == session.prompt(theirs, 1, 0) != session.prompt(ours, 2, 0)
    assert session.prompt(ours, 1, 0) != session.prompt(ours, 1, 1)
    fixed = plan.Arm("a", "m", prompt=40, fresh=False)
    assert session.prompt(fixed, 1, 0) == session.prompt(fixed, 2, 0)


def test_every_comparison_names_arms_that_run():
    works = plan.workloads()
    assert len({work.name for work in works}) == len(works)
    for work in works:
        keys = [arm.key for arm in work.arms]
        assert len(set(keys)) == len(keys)
        for compared in work.comparisons:
            assert compared.ours in keys and set(compared.theirs) <= set(keys)


def test_figures():
    assert session.figure(plan.Arm("a", "m"), {"tokens": 11, "decode": 2.0}) == 5
    assert session.figure(plan.Arm("a", "m", "prefill", prompt=512), {"first": 0.5}) == 1024
    assert session.figure(plan.Arm("a", "m", streams=4), {"tokens": 80, "decode": 2.0}) == 40
    assert session.figure(plan.Arm("a", "m", "step", streams=4), {"tokens": 80, "decode": 2.0}) == pytest.approx(0.1)
    assert session.figure(plan.Arm("a", "m", "step"), {"tokens": 11, "decode": 2.0}) == pytest.approx(0.2)


def test_a_failed_install_is_a_reason(tmp_path):
    with pytest.raises(envs.NotThere, match="(?i)error"):
        envs.run([sys.executable, "-c", "import sys; sys.exit('ERROR: No matching distribution')"])
    with pytest.raises(envs.NotThere, match="does not exist"):
        envs.python_of("llama", tmp_path, {"llama": tmp_path / "none"})


# ---------------------------------------------------------------------------------------------- the synthetic model
@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A Q4_0 file of a toy shape, with a tokenizer of 64 tokens."""
    folder = tmp_path_factory.mktemp("synthetic")
    writer = gguf.GGUFWriter(folder / "tokens.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(64)])
    writer.add_token_types([1] * 64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    shape = synthetic.Shape(hidden=64, layers=2, heads=4, kv_heads=2, inner=96, vocab=64)
    synthetic.write_gguf(folder / "m.gguf", shape, "Q4_0", folder / "tokens.gguf")
    return folder, shape


def test_synthetic_file_holds_what_it_says(made):
    folder, shape = made
    file = gguf_file.read(folder / "m.gguf")
    assert {name.removesuffix(".weight"): t.shape for name, t in file.tensors.items()} == dict(shape.tensors())
    assert {t.type for t in file.tensors.values() if len(t.shape) == 2} == {"Q4_0"}
    assert file.metadata["llama.attention.head_count_kv"] == 2 and list(file.metadata["tokenizer.ggml.tokens"])[63] == "t63"
    bench = files.Files(folder, {plan.BIG: folder / "m.gguf"}, None)
    head_apart = sum(t.bytes for name, t in file.tensors.items() if name != "token_embd.weight")
    assert bench.read_bytes(plan.BIG) == head_apart


def test_synthetic_folder_is_the_same_model(made):
    """The folder's rows are those of the file, with llama.cpp's interleaving of q and k undone."""
    import torch
    from safetensors.torch import load_file
    folder, shape = made
    (folder / "tokenizer").mkdir()
    synthetic.write_folder(folder / "f", shape, folder / "tokenizer")
    tensors = load_file(folder / "f" / "model.safetensors")
    source = synthetic.values(shape, "blk.1.attn_k", (32, 64))
    half = shape.head // 2
    for head in range(2):
        for i in range(half):                              # pairs (2 i, 2 i + 1) there are (i, i + half) here
            for offset in (0, 1):
                row = tensors["model.layers.1.self_attn.k_proj.weight"][head * shape.head + offset * half + i]
                assert torch.equal(row, torch.from_numpy(source[head * shape.head + 2 * i + offset]).bfloat16())
    down = tensors["model.layers.0.mlp.down_proj.weight"].float().std().item()
    assert down == pytest.approx(96**-0.5 / math.sqrt(4), rel=0.1)
    assert np.array_equal(source, synthetic.values(shape, "blk.1.attn_k", (32, 64)))
