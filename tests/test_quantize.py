"""Our quantizers: rounding against its definition, packing against published words, whole jobs on a tiny model."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from backends.base import Cancel, Cancelled, InvalidRequest, Message, ModelDir, NotSupported, Progress
from backends.compress import awq, calibrate, gptq, grid, job
from backends.compress.gram import Gram
from backends.compress.pack import awq_gemm, from_gptq_v1, gptq_v1, unwords, words
from backends.kernels import QWeight
from backends.recipe import QuantizeOptions, check_group, fitting_groups
from backends.registry import load_model
from gainz_ui import cli

ROOT = Path(__file__).parents[1]
FIXTURES = Path(__file__).parent / "fixtures"
QUICK = dict(samples=4, sample_tokens=48, precision="float32", threads=1)


def silent(_: Progress) -> None:
    """Nobody watches."""


# ---------------------------------------------------------------------------------------------- words of the formats
def hexes(tensor: torch.Tensor) -> list[str]:
    return [f"0x{value & 0xFFFFFFFF:08X}" for value in tensor.flatten().tolist()]


def test_three_bit_codes_are_one_stream_of_bits():
    column = (torch.arange(32) % 8)[:, None]
    assert hexes(words(column, 3)) == ["0x88FAC688", "0xC688FAC6", "0xFAC688FA"]
    assert [words(torch.zeros(k, 1, dtype=torch.int64), 3).shape[0] for k in (64, 96)] == [6, 9]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_come_apart_again(bits):
    values = torch.randint(0, 2 ** bits, (96, 5), generator=torch.Generator().manual_seed(bits))
    assert torch.equal(unwords(words(values, bits), bits), values.to(torch.uint8))


def one_matrix(codes, zero, bits=4, group=None, perm=None) -> QWeight:
    codes, zero = torch.as_tensor(codes, dtype=torch.uint8), torch.as_tensor(zero, dtype=torch.uint8)
    return QWeight(codes, torch.full(zero.shape, 0.5, dtype=torch.float16), zero, None, bits, group or codes.shape[1], perm)


def test_gptq_v1_stores_zero_points_less_one_without_borrowing_from_neighbours():
    weight = one_matrix(torch.zeros(8, 8), [[8], [0], [8], [8], [8], [8], [8], [8]])
    assert hexes(gptq_v1(weight)["qzeros"]) == ["0x777777F7"]
    assert from_gptq_v1(gptq_v1(weight), 4, -1).zero.flatten().tolist() == [8, 0, 8, 8, 8, 8, 8, 8]


def test_the_two_formats_order_eight_neighbours_as_they_are_known_to():
    along_rows = one_matrix(torch.arange(8)[:, None].expand(8, 8), torch.full((8, 1), 8))
    assert hexes(awq_gemm(along_rows)["qweight"][0]) == ["0x75316420"]
    along_columns = one_matrix(torch.arange(8).expand(8, 8), torch.full((8, 1), 8))
    assert set(hexes(gptq_v1(along_columns)["qweight"])) == {"0x76543210"}


def test_act_order_is_written_as_the_group_of_each_input():
    perm = torch.tensor([1, 3, 4, 6, 0, 2, 5, 7])           # groups of 4: inputs 1, 3, 4, 6 are in group 0
    weight = one_matrix(torch.randint(0, 16, (8, 8)), torch.full((8, 2), 8), group=4, perm=perm)
    packed = gptq_v1(weight)
    assert packed["g_idx"].tolist() == [1, 0, 1, 0, 0, 1, 0, 1]
    assert torch.equal(from_gptq_v1(packed, 4, 4).dequantize(), weight.dequantize())


# ---------------------------------------------------------------------------------------------- rounding
def correlated(rows: int, columns: int, tokens: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix, and inputs whose channels depend on each other and differ in size."""
    draw = torch.Generator().manual_seed(7)
    mix = torch.randn(columns, columns, generator=draw) * torch.logspace(0, -1.5, columns)
    return torch.randn(rows, columns, generator=draw), torch.randn(tokens, columns, generator=draw) @ mix.T


def lost(weight: torch.Tensor, values: torch.Tensor, inputs: torch.Tensor) -> float:
    return float(((values - weight) @ inputs.T).square().sum() / (weight @ inputs.T).square().sum())


