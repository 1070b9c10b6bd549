"""The Triton target without a GPU: its kernels on Triton's interpreter, and what of it is plain torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backends.errors import InvalidRequest, MissingRequirement
from backends.kernels import Batch, select, triton_pack
from backends.kernels.triton_graphs import CHECKS, Bucket, Graphs
from tests.test_ref_ops import qweight
from tests.triton_fakes import FakeRecorder

ROOT = Path(__file__).parents[1]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")


@needs_triton
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_on_the_interpreter(which: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which,
                           "tests/triton_interpreted.py"], cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"},
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


# ---------------------------------------------------------------------------------------------- layout
@pytest.mark.parametrize(("k", "bits", "group", "perm"), [
    (576, 4, 64, False), (256, 4, 128, False), (256, 8, 64, True), (96, 4, 32, False), (70, 4, 40, True), (48, 8, 16, False),
    (100, 2, 1024, False), (120, 4, 8, True)])
def test_words_hold_every_code_where_the_layout_says(k: int, bits: int, group: int, perm: bool) -> None:
    w = qweight(37, k, bits, group, zero=True, perm=perm)
    packed = triton_pack.pack(w, None, torch.device("cpu"))
    dense, found = w.dequantize(), torch.zeros(37, k)
    words = packed.words.to(torch.int32) & 0xFFFF
    for column in range(packed.steps * packed.step):
        step, inside = divmod(column, packed.step)
        field, lane = divmod(inside, packed.lanes)
        code = (words[:, step, :, lane].reshape(-1) >> field * packed.bits) & (1 << packed.bits) - 1
        feature = column if packed.feature is None else int(packed.feature[column])
        if 0 <= feature < k:
            zero = packed.zero if packed.offset is None else packed.offset[column // packed.group, :37].float()
            found[:, feature] = (code[:37] - zero) * packed.scale[column // packed.group, :37].float()
    torch.testing.assert_close(found, dense, rtol=1e-6, atol=1e-7)
    assert packed.words.nbytes <= 48 * (k + 63) * packed.bits / 8 or perm or k % group


def test_zeros_beyond_the_number_types_become_biases() -> None:
    w = qweight(16, 64, 4, 32, zero=True)
    w.zero = torch.full(w.zero.shape, 200, dtype=torch.int16)
    packed = triton_pack.pack(w, None, torch.device("cpu"))
    assert packed.kind == triton_pack.BIAS and packed.offset.shape == (2, 16)


# ---------------------------------------------------------------------------------------------- recordings
def toy_batch(rows: int, sequences: int, pages: int) -> Batch:
    ints = lambda *shape: torch.randint(1, 99, shape)  # noqa: E731
    starts = torch.tensor([*range(sequences), rows], dtype=torch.int32)
    return Batch(ints(rows), ints(rows), starts, ints(sequences).int(), ints(sequences, pages).int(), ints(rows), ints(0),
                 torch.rand(1, rows, 4), torch.rand(1, rows, 4))


def toy_pass(batch: Batch, kv) -> torch.Tensor:
    """Depends on all that a batch holds; rows that nobody owns come out as NaN."""
    row = torch.arange(len(batch.ids))
    owner = (batch.starts[1:] <= row[:, None]).sum(1)
    live = (owner < len(batch.lengths)) & (batch.slots >= 0)
    owner = owner.clamp_max(len(batch.lengths) - 1)
    out = torch.stack([batch.ids, batch.positions, batch.slots, batch.lengths[owner], batch.pages[owner, 0]], 1).float()
    return torch.where(live[:, None], torch.cat([out, batch.cos[0], batch.sin[0]], 1) + kv[0], torch.nan)


def graphs(**kind) -> tuple[Graphs, FakeRecorder, list[str]]:
    recorder, notes = FakeRecorder(**kind), []
    return Graphs(recorder, 16, notes.append), recorder, notes


def test_buckets_round_up() -> None:
    assert Bucket.of(toy_batch(1, 1, 1)) == Bucket(1, 1, 8)
    assert Bucket.of(toy_batch(5, 3, 9)) == Bucket(8, 4, 16)
    assert Bucket.of(toy_batch(16, 16, 64)) == Bucket(16, 16, 64)


def test_a_bucket_is_recorded_when_met_again_and_then_trusted() -> None:
    runs, recorder, notes = graphs()
    kv = [1.0]
    for turn in range(CHECKS + 3):                             # 5 to 8 rows of 3 or 4 sequences: one bucket
        batch = toy_batch(5 + turn % 4, 3 + turn % 2, 4 + turn)
        assert torch.equal(runs.run(toy_pass, batch, kv), toy_pass(batch, kv)), turn
        assert recorder.recorded == (turn > 0) and recorder.replayed == turn
        assert runs.replays(batch) == (turn >= CHECKS)
    for _ in range(2):
        assert torch.equal(runs.run(toy_pass, batch := toy_batch(2, 2, 3), kv), toy_pass(batch, kv))
    assert recorder.recorded == 2 and not notes                # another bucket, another recording


def test_a_trusted_recording_spares_the_ordinary_pass() -> None:
    runs, calls, kv = graphs()[0], [], [0.0]
    spied = lambda batch, kv: calls.append(len(batch.ids)) or toy_pass(batch, kv)  # noqa: E731
    for _ in range(CHECKS + 1):
        runs.run(spied, toy_batch(3, 3, 1), kv)
    calls.clear()
    runs.run(spied, toy_batch(3, 3, 1), kv)
    assert calls == [4]                                        # the fake's replay alone, in the bucket's shape


def test_other_pages_are_recorded_anew() -> None:
    runs, recorder, _ = graphs()
    one, two = [1.0], [2.0]
    for kv in (one, one, one, two, two, two):
        batch = toy_batch(4, 4, 4)
        assert torch.equal(runs.run(toy_pass, batch, kv), toy_pass(batch, kv))
    assert recorder.recorded == 2


def test_many_rows_are_never_recorded() -> None:
    runs, recorder, _ = graphs()
    for _ in range(4):
        assert runs.run(toy_pass, toy_batch(17, 2, 4), [0.0]).shape[0] == 17
    assert recorder.recorded == 0


def test_a_recording_that_differs_is_dropped_and_said() -> None:
    runs, recorder, notes = graphs(breaks=True)
    kv = [0.0]
    for _ in range(5):
        batch = toy_batch(2, 2, 2)
        assert torch.equal(runs.run(toy_pass, batch, kv), toy_pass(batch, kv))
    assert recorder.recorded == recorder.replayed == 1 and "differ" in notes[0] and len(notes) == 1


def test_what_cannot_be_recorded_runs_as_before() -> None:
    kv = [0.0]
    runs, _, notes = graphs(error=RuntimeError("operation not permitted when stream is capturing"))
    for _ in range(4):
        batch = toy_batch(1, 1, 1)
        assert torch.equal(runs.run(toy_pass, batch, kv), toy_pass(batch, kv))
    assert len(notes) == 1 and "not permitted" in notes[0]
    runs, _, _ = graphs(error=torch.OutOfMemoryError("no room"))
    runs.run(toy_pass, toy_batch(1, 1, 1), kv)
    with pytest.raises(torch.OutOfMemoryError):
        runs.run(toy_pass, toy_batch(1, 1, 1), kv)


# ---------------------------------------------------------------------------------------------- which layout wins
@needs_triton
@pytest.mark.parametrize(("theirs", "many", "wins"), [(0.5, 1.0, True), (0.97, 1.0, False), (0.5, 1.2, False)])
def test_atens_layout_is_taken_where_it_is_faster(theirs: float, many: float, wins: bool) -> None:
    from backends.kernels import triton_int4 as int4
    made, notes = [], []

    class Theirs:
        def __init__(self, weight, bias, device):
            made.append(weight.shape)

    seconds = iter([1.0, theirs, 1.0, many] * 2)
    race = int4.Race(torch.bfloat16, lambda work: next(seconds), Theirs)
    w, answer = qweight(16, 128, 4, 32, zero=True), torch.randn(256, 16)
    ours = triton_pack.pack(w, None, torch.device("cpu"))
    product = lambda x, matrix, end: end.out.copy_(answer[:len(x)])  # noqa: E731
    for _ in range(3):
        assert isinstance(race.faster(w, ours, product, notes.append), Theirs) == wins
    assert len(made) == (3 if wins else 1) and len(notes) == wins          # one measurement for a shape
    assert race.faster(qweight(16, 128, 8, 32, zero=True), ours, product, notes.append) is ours
    assert race.faster(qweight(16, 96, 4, 32, zero=True), ours, product, notes.append) is ours


@needs_triton
def test_a_product_that_disagrees_is_not_used() -> None:
    from backends.kernels import triton_int4 as int4
    race, notes = int4.Race(torch.bfloat16, lambda work: 0.0, lambda *given: object()), []
    ours = triton_pack.pack(w := qweight(16, 128, 4, 32, zero=True), None, torch.device("cpu"))
    assert race.faster(w, ours, lambda x, matrix, end: end.out.normal_(), notes.append) is ours
    assert "disagrees" in notes[0]


# ---------------------------------------------------------------------------------------------- binding
def test_a_cuda_device_gets_triton_first() -> None:
    cuda = torch.device("cuda")
    assert select.candidates(cuda, "auto") == ("triton", "aten", "ref")
    assert select.candidates(torch.device("mps"), "auto")[0] == select.candidates(torch.device("xpu"), "auto")[0] == "aten"


class Card:
    name, multi_processor_count = "Test GPU", 40

    def __init__(self, major: int, minor: int) -> None:
        self.major, self.minor = major, minor


@needs_triton
def test_the_target_names_its_gpu_and_refuses_old_ones(monkeypatch) -> None:
    from backends.kernels import triton
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card(8, 6))
    monkeypatch.setattr(triton, "try_out", lambda ops: None)
    ops, notes = select.choose("auto", "auto", "auto", 0)
    assert ops.name == "triton" and ops.detail == "Test GPU, bfloat16" and ops.device == torch.device("cuda", 0) and not notes
    assert ops.kv_types[0] == "bfloat16" and ops.row_independent == 16
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card(7, 5))
    ops, notes = select.choose("auto", "auto", "auto", 0)
    assert ops.name == "aten" and ops.device.type == "cuda" and "compute capability 7.5" in notes[0]
    with pytest.raises(MissingRequirement, match="7.5"):
        select.choose("triton", "cuda", "auto", 0)
    with pytest.raises(InvalidRequest):
        triton.make("int4", 0)


def test_without_triton_the_next_target_takes_over(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("backends.kernels.triton")]:
        if name != "backends.kernels.triton_graphs" and name != "backends.kernels.triton_pack":
            monkeypatch.delitem(sys.modules, name)
    ops, notes = select.choose("auto", "auto", "auto", 0)
    assert ops.name == "aten" and "triton" in notes[0]
