"""Measures against their definitions, on logits small enough to work out in full."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from backends import evaluate
from backends.base import Cancel, Cancelled, ContextTooLong, InvalidRequest, NotSupported, Vocab
from backends.evaluate import DecoderScorer, ModuleScorer, clustered, compare, perplexity, windows
from backends.registry import load_model
from gainz_ui import cli

ROOT, FIXTURES = Path(__file__).parents[1], Path(__file__).parent / "fixtures"
VOCAB = Vocab(5, frozenset(), "five")


class Table:
    """Logits that depend on the token alone; in pieces of two rows."""

    def __init__(self, seed: int, vocab: Vocab = VOCAB, sharpness: float = 1.0) -> None:
        self.vocab = vocab
        self.rows = torch.randn(vocab.size, vocab.size, generator=torch.Generator().manual_seed(seed)) * sharpness

    def logits(self, tokens: Sequence[int]):
        yield from self.rows[list(tokens)].split(2)


TEXTS = [(0, 1, 2, 3, 4), (4, 4, 1, 0, 2), (3, 1, 3, 0, 0)]


def by_hand(one: Table, two: Table):
    """(losses of two, KL, agreement) of every predicted token, in double precision."""
    losses, divergences, same = [], [], []
    for text in TEXTS:
        for here, after in zip(text, text[1:]):
            p, q = (torch.softmax(table.rows[here].double(), 0) for table in (one, two))
            losses.append(-math.log(q[after]))
            divergences.append(float((p * (p / q).log()).sum()))
            same.append(float(p.argmax() == q.argmax()))
    return losses, divergences, same


def test_measures_are_those_of_the_definitions():
    one, two = Table(1), Table(2)
    losses, divergences, same = by_hand(one, two)
    found = compare(one, two, TEXTS)
    assert found.tokens == 12 and found.windows == 3 and found.window_tokens == 5
    assert found.perplexity.value == pytest.approx(math.exp(sum(losses) / 12), rel=1e-6)
    assert found.kl_mean == pytest.approx(sum(divergences) / 12, rel=1e-6)
    assert found.kl_max == pytest.approx(max(divergences), rel=1e-6)
    assert found.kl_median == pytest.approx(float(torch.tensor(divergences).double().quantile(0.5)), rel=1e-6)
    assert found.top1 == pytest.approx(sum(same) / 12)
    assert found.kl_low <= found.kl_mean <= found.kl_high
    assert found.nll_difference == pytest.approx(found.perplexity.nll - found.reference.nll, abs=1e-9)
    assert perplexity(two, TEXTS).value == pytest.approx(found.perplexity.value, rel=1e-9)


def test_a_model_against_itself_differs_in_nothing():
    found = compare(Table(1, sharpness=30), Table(1, sharpness=30), TEXTS)
    assert (found.kl_mean, found.kl_max, found.top1, found.nll_difference) == (0, 0, 1, 0)


def test_the_error_of_a_mean_counts_windows_not_tokens():
    """Tokens of a window that all say the same are one observation: the error is that of the windows' means."""
    means = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    mean, error = clustered([torch.full((50,), float(value), dtype=torch.float64) for value in means])
    assert mean == pytest.approx(4.0) and error == pytest.approx(float(means.std() / 2), rel=1e-9)
    assert math.isnan(clustered([torch.ones(3)])[1])


def test_infinitely_unlikely_tokens_of_the_reference_cost_nothing():
    one, two = Table(1), Table(2)
    one.rows[:, 3] = -math.inf
    assert math.isfinite(compare(one, two, [(0, 1, 2)]).kl_mean)


@pytest.mark.parametrize(("vocab", "words"), [(Vocab(6, frozenset(), "five"), "different vocabularies"),
                                              (Vocab(5, frozenset(), "other"), "the same ids")])
def test_different_tokenizers_are_refused_with_the_reason(vocab, words):
    with pytest.raises(NotSupported, match=words):
        compare(Table(1), Table(2, vocab), TEXTS)


def test_windows_follow_each_other_and_the_tail_is_left_out():
    assert windows(range(10), 4) == [(0, 1, 2, 3), (4, 5, 6, 7)] and windows(range(10), 4, 1) == [(0, 1, 2, 3)]
    for length, count in ((11, None), (4, 3)):
        with pytest.raises(InvalidRequest):
            windows(range(10), length, count)


def test_a_comparison_can_be_cancelled():
    cancel = Cancel()
    with pytest.raises(Cancelled):
        compare(Table(1), Table(2), TEXTS, lambda progress: cancel.set() if progress.done else None, cancel)


def test_a_decoder_and_transformers_give_the_same_measures(monkeypatch):
    from transformers import AutoModelForCausalLM
    monkeypatch.setattr(evaluate, "CHUNK", 7)                # a window in several chunks
    model = load_model(FIXTURES / "llama-fp16", kernels="ref", dtype="float32", streams=1, context=40)
    theirs = AutoModelForCausalLM.from_pretrained(FIXTURES / "llama-fp16", dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(3)
    texts = [tuple(torch.randint(0, 512, (40,), generator=draw).tolist()) for _ in range(2)]
    found = compare(ModuleScorer(theirs, model.decoder.vocab), DecoderScorer(model.decoder), texts)
    assert found.kl_max < 1e-5 and found.top1 == 1 and found.tokens == 78
    with pytest.raises(ContextTooLong):
        next(DecoderScorer(model.decoder).logits(list(range(41))))
    assert model.decoder.stats()["pages_used"] == 0          # nothing is held after a refusal or a comparison
    model.close()


def test_the_command_measures_two_models(tmp_path, capsys):
    models = tmp_path / "models"
    for name in ("one", "two"):
        shutil.copytree(FIXTURES / "llama-fp16", models / name)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")

    def measure(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "app.py", "quality", "--models", str(models), "--ref", "one", "--text",
                               str(text), "--json", *arguments],
                              cwd=ROOT, capture_output=True, text=True, timeout=240,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})

    done = measure("--model", "two", "--windows", "2", "--window-tokens", "32", "--kernels", "ref", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kl_mean"] == 0 and found["top1"] == 1 and found["perplexity"] == found["reference_perplexity"] > 1
    assert found["windows"] == 2 and found["tokens"] == 62 and {"kl_p99", "kl_median", "perplexity_se",
                                                                "text_sha256"} <= found.keys()
    assert any("compare" in line for line in done.stderr.splitlines())
    command = ["quality", "--models", str(models), "--ref", "one", "--json"]
    assert cli.main([*command, "--model", "three"]) == 1
    assert json.loads(capsys.readouterr().err.splitlines()[-1])["error"]["code"] == "model_not_found"
    assert cli.main([*command, "--model", "two", "--window-tokens", "1"]) == 2