def nearest(weight: torch.Tensor, group: int, sym: bool) -> torch.Tensor:
    """Round to nearest, written out once more."""
    out = torch.empty_like(weight)
    for start in range(0, weight.shape[1], group):
        part = weight[:, start:start + group]
        low, high = part.amin(1, keepdim=True).clamp_max(0), part.amax(1, keepdim=True).clamp_min(0)
        if sym:
            scale, zero = torch.maximum(-low, high) * 2 / 15, torch.tensor(8.0)
        else:
            scale = (high - low) / 15
            zero = torch.round(-low / scale).clamp(1, 15)
        scale = scale.half().float()
        out[:, start:start + group] = (torch.clamp(torch.round(part / scale) + zero, 0, 15) - zero) * scale
    return out


def gram_of(inputs: torch.Tensor) -> torch.Tensor:
    found = Gram(inputs.shape[1], inputs.device)
    for part in inputs.split(100):
        found.add(part)
    return found.finish()


def test_gram_is_the_mean_of_outer_products():
    inputs = torch.randn(250, 1100, generator=torch.Generator().manual_seed(1))     # more columns than a tile
    assert torch.allclose(gram_of(inputs), inputs.T @ inputs / 250, atol=1e-5)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(("act_order", "static"), [(False, False), (True, True), (True, False)])
def test_gptq_loses_far_less_than_rounding_to_nearest(sym, act_order, static):
    weight, inputs = correlated(48, 128)
    settings = QuantizeOptions(group=32, sym=sym, act_order=act_order, static_groups=static)
    done = gptq.quantize(weight, gptq.Inputs(gram_of(inputs), settings), settings)
    ours, plain = lost(weight, done.weight.dequantize(), inputs), lost(weight, nearest(weight, 32, sym), inputs)
    assert ours < 0.35 * plain
    assert done.error == pytest.approx(ours, rel=0.5)       # measured with damping
    assert (done.weight.perm is not None) == (act_order and not static)
    assert done.weight.scale.dtype == torch.float16 and int(done.weight.codes.max()) <= 15
    assert 1 <= int(done.weight.zero.min()) and int(done.weight.zero.max()) <= 15
    if sym:
        assert set(done.weight.zero.flatten().tolist()) == {8}


def test_gptq_with_independent_inputs_is_rounding_to_nearest():
    weight, _ = correlated(16, 64)
    settings = QuantizeOptions(group=32, act_order=False, static_groups=False, mse=False, refine=0)
    done = gptq.quantize(weight, gptq.Inputs(torch.eye(64), settings), settings)
    assert torch.allclose(done.weight.dequantize(), nearest(weight, 32, False), atol=2e-3)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_other_bits_and_whole_rows(bits):
    weight, inputs = correlated(16, 96)
    settings = QuantizeOptions(bits=bits, group=-1)
    done = gptq.quantize(weight, gptq.Inputs(gram_of(inputs), settings), settings)
    assert done.weight.scale.shape == (16, 1) and int(done.weight.codes.max()) <= 2 ** bits - 1
    assert lost(weight, done.weight.dequantize(), inputs) < {2: 0.3, 3: 0.05, 8: 1e-4}[bits]


def test_inputs_that_never_fire_and_inputs_that_repeat_do_no_harm():
    weight, inputs = correlated(16, 64)
    inputs[:, 5], inputs[:, 9] = 0, inputs[:, 10]
    settings = QuantizeOptions(group=32)
    done = gptq.quantize(weight, gptq.Inputs(gram_of(inputs), settings), settings)
    assert torch.isfinite(done.weight.dequantize()).all() and lost(weight, done.weight.dequantize(), inputs) < 0.01


def test_refitted_scales_are_the_least_squares_solution():
    weight, inputs = correlated(8, 64, 4096)
    gram, groups = gram_of(inputs), grid.groups_of(64, 32, weight.device)
    start = grid.fit(weight, torch.ones(64), groups, 4, False, False)
    codes = start.codes(weight, groups)
    fitted = grid.refit_scales(weight, gram, start, codes, groups)
    for row in range(8):
        levels = codes[row] - start.zero[row, groups]
        columns = torch.stack([(levels * (groups == g)) @ inputs.T for g in range(2)], 1)       # outputs for scale 1
        wanted = torch.linalg.lstsq(columns, (weight[row] @ inputs.T)[:, None]).solution[:, 0]
        assert torch.allclose(fitted.scale[row], wanted, rtol=1e-3)


