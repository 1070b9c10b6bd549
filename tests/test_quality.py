"""The quality report: the questions, counts and intervals, what may be concluded, files; and the real thing on two small
checkpoints."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from backends import questions as task
from backends.base import BrokenFile, Cancel, Cancelled, InvalidRequest, NotSupported, Progress
from backends.pace import BLOCKS, STEPS, race
from backends.questions import Question, bundled, choose, paired, wilson
from backends.registry import load_model
from gainz_ui.services import quality as module
from gainz_ui.services.jobs import Jobs
from gainz_ui.services.quality import Ask, Quality, conclude, likelihood, rank, to_csv, to_json, verdict
from gainz_ui.services.records import Records

FIXTURES = Path(__file__).parent / "fixtures"


# ---------------------------------------------------------------------------------------------- the questions
def test_the_bundled_task_is_whole():
    found = bundled()
    assert len(found) == 200 and {q.kind for q in found} == set(task.KINDS)
    assert all(sum(q.kind == kind for q in found) == 50 for kind in task.KINDS)
    assert all(len(q.choices) == 4 and len(set(q.choices)) == 4 and all(q.choices) for q in found)
    assert len({q.question for q in found if q.kind != "arithmetic"}) == 150
    places = [sum(q.answer == place for q in found) for place in range(4)]
    assert min(places) >= 35, "the right one stands in every place about equally often"


def test_the_arithmetic_is_right():
    import re
    checked = 0
    for q in bundled():
        if match := re.fullmatch(r"What is (\d+) (\+|-|times|divided by) (\d+)\?", q.question):
            a, sign, b = int(match[1]), match[2], int(match[3])
            assert int(q.choices[q.answer]) == {"+": a + b, "-": a - b, "times": a * b, "divided by": a // b}[sign]
            checked += 1
    assert checked >= 40


@pytest.mark.parametrize("content", ["", "{}", '{"questions": [{"kind": "facts"}]}',
                                     '{"questions": [{"kind": "facts", "question": "?", "choices": ["a"], "answer": 1}]}'])
def test_a_file_that_holds_no_questions_is_refused(tmp_path, content):
    (tmp_path / "q.json").write_text(content)
    with pytest.raises(BrokenFile):
        task.read(tmp_path / "q.json")


class Plain:
    """A decoder whose logits depend on the last token alone."""

    context = 64

    def __init__(self, table):
        self.table, self.slot, self.opened, self.kept = torch.tensor(table).log(), SimpleNamespace(length=0), 0, []

    def open(self, tokens, reuse=True):
        assert not reuse
        self.opened += 1
        self.slot.length = 0
        return self.slot

    def reserve(self, slot, n):
        return slot.length + n <= self.context

    def extend(self, steps):
        (step,) = steps
        step.slot.length += len(step.tokens)
        return [self.table[list(step.tokens)][-step.want:]]

    def truncate(self, slot, length):
        assert length <= slot.length
        slot.length = length

    def release(self, slot):
        self.opened -= 1


def spell(text):
    """p q … → ids by letter."""
    return ["pab".index(sign) for sign in text if sign in "pab"]


def test_the_likelier_choice_per_byte_is_chosen():
    even = Plain([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3], [0.4, 0.1, 0.5]])
    ask = lambda *choices: choose(even, spell, Question("p", "p", choices, 0))  # noqa: E731
    assert ask("a", "b") == 0                                    # 0.5 against 0.3
    assert ask("ba", "a") == 1                                   # ln(0.3·0.1)/2 = -1.75 against ln 0.5 = -0.69
    assert ask("a", "bbbb") == 0 and ask("aaaa", "bbbb") == 1    # ln(0.5·0.3³)/4 = -1.08, ln(0.3·0.5³)/4 = -0.82
    assert even.opened == 0 and even.slot.length > 0


def test_a_question_with_no_room_is_an_error():
    short = Plain([[1 / 3] * 3] * 3)
    short.context = 1
    with pytest.raises(task.StepFailed):
        choose(short, spell, Question("p", "p", ("aa", "bb"), 0))
    assert short.opened == 0


def test_counts_and_intervals():
    asked = [Question("facts", str(i), ("a", "b"), 0) for i in range(10)]
    theirs, ours = [True] * 6 + [False] * 4, [True] * 4 + [False] * 2 + [True] + [False] * 3
    found = paired(asked, theirs, ours)
    assert (found.accuracy, found.reference_accuracy, found.lost, found.won, found.flips) == (0.5, 0.6, 2, 1, 0.3)
    assert found.difference == pytest.approx(-0.1)
    spread = 1.959964 * math.sqrt((0.3 - 0.01) / 10)             # paired: (b + c)/n − ((c − b)/n)², over n
    assert (found.difference_low, found.difference_high) == (pytest.approx(-0.1 - spread), pytest.approx(-0.1 + spread))
    assert found.kinds == {"facts": {"questions": 10, "accuracy": 0.5, "reference_accuracy": 0.6, "flips": 0.3}}


@pytest.mark.parametrize(("count", "n", "low", "high"), [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0),
                                                         (5, 10, 0.2366, 0.7634),
                                                         (15, 50, 0.1910, 0.4375)])
def test_wilsons_interval(count, n, low, high):
    """Values of Newcombe 1998 and of the formula by hand."""
    assert wilson(count, n) == (pytest.approx(low, abs=6e-4), pytest.approx(high, abs=6e-4))


# ---------------------------------------------------------------------------------------------- conclusions
SAME = {"model": "m", "windows": 24, "kl_mean": 5e-5, "kl_low": 4e-5, "kl_high": 6e-5, "top1": 0.999, "top1_low": 0.998,
        "top1_high": 1.0,
        "nll_difference": 1e-6, "nll_difference_se": 1e-5, "questions": {"difference_low": 0.0, "difference_high": 0.0}}
FAR = {**SAME, "kl_mean": 0.2, "kl_low": 0.18, "kl_high": 0.22, "top1": 0.8, "top1_low": 0.78, "top1_high": 0.82,
       "nll_difference": 0.1, "nll_difference_se": 0.01}


def test_no_difference_is_said_only_where_kl_and_flips_agree():
    assert verdict(SAME) == "same"
    assert verdict(FAR) == "differs"
    assert verdict({**SAME, "kl_low": 0.01, "kl_high": 0.02}) == "undecided"
    assert verdict({**FAR, "kl_low": 0.0}) == "undecided"
    assert verdict({**SAME, "top1_high": 0.99}) == "undecided"
    assert verdict({**SAME, "questions": {"difference_low": -0.2, "difference_high": -0.1}}) == "undecided"
    assert verdict({key: value for key, value in SAME.items() if key != "questions"}) == "same"


def test_few_windows_allow_no_conclusion():
    assert verdict({**SAME, "windows": 7}) == "undecided" and verdict({**FAR, "windows": 7}) == "undecided"
    assert verdict({**SAME, "kl_low": math.nan, "windows": 24}) == "undecided"


def test_likelihood_says_a_direction_only_outside_the_interval():
    assert likelihood(FAR)["direction"] == "higher" and likelihood({**FAR, "nll_difference": -0.1})["direction"] == "lower"
    assert likelihood(FAR)["factor"] == pytest.approx(1.10517, rel=1e-5)
    assert likelihood(SAME)["direction"] == "open"
    assert likelihood({**FAR, "nll_difference_se": math.nan}) == {"factor": pytest.approx(1.10517, rel=1e-5), "low": None,
                                                                  "high": None,
                                                                 "direction": "open"}


def test_ranks_reach_as_far_as_the_intervals_tell_apart():
    assert rank([(0.1, 0.2), (0.3, 0.4), (0.5, 0.6)]) == [(1, 1), (2, 2), (3, 3)]
    assert rank([(0.1, 0.35), (0.3, 0.4), (0.5, 0.6)]) == [(1, 2), (1, 2), (3, 3)]
    assert rank([(0.1, 0.6), (0.3, 0.4)]) == [(1, 2), (1, 2)]
    assert rank([(math.nan, math.nan), (0.3, 0.4)]) == [(1, 2), (1, 2)], "without an interval there is no rank"
    assert rank([]) == []


# ---------------------------------------------------------------------------------------------- the service
class Scripted:
    """Jobs that answer at once. ``refuse``: models of other tokens."""

    def __init__(self, refuse=()):
        self.calls, self.refuse = [], refuse

    def run(self, command, arguments, progress, cancel, need=0):
        self.calls.append((command, arguments, need))
        cancel.raise_if_set("The job")
        progress(Progress("compare", 1, 2, "window"))
        model = arguments[arguments.index("--model") + 1]
        if model in self.refuse:
            raise NotSupported("The two models have different vocabularies.", reference="5 tokens", model="7 tokens")
        return {**FAR, "model": model, "kl_median": 0.1, "kl_p99": math.nan, "kl_max": 1.0, "text": "bundled",
                "text_sha256": "0" * 64,
                "tokens": 100, "window_tokens": 32, "perplexity": 11.0, "perplexity_se": math.nan,
                "reference_perplexity": 10.0,
                "reference_perplexity_se": 1.0, "model_kernels": "k", "model_dtype": "d", "reference_kernels": "k",
                "reference_dtype": "d",
                "pace": {"speed": 9.0, "low": 8.0, "high": 10.0}, "reference_pace": {"speed": 4.0, "low": 3.0, "high": 5.0}}


@pytest.fixture
def studio(tmp_path):
    about = SimpleNamespace(weights_bytes=1000, disk_bytes=900)
    return SimpleNamespace(entry=lambda name: SimpleNamespace(size=7, format="GGUF", revision="r1"), details=lambda name: about,
                           records=Records(tmp_path / "logs", tmp_path / "outputs"))


@pytest.mark.parametrize("more", [{"models": ()}, {"models": ("a",)}, {"models": ("b", "b")}, {"windows": 0},
                                  {"window_tokens": 1},
                                  {"text": Path("/absent/file")}])
def test_what_cannot_be_measured_is_refused(more):
    with pytest.raises(InvalidRequest):
        Ask(**{"reference": "a", "models": ("b",), **more})


def test_each_model_is_measured_beside_the_reference_and_the_report_is_kept(studio, tmp_path):
    jobs, seen = Scripted(refuse=("c",)), []
    report = Quality(studio, jobs).measure(Ask("a", ("b", "c", "d"), windows=8, window_tokens=32), seen.append, Cancel())
    assert [row["model"] for row in report["rows"]] == ["b", "d"]
    assert report["refused"] == [{"model": "c", "code": "not_supported",
                                  "reason": str(NotSupported("The two models have different vocabularies.",
                                                             reference="5 tokens", model="7 tokens"))}]
    assert jobs.calls[0] == ("quality", ["--ref", "a", "--model", "b", "--windows", "8", "--window-tokens", "32", "--pace",
                                         "--questions"],
                             module.BESIDE + 2000)
    assert seen[0] == Progress("compare", 1, 2, "b (1/3) · window")
    (file,) = (tmp_path / "outputs" / "quality").iterdir()
    assert json.loads(file.read_text(), parse_constant=pytest.fail) == json.loads(to_json(report))
    assert report["rows"][0]["verdict"] == "differs" and report["rows"][0]["rank"] == [1,
        2] and report["rows"][0]["kl_p99"] is None


def test_cancel_reaches_the_job(studio):
    cancel = Cancel()
    cancel.set()
    with pytest.raises(Cancelled):
        Quality(studio, Scripted()).measure(Ask("a", ("b",)), lambda p: None, cancel)


def test_csv_has_a_line_for_each_and_no_formula(studio):
    jobs = Scripted()
    report = Quality(studio, jobs).measure(Ask("=A1", ("b",)), lambda p: None, Cancel())
    (row,) = csv.DictReader(io.StringIO(to_csv(report)))
    assert row["reference"] == "'=A1" and row["model"] == "b" and row["kl_mean"] == "0.2" and row["pace_speed"] == "9.0"
    assert row["perplexity_se"] == "" and (row["rank_best"], row["rank_worst"]) == ("1", "1")


def test_concluding_changes_no_figure():
    report = {"rows": [FAR], "reference": "a"}
    assert {key: conclude(report)["rows"][0][key] for key in FAR} == FAR


# ---------------------------------------------------------------------------------------------- the real thing
@pytest.fixture(scope="module")
def models():
    made = [load_model(FIXTURES / name, kernels="ref", dtype="float32", threads=1, context=512, prefix_cache=False)
            for name in ("llama-fp16", "llama-autogptq-4bit-g128")]
    yield made
    for model in made:
        model.close()


def test_a_model_against_itself_flips_nothing(models):
    one, _ = models
    found = task.compare(one.decoder, one.decoder, one.text.encode, bundled()[::10])
    assert (found.flips, found.lost, found.won, found.difference_low, found.difference_high) == (0, 0, 0, 0, 0)
    assert one.decoder.stats()["pages_used"] == 0


def test_choosing_is_scoring_the_whole_texts(models):
    """The shared beginning is read once; the same from whole sequences, each read alone."""
    from backends.evaluate import DecoderScorer
    one, _ = models
    for question in bundled()[5::37]:
        scores = []
        for choice in question.choices:
            ids, head = one.text.encode(question.prompt + choice), one.text.encode(question.prompt)
            rows = torch.cat(list(DecoderScorer(one.decoder).logits(ids))).log_softmax(-1)
            shared = min(next((i for i, (a, b) in enumerate(zip(ids, other)) if a != b), len(head))
                         for other in [one.text.encode(question.prompt + text) for text in question.choices])
            scores.append(sum(float(rows[i - 1, ids[i]]) for i in range(shared, len(ids))) / len(choice.encode()))
        assert choose(one.decoder, one.text.encode, question) == max(range(4), key=scores.__getitem__)


def test_the_pace_is_measured_in_turn_and_gives_all_room_back(models):
    seen = []
    found = race([model.decoder for model in models], list(range(5, 25)), seen.append)
    assert len(found) == 2 and len(seen) == BLOCKS
    for pace in found:
        assert 0 <= pace.low <= pace.speed <= pace.high and (pace.blocks, pace.steps, pace.prompt) == (BLOCKS, STEPS, 20)
    assert all(model.decoder.stats()["pages_used"] == 0 for model in models)


def test_the_whole_report_through_the_command_line(tmp_path, studio):
    """A quantized checkpoint differs from its float one; one with other tokens is refused with the reason."""
    import shutil
    for name in ("llama-fp16", "llama-autogptq-4bit-g128"):
        shutil.copytree(FIXTURES / name, tmp_path / "models" / name)
    other = shutil.copytree(FIXTURES / "llama-fp16", tmp_path / "models" / "other")
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    first, second = list(vocabulary["model"]["vocab"])[20:22]
    ids = vocabulary["model"]["vocab"]
    ids[first], ids[second] = ids[second], ids[first]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    text = "The small ship went out in the morning and came home in the evening, heavy with fish. " * 40
    (tmp_path / "t.txt").write_text(text)
    ask = Ask("llama-fp16", ("llama-autogptq-4bit-g128", "other"), tmp_path / "t.txt", windows=8, window_tokens=32,
              questions=False)
    report = Quality(studio, Jobs(tmp_path / "models")).measure(ask, lambda p: None, Cancel())
    (row,), (refused,) = report["rows"], report["refused"]
    assert row["model"] == "llama-autogptq-4bit-g128" and row["windows"] == 8 and row["tokens"] == 8 * 31
    assert row["kl_mean"] > 1e-4 and row["kl_low"] <= row["kl_mean"] <= row["kl_high"] and row["verdict"] in ("differs",
                                                                                                              "undecided")
    assert row["pace"]["speed"] > 0 and "questions" not in row
    assert refused["model"] == "other" and "tokenizers give different tokens" in refused["reason"]
