"""The fused decoders on the reference kernels against transformers in float32: every family, every way to cut the work."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.base import BrokenFile, Cancel, ModelDir, Step, Vocab
from backends.engine import arch as archs
from backends.engine.kv import PagedKV
from backends.engine.runner import PagedDecoder
from backends.engine.weights import SafetensorsSource
from backends.kernels.ref import RefOps
from tests import tiny

FIXTURES = Path(__file__).parent / "fixtures"
LENGTHS = (1, 3, 15, 16, 17, 260)           # the last over several blocks of keys
CLOSE = 1e-4                             # relative error of the logits


@dataclass
class Pair:
    decoder: PagedDecoder
    reference: Any
    size: int

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        rng = random.Random(f"{length} {seed}")
        return [rng.randrange(self.size) for _ in range(length)]

    def rows(self, ids: list[int], *, chunk: int = 10**9, reuse: bool = False) -> torch.Tensor:
        slot, rows = self.decoder.open(ids, reuse=reuse), []
        while slot.length < len(ids):
            part = ids[slot.length:slot.length + chunk]
            assert self.decoder.reserve(slot, len(part))
            rows += self.decoder.extend([Step(slot, part, len(part))])
        self.decoder.release(slot)
        return torch.cat(rows)

    def greedy(self, ids: list[int], count: int) -> list[int]:
        slot, out = self.decoder.open(ids), list(ids)
        for _ in range(count):
            part = out[slot.length:]
            self.decoder.reserve(slot, len(part))
            out.append(int(self.decoder.extend([Step(slot, part, 1)])[0][0].argmax()))
        self.decoder.release(slot)
        return out[len(ids):]


def load(folder: Path, pages: int = 300, kv: str = "float32") -> Pair:
    model = ModelDir.of(folder)
    arch = archs.build(SafetensorsSource(model), RefOps(), lambda _: None, Cancel())
    assert arch is not None
    size = model.config["vocab_size"]
    decoder = PagedDecoder(arch, PagedKV(arch.layers, pages, kv), Vocab(size, frozenset(), ""), pages * 16)
    return Pair(decoder, tiny.reference(folder), size)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.fixture(scope="module", params=["llama-fp16", "qwen2-fp16"])
def pair(request) -> Pair:
    return load(FIXTURES / request.param)


def check(pair: Pair, lengths: tuple[int, ...], chunk: int = 13) -> None:
    """Alone, chunked, cold, with a cached prefix, and all lengths in one batch."""
    prompts = [pair.prompt(length) for length in lengths]
    wanted = [tiny.logits(pair.reference, ids) for ids in prompts]
    for ids, rows in zip(prompts, wanted):
        cold = pair.rows(ids)
        assert error(cold, rows) < CLOSE
        assert torch.equal(pair.rows(ids, chunk=chunk), cold)
        cached = pair.rows(ids, reuse=True)
        assert len(cached) == len(ids) - (len(ids) - 1) // 16 * 16
        assert torch.equal(cached, cold[-len(cached):])
    pair.decoder.pool.clear()
    slots = [pair.decoder.open(ids) for ids in prompts]
    assert all(pair.decoder.reserve(slot, len(ids)) for slot, ids in zip(slots, prompts))
    for rows, got in zip(wanted, pair.decoder.extend([Step(slot, ids, len(ids)) for slot, ids in zip(slots, prompts)])):
        assert error(got, rows) < CLOSE
    for slot in slots:
        pair.decoder.release(slot)
    pair.decoder.pool.check()


def test_logits(pair: Pair) -> None:
    check(pair, LENGTHS)


@pytest.mark.parametrize("length", [1, 15, 17, 300])
def test_greedy_text(pair: Pair, length: int) -> None:
    ids = pair.prompt(length)
    assert pair.greedy(ids, 12) == tiny.greedy(pair.reference, ids, 12)


def test_int8_cache_keeps_the_greedy_text() -> None:
    """KV-05: a 200-token prompt, 32 tokens on."""
    exact, rough = load(FIXTURES / "llama-fp16"), load(FIXTURES / "llama-fp16", kv="int8")
    ids = exact.prompt(200)
    assert rough.greedy(ids, 32) == exact.greedy(ids, 32)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_every_family(name: str, tmp_path: Path) -> None:
    check(load(tiny.write(tmp_path, name)), (1, 15, 16, 17, 70))


def test_older_configs_mean_the_same(tmp_path: Path) -> None:
    """rope_theta and rope_scaling in place of rope_parameters, as transformers 4 wrote them."""
    config = dict(ModelDir.of(tiny.write(tmp_path, "llama3 rope")).config)
    new, _ = archs.plan(config)
    rule = dict(config.pop("rope_parameters"))
    theta, kind = rule.pop("rope_theta"), rule.pop("rope_type")
    old, _ = archs.plan(config | {"rope_theta": theta, "rope_scaling": {"type": kind} | rule})
    assert torch.equal(old.ropes[0].frequencies()[0], new.ropes[0].frequencies()[0])
    assert new.ropes[0].kind == old.ropes[0].kind == "llama3"


def test_a_rotation_that_lacks_a_number_is_a_broken_config(tmp_path):
    config = dict(ModelDir.of(tiny.write(tmp_path, "llama")).config) | {"rope_parameters": None}
    for rule in ({"type": "linear"}, {"type": "llama3", "factor": 4.0, "low_freq_factor": 1.0}):
        with pytest.raises(BrokenFile, match=f"{rule['type']} rotation without"):
            archs.plan(config | {"rope_scaling": rule})


def test_what_a_plan_cannot_express_is_left_to_the_generic_path() -> None:
    base = dict(ModelDir.of(FIXTURES / "llama-fp16").config)
    for change, word in (({"model_type": "gpt2"}, "gpt2"),
                         ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
                         ({"hidden_act": "relu2"}, "relu2")):
        found, reason = archs.plan(base | change)
        assert found is None and word in reason


# ---------------------------------------------------------------------------------------------- the starter
def starter() -> Path | None:
    """The starter's GGUF: models/, or the file or folder that STARTER_GGUF names."""
    named = os.environ.get("STARTER_GGUF")
    places = [Path(named)] if named else []
    places.append(Path(__file__).parent.parent / "models")
    for place in places:
        found = [place] if place.is_file() else sorted(place.rglob("SmolLM2-135M-Instruct*.gguf"))
        if found:
            return found[0]
    return None


@pytest.mark.starter
def test_the_starter_dequantized(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Greedy text and logits to 700 tokens, on a float32 folder made from the starter's own weights."""
    file = starter()
    if file is None:
        pytest.skip("the starter model is not there: put it under models/ or name it in STARTER_GGUF")
    from backends.engine.gguf_weights import GgufWeights
    from backends.gguf_file import read_model
    from safetensors.torch import save_file
    import json
    folder = tmp_path_factory.mktemp("starter")
    source = GgufWeights(read_model(file))
    weights = {name: source.tensor(name).float().contiguous() for name in source.names()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(source.config), default=str))
    pair = load(folder)
    check(pair, (1, 3, 15, 16, 17, 700), chunk=97)
    ids = pair.prompt(40)
    assert pair.greedy(ids, 24) == tiny.greedy(pair.reference, ids, 24)