def test_awq_gives_the_loud_channels_finer_steps():
    weight, inputs = correlated(64, 128)
    inputs[:, 3] *= 40                                      # one channel dominates, as in real models
    gram, settings = gram_of(inputs), QuantizeOptions(method="awq", group=32)
    scale = awq.search([weight], gram, None, settings)
    assert scale[3] == scale.max() and scale[3] > 2 * scale.median()
    packed, _ = awq.quantize(weight * scale, gram / scale / scale[:, None], settings)
    assert lost(weight, packed.dequantize() / scale, inputs) < 0.5 * lost(weight, nearest(weight, 32, False), inputs)


def test_channels_that_must_agree_get_one_scale():
    weight, inputs = correlated(16, 64)
    tie = torch.arange(64) // 32 * 8 + torch.arange(64) % 8
    scale = awq.search([weight], gram_of(inputs), tie, QuantizeOptions(method="awq", group=32))
    assert all(len(scale[tie == channel].unique()) == 1 for channel in tie.unique())


# ---------------------------------------------------------------------------------------------- choices
@pytest.mark.parametrize(("field", "values"), [
    ("bits", {"bits": 5}), ("bits", {"method": "awq", "bits": 8}), ("group", {"group": 48}),
    ("head_bits", {"bits": 3, "head_bits": 4}),
    ("damp", {"damp": 0.0}), ("samples", {"samples": 0}), ("sym", {"sym": 1}), ("method", {"method": "rtn"}),
    ("sym", {"method": "awq", "sym": True})])
def test_a_choice_that_cannot_be_honoured_names_its_field(field, values):
    with pytest.raises(InvalidRequest) as caught:
        QuantizeOptions(**values)
    assert caught.value.field == field


def test_a_group_that_does_not_divide_names_those_that_do():
    assert fitting_groups((576, 1536)) == (-1, 16, 32, 64)
    with pytest.raises(InvalidRequest, match="576 input features") as caught:
        check_group(128, (576, 1536))
    assert "-1, 16, 32, 64" in caught.value.remedy


def test_windows_are_spread_over_the_text_and_always_the_same():
    def encode(text: str) -> list[int]:
        return list(range(100))

    found = calibrate.calibration("text", "a file", encode, 3, 20)
    assert [window[0] for window in found.windows] == [0, 40, 80] and found.windows[-1][-1] == 99
    assert found.sha256 == hashlib.sha256(b"text").hexdigest() and found.tokens == 60
    with pytest.raises(InvalidRequest, match="room for 5 windows"):
        calibrate.calibration("text", "a file", encode, 6, 20)
    with pytest.raises(InvalidRequest, match="100 tokens"):
        calibrate.calibration("text", "a file", encode, 1, 101)


def test_the_bundled_text_is_long_enough_for_the_defaults():
    text, name = calibrate.read_text()
    assert name == "bundled" and len(text) > 4 * QuantizeOptions().samples * QuantizeOptions().sample_tokens


# ---------------------------------------------------------------------------------------------- whole jobs
def make(tmp_path: Path, source: Path = FIXTURES / "llama-fp16", name: str = "out", cancel: Cancel | None = None,
         progress=silent,
         **choices) -> tuple[Path, dict]:
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    manifest = job.run(ModelDir.of(source), QuantizeOptions(**{**QUICK, **choices}), folder, progress, cancel or Cancel())
    return folder, manifest


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """usual(method) → what `make` makes with the usual choices, and the weights that its layers were settled with, by layer and name:
    made once, to be read only."""
    from backends.compress import layers
    home, original = tmp_path_factory.mktemp("usual"), layers.Layer.settle

    @cache
    def made(method: str):
        settled: dict[tuple[int, str], torch.Tensor] = {}

        def settle(self, name, weight):
            settled[self.index, name] = weight.dequantize()
            original(self, name, weight)

        with pytest.MonkeyPatch.context() as spy:
            spy.setattr(layers.Layer, "settle", settle)
            return *make(home, name=method, method=method), settled
    return made


def logits(path: Path, ids: list[int]) -> torch.Tensor:
    from backends.base import Step
    model = load_model(path, kernels="ref", dtype="float32", streams=1, context=64)
    decoder = model.decoder
    slot = decoder.open(ids, reuse=False)
    assert decoder.reserve(slot, len(ids))
    out = decoder.extend([Step(slot, ids, len(ids))])[0].clone()
    model.close()
    return out


IDS = [5, 77, 301, 12, 9, 140, 33, 2, 450, 6, 18, 99]


@cache
def floats(source: str) -> torch.Tensor:
    return logits(FIXTURES / source, IDS)


def relative(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).norm() / two.norm())


CHOICES = [
    {"method": "gptq"}, {"method": "gptq", "static_groups": False, "group": 32},
    {"method": "gptq", "sym": True, "act_order": False},
    {"method": "gptq", "group": -1, "bits": 8}, {"method": "gptq", "bits": 3, "group": 32}, {"method": "awq"},
    {"method": "gptq", "head_bits": 4}, {"method": "awq", "head_bits": 4, "group": 32}]


@pytest.mark.parametrize(("source", "choices"), [("llama-fp16", choices) for choices in CHOICES] + [
    ("qwen2-fp16", {"method": "gptq"}), ("qwen2-fp16", {"method": "awq"})],
    ids=lambda c: c if isinstance(c, str) else "-".join(map(str, c.values())))
def test_a_variant_loads_through_the_registry_and_stays_close(tmp_path, usual, source, choices):
    there = source == "llama-fp16" and list(choices) == ["method"]
    folder, manifest, *_ = usual(choices["method"]) if there else make(tmp_path, FIXTURES / source, **choices)
    loaded, expected = logits(folder, IDS), floats(source)
    assert relative(loaded, expected) < (0.6 if choices.get("bits") == 3 else 0.02 if choices.get("bits") == 8 else 0.4)
    assert not (folder / job.PARTS).exists() and {row["path"] for row in manifest["files"]} == {
        path.name for path in folder.iterdir()}
    for row in manifest["files"]:
        assert row["sha256"] == hashlib.sha256((folder / row["path"]).read_bytes()).hexdigest()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_was_written_is_what_the_job_computed_with(usual, method):
    """The codes that the readers give are those that the layers were settled with, folds included."""
    folder, _, settled = usual(method)
    source = reader(folder)
    for (index, name), expected in settled.items():
        weight, _ = source.linear(f"model.layers.{index}.{name}")
        assert isinstance(weight, QWeight) and torch.equal(weight.dequantize(), expected), name
    assert len(settled) == 21


def reader(folder: Path):
    from backends.engine.awq_weights import AwqLayout
    from backends.engine.gptq_weights import GptqLayout
    from backends.engine.packed_files import PackedFiles
    from backends.quant_config import read_quantization
    model = ModelDir.of(folder)
    quantization = read_quantization(model)
    return PackedFiles(model, {"gptq": GptqLayout, "awq": AwqLayout}[quantization.method](quantization))


def test_awq_folds_scales_into_norms_values_and_gates_without_changing_the_layer(usual):
    """All four inputs of a Llama layer have a place for the scale: no note says otherwise, and norms have changed (not all:
    where no scale helps it is 1)."""
    from safetensors.torch import load_file
    folder, manifest, _ = usual("awq")
    assert manifest["notes"] == []
    before, after = load_file(FIXTURES / "llama-fp16" / "model.safetensors"), load_file(folder / "model.safetensors")
    norms = [name for name in before if name.endswith("layernorm.weight")]
    assert sum(not torch.equal(before[name], after[name]) for name in norms) >= len(norms) / 2
    assert torch.equal(before["model.norm.weight"], after["model.norm.weight"])


class Interrupt:
    """Cancels a job after so many layers."""

    def __init__(self, after: int) -> None:
        self.cancel, self.after = Cancel(), after

    def __call__(self, progress: Progress) -> None:
        if progress.stage == "quantize" and progress.done >= self.after:
            self.cancel.set()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_cancelled_job_goes_on_where_it_stopped_and_gives_the_same_bytes(tmp_path, usual, method):
    whole, *_ = usual(method)
    interrupt = Interrupt(2)
    with pytest.raises(Cancelled):
        make(tmp_path, name="cut", cancel=interrupt.cancel, progress=interrupt, method=method)
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    resumed, manifest = make(tmp_path, name="cut", method=method)
    assert manifest["resumed_layers"] == 2
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()


def test_parts_of_other_settings_are_not_gone_on_with(tmp_path):
    interrupt = Interrupt(1)
    with pytest.raises(Cancelled):
        make(tmp_path, name="cut", cancel=interrupt.cancel, progress=interrupt)
    (tmp_path / "cut" / "stray.bin").write_bytes(b"left by something else")
    folder, manifest = make(tmp_path, name="cut", damp=0.02)
    assert manifest["resumed_layers"] == 0 and not (folder / "stray.bin").exists()


def test_a_quantized_model_is_refused_as_a_source(tmp_path, usual):
    folder, *_ = usual("gptq")
    with pytest.raises(NotSupported, match="quantized already"):
        make(tmp_path, folder, name="again")


def test_without_room_to_play_back_the_outcome_is_the_same(tmp_path, usual, monkeypatch):
    kept, *_ = usual("gptq")
    from backends.compress import stream
    monkeypatch.setattr(stream.Memo.__init__, "__defaults__", (0,))
    computed, _ = make(tmp_path, name="computed")
    assert (kept / "model.safetensors").read_bytes() == (computed / "model.safetensors").read_bytes()


def test_a_large_checkpoint_is_written_in_shards(tmp_path, usual, monkeypatch):
    from backends.compress import writer
    whole, *_ = usual("gptq")
    monkeypatch.setattr(writer.merge, "__defaults__", (1 << 20,))
    folder, _ = make(tmp_path, name="shards")
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    assert len(shards) > 1 and shards[0].startswith("model-00001-of-0000")
    assert torch.equal(logits(folder, IDS), logits(whole, IDS))


def test_a_gguf_file_is_a_source_and_its_tokenizer_comes_along(tmp_path):
    from tests.test_gguf_backend import WIDE, made
    path, _ = made(tmp_path, "llama", "Q8_0", **WIDE)
    text = tmp_path / "text.txt"
    text.write_text("a day at the sea, a night in the hills; " * 60, encoding="utf-8")
    folder = tmp_path / "out"
    folder.mkdir()
    manifest = job.run(ModelDir.of(path), QuantizeOptions(bits=8, **QUICK), folder, silent, Cancel(), text=text)
    assert manifest["parent"]["format"] == "GGUF Q8_0" and any("dequantized" in note for note in manifest["notes"])
    assert manifest["calibration"]["sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    before, after = (load_model(place, kernels="ref", dtype="float32", streams=1, context=64) for place in (path, folder))
    sentence = "a day <s> at 3:15 — naïve"
    assert after.tokenize(sentence) == before.tokenize(sentence)
    assert after.decoder.vocab == before.decoder.vocab
    chat = (Message("user", "a day"),)
    assert after.tokenize(chat) == before.tokenize(chat)
    before.close(), after.close()
    assert relative(logits(folder, IDS[:6]), logits(path, IDS[:6])) < 0.05


# ---------------------------------------------------------------------------------------------- the command
def command(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "app.py", "quantize", *arguments, "--samples", "4", "--sample-tokens", "48"],
                            cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.fixture
def models(tmp_path):
    shutil.copytree(FIXTURES / "llama-fp16", tmp_path / "models" / "tiny")
    return tmp_path / "models"


def test_the_command_makes_a_model_of_the_catalog(models, capsys):
    running = command("--models", str(models), "--model", "tiny", "--out", "small", "--method", "awq", "--json")
    out, err = running.communicate(timeout=240)
    assert running.returncode == 0, err
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert {line["progress"]["stage"] for line in lines} >= {"read", "quantize"}
    manifest = json.loads(out)
    assert manifest["method"] == "awq" and manifest["parent"]["name"] == "tiny" and manifest["settings"]["group"] == 64
    assert manifest == json.loads((models / "small" / "manifest.json").read_text())
    from gainz_ui.services.store import Store
    assert Store(models).verify("small").ok
    assert cli.main(["quantize", "--models", str(models), "--model", "tiny", "--out", "small"]) == 1
    assert "not overwritten" in capsys.readouterr().err


def test_a_signal_cancels_and_leaves_no_half_model(models):
    running = command("--models", str(models), "--model", "tiny", "--out", "small", "--json")
    for line in running.stderr:
        if '"first pass"' in line:
            running.send_signal(signal.SIGTERM)
            break
    deadline = time.monotonic() + 60
    rest = running.stderr.read()
    assert running.wait(timeout=max(deadline - time.monotonic(), 1)) == 1
    assert json.loads(rest.splitlines()[-1])["error"]["code"] == "cancelled"
    assert sorted(path.name for path in models.iterdir() if not path.name.startswith(".")) == ["tiny"]


@pytest.mark.parametrize(("arguments", "words"), [
    (("--group", "1024"), "256, 512 input features"), (("--bits", "5"), "bits must be one of"),
    (("--method", "awq", "--bits", "3"), "4-bit weights")])
def test_wrong_arguments_end_with_2(models, capsys, arguments, words):
    assert cli.main(["quantize", "--models", str(models), "--model", "tiny", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_options_say_what_decides_the_outcome():
    options = QuantizeOptions(method="awq", threads=3)
    assert "threads" not in options.public() and "damp" not in options.public() and options.public()["group"] == 64
    assert replace(options, device="cpu").public() == options.public()
