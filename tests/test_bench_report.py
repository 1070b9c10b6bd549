"""Reports, their history and exports; calibration, energy, answers at once, planted slowdowns: on known numbers."""

from __future__ import annotations

import csv
import io
import json
import math
import threading
import time

import pytest

from backends.base import Cancel, Event, InvalidRequest, ModelInfo, MemoryEstimate, Request, Sampling, Timing, Usage
from gainz_ui import plots_bench
from gainz_ui.i18n import LANGUAGES
from gainz_ui.services.bench import calibration, energy, exports, history
from gainz_ui.services.bench.asking import Answered, Run, timed, together
from gainz_ui.services.bench.calm import Weather
from gainz_ui.services.bench.configs import Config
from gainz_ui.services.bench.planted import planted
from gainz_ui.services.bench.protocol import Design, Measurement, Outcome, Pair
from gainz_ui.services.bench.quality import beside
from gainz_ui.services.bench.report import levels, report, sentence, served
from gainz_ui.services.bench.run import Ask
from gainz_ui.services.bench.timeline import Figures
from gainz_ui.services.bench.workloads import Workload
from gainz_ui.services.records import Records
from gainz_ui.tabs import bench_view as show
from gainz_ui.tabs.bench_history import Past
from tests.test_bench_protocol import WORK, Calm, Clock, Scripted, steady

WORDS = show.axes("en")


def run(decode, *, ttft=0.1, prompt=20, tokens=8, **more):
    gap = 1 / decode
    seen = Figures(ttft, gap, decode, decode, ttft + (tokens - 1) * gap, tokens, tuple((gap, 1) for _ in range(tokens - 1)))
    return Run(decode, 200.0, ttft, seen, prompt, tokens, 0, tokens, answers=(Answered(ttft, gap, 0.0, seen.total),), **more)


def outcome(ratios=(1.5,) * 8, **more):
    return Outcome([Pair(number, "ab"[number % 2], run(100.0), run(100.0 * ratio, **more), Weather(2e10, 0.1)) for number, ratio
                    in enumerate(ratios)])


INFOS = tuple(ModelInfo(name, "gguf", "GGUF", kv_type="float32", kernels="cpu", threads=2, weights_bytes=size, kv_bytes_per_token=1000,
                        context=100, estimate=MemoryEstimate(size, 100_000, 50_000, 10**9, 100, 100), peak_bytes=2 * size,
                        options=(("kv_type", "auto"),)) for name, size in (("big", 200_000_000), ("small", 100_000_000)))


def made(found=None, **more):
    ask = Ask((Config("big"), Config("small")), Design(WORK, pairs=8))
    return report(ask.design, ask, INFOS, found or outcome(), 2e10, "1.0", **more) | {"levels": []}


# ---------------------------------------------------------------------------------------------- calibration
def test_while_calibration_fails_there_is_no_verdict():
    failed = {"passed": False, "half_width": 0.01}
    said = made(calibration=failed)
    assert said["verdict"] == "CAN'T TELL" and said["withheld"] and said["ratio"] == pytest.approx(1.5)
    for words in LANGUAGES:
        assert "1.5" not in show.sentence(words, said)
    assert made(calibration={"passed": True, "half_width": 0.01})["verdict"] == "FASTER"


@pytest.mark.parametrize(("half", "told"), [(0.16, True), (0.6, False), (None, False)])
def test_a_coarse_calibration_gives_verdicts_beyond_itself_only(half, told):
    """B is 1.5 times as fast in every pair: beyond ± 16 %, not beyond ± 60 %, nor beyond what is not known."""
    said = made(calibration={"passed": True, "half_width": half, "pairs": 8})
    assert said["verdict"] == ("FASTER" if told else "CAN'T TELL") and bool(said["withheld"]) is not told
    alike = made(outcome((1.0,) * 8), calibration={"passed": True, "half_width": half, "pairs": 8})
    assert alike["verdict"] == "CAN'T TELL" and alike["withheld"] == "coarse"
    reach = "?" if half is None else f"{100 * half:.1f}"
    assert reach in alike["sentence"]
    for words in LANGUAGES:
        assert reach in show.sentence(words, alike) and reach in show.about(words, alike)
    rows = levels({1: outcome((1.0,) * 8), 2: outcome((1.5,) * 8)}, Ask((Config("big"), Config("small")), Design(WORK)), said["calibration"])
    assert [row["verdict"] for row in rows] == ["CAN'T TELL", said["verdict"]]


def test_the_bound_of_a_sound_calibration_is_what_same_needs(tmp_path):
    """Four times the pairs halve the interval, and then it just fits into ± 2 %."""
    assert calibration.SOUND == pytest.approx(0.04)
    records, asked = Records(tmp_path / "logs", tmp_path / "outputs"), []

    def spread(*widths):
        widths = iter(widths)
        return lambda: asked.append(1) or outcome([math.exp(width * step) for width in [next(widths)] for step in (-1, 1, -.8, .8, -.6, .6, -.4, .4)])

    coarse = calibration.calibrate(records, spread(0.2, 0.15))
    assert coarse["passed"] and not calibration.sound(coarse) and coarse["attempts"] == 2, "the better of both"
    again = calibration.calibrate(records, spread(0.2, 0.2))
    assert again["half_width"] > coarse["half_width"] and len(asked) == 4, "tried again before each benchmark"
    fine = calibration.calibrate(records, spread(0.02))
    assert calibration.sound(fine) and len(asked) == 5
    assert calibration.calibrate(records, spread(0.2)) == fine and len(asked) == 5


def test_calibration_is_kept_when_it_passes_and_tried_again_when_it_does_not(tmp_path):
    records, asked = Records(tmp_path / "logs", tmp_path / "outputs"), []

    def measure(ratio):
        return lambda: asked.append(1) or outcome([ratio * (1 + 0.001 * n) for n in range(8)])

    found = calibration.calibrate(records, measure(1.3))
    assert not found["passed"] and len(asked) == 2 and found["attempts"] == 2
    found = calibration.calibrate(records, measure(1.0))
    assert found["passed"] and len(asked) == 3 and found["half_width"] < 0.01
    assert calibration.calibrate(records, measure(1.3)) == found and len(asked) == 3
    (tmp_path / "outputs" / "calibration" / f"{calibration.machine()}.json").write_text("{")
    assert calibration.calibrate(records, lambda: Outcome(cancelled=True)) is None


def test_calibration_asks_short_answers_of_one_side():
    wanted = calibration.design(Design(Workload("w", WORK.prompts[:3], 512), drafts=("x", "y"), streams=8))
    assert (wanted.workload.tokens, wanted.pairs, wanted.streams, wanted.drafts) == (calibration.TOKENS, calibration.PAIRS, 1, (None, None))
    assert len(wanted.workload.prompts) >= calibration.PAIRS, "prompts enough for an interval, however few are compared"


# ---------------------------------------------------------------------------------------------- answers at once
def test_several_answers_add_up():
    whole = together([run(100.0, ttft=0.1), run(50.0, ttft=0.3)], 0.5)
    assert whole.throughput == pytest.approx(16 / 0.5) == whole.speed and whole.tokens == 16 and whole.ttft == pytest.approx(0.2)
    assert run(100.0).speed == 100.0


def test_goodput_counts_answers_that_keep_both_limits():
    answers = (Answered(0.1, 0.01, 0.0, 1), Answered(2.0, 0.01, 0.5, 1), Answered(0.1, 0.2, 0.1, 1), Answered(None, None, None, 1))
    one = Run(None, None, None, Figures(0.1, 0.01, 1, None, 2.0, 40, ()), 4, 40, 0, 40, throughput=20.0, answers=answers)
    found = served([one], ttft_limit=1.0, tpot_limit=0.1)
    assert found["goodput"] == pytest.approx(1 / 2.0) and found["kept_limits"] == 0.25 and found["tokens_per_second"] == 20.0
    assert found["queue_p50"] == 0.1 and found["answer_ttft_p99"] == 2.0


def test_many_streams_really_run_at_once():
    """Each of four answers waits until all four have been asked."""
    meeting = threading.Barrier(4, timeout=10)

    class Together(Scripted):
        def generate(self, request, cancel):
            meeting.wait()
            yield Event(text="x", ids=(1,) * 8)
            yield Event(-1, usage=Usage(4, 8, 0), timing=Timing(queue_seconds=0.25, ttft_seconds=0.1))

    sides = Together(Clock(), None), Together(Clock(), None)
    found = Measurement(Design(WORK, pairs=2, streams=4), sides, Calm()).run()
    assert len(found.pairs) == 2 and all(len(pair.a.answers) == 4 and pair.a.tokens == 32 for pair in found.pairs)
    assert all(answer.queue == 0.25 for pair in found.pairs for answer in pair.b.answers)
    rows = levels({1: outcome(), 4: found}, Ask((Config("big"), Config("small")), Design(WORK)))
    assert [row["streams"] for row in rows] == [1, 4] and rows[0]["verdict"] == "FASTER" and rows[1]["a"]["tokens_per_second"] > 0
    with pytest.raises(InvalidRequest, match="1 to 16"):
        Ask((Config("a"), Config("b")), Design(WORK), streams=(0,))


# ---------------------------------------------------------------------------------------------- energy
def test_rapl_counters_are_read_and_begin_again(tmp_path):
    for number, value in ((0, 990_000_000), (1, 5_000_000)):
        zone = tmp_path / f"intel-rapl:{number}"
        zone.mkdir()
        (zone / "energy_uj").write_text(str(value))
        (zone / "max_energy_range_uj").write_text("1000000000")
    (tmp_path / "intel-rapl:0:0").mkdir()                       # a part of a package: counted there already
    meter = energy.find("cpu", tmp_path)
    first = meter.joules()
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("10000000")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("6000000")
    assert meter.source == "RAPL" and meter.joules() - first == pytest.approx(21.0)
    nothing = energy.find("cpu", tmp_path / "none")
    assert nothing.source == "" and nothing.reason and nothing.joules() is None


def test_joules_belong_to_the_side_that_ran():
    clock = Clock()
    sides = Scripted(clock, steady(0.01)), Scripted(clock, steady(0.02))
    found = Measurement(Design(WORK, pairs=6), sides, Calm(), clock=clock, joules=lambda: 10 * clock.now).run()
    assert all(pair.b.joules == pytest.approx(10 * (0.05 + 8 * 0.02)) and pair.a.joules < pair.b.joules for pair in found.pairs)
    assert made(found)["measures"]["joules_per_token"]["ratio"] == pytest.approx(2.1 / 1.3)


# ---------------------------------------------------------------------------------------------- planted slowdowns
class Stream:
    """Real time: a token every 4 ms, whether it is read or not."""

    info = ModelInfo("stream", "t", "t", vocab_fingerprint="v")

    def tokenize(self, prompt, *, special=True):
        return (1, 2)

    def generate(self, request, cancel):
        for _ in range(request.sampling.max_tokens):
            time.sleep(0.004)
            yield Event(text="x", ids=(1,))
        yield Event(-1, usage=Usage(2, request.sampling.max_tokens), timing=Timing(decode_tokens_per_second=1e9))


def test_a_planted_slowdown_is_as_large_as_it_says():
    request = Request((1, 2), Sampling(max_tokens=25))
    a, b = (timed(side, request, Cancel(), time.perf_counter) for side in planted((Stream(), Stream()), 0.5))
    assert 1.3 < b.seen.tpot / a.seen.tpot < 1.7 and a.decode == a.seen.rate < 1e6         # the engine's own clock is left out
    assert made()["planted"] == 0.0


# ---------------------------------------------------------------------------------------------- history
def test_runs_are_kept_listed_and_opened(tmp_path):
    past = history.History(Records(tmp_path / "logs", tmp_path / "outputs"))
    assert past.entries() == []
    one, two = past.keep(made()), past.keep(made(outcome((0.5,) * 8)))
    assert one["name"] != two["name"] and past.open(one["name"]) == json.loads(json.dumps(one, default=str))
    assert {entry.name for entry in past.entries()} == {one["name"], two["name"]}
    assert [entry.name for entry in past.entries("SLOWER small")] == [two["name"]] and past.entries("medium") == []
    assert history.configs(two)[0] == Config("big")
    (tmp_path / "outputs" / "bench" / "other.json").write_text("[]")
    assert len(past.entries()) == 2
    for name in ("other", "missing", "../bench"):
        with pytest.raises(InvalidRequest):
            past.open(name)


def test_what_changed_since_the_baseline():
    before, after = made(), made(outcome((2.0,) * 8))
    before["environment"] = before["environment"] | {"torch": "1.0", "bandwidth": 1.0}
    after["b"]["resolved"] = after["b"]["resolved"] | {"kv_type": "int8"}
    found = history.changes(before, after)
    assert {(change.part, change.key) for change in found} == {("machine", "torch"), ("b", "kv_type")}
    assert history.speeds(before, after)["b"] == (pytest.approx(150), pytest.approx(200), pytest.approx(4 / 3))
    for words in LANGUAGES:
        assert "int8" in show.changes(words, found, history.speeds(before, after))
    assert "【B 边】KV 缓存类型" in show.changes("zh", found, {})
    assert history.speeds(before | {"streams": 4}, after)["b"][2] is None               # not of the same kind


# ---------------------------------------------------------------------------------------------- exports
def test_exports():
    said = made()
    assert json.loads(exports.to_json(said))["schema"] == "gainz-bench/1"
    rows = list(csv.DictReader(io.StringIO(exports.to_csv(said))))
    assert len(rows) == 8 and float(rows[0]["b_decode"]) == 150.0 and rows[1]["first"] == "b" and rows[0]["bandwidth"] == "20000000000.0"
    text = exports.to_markdown(said)
    assert said["sentence"] in text and "| decode, tok/s | 100 | 150 | 1.5 |" in text
    assert "Differs: draft none → lookup." in exports.to_markdown(said | {"differs": {"draft": (None, "lookup")}})
    entries = json.loads(exports.to_llama_bench(said))
    assert [(entry["n_prompt"], entry["n_gen"]) for entry in entries] == [(20, 0), (0, 8)] * 2
    assert entries[3]["avg_ts"] == pytest.approx(150) and entries[3]["avg_ns"] == round(1e9 * 8 / 150) and entries[3]["model_filename"] == "small"
    assert len(entries[0]["samples_ns"]) == 8 and entries[0]["stddev_ts"] == 0 and entries[0]["n_batch"] is None
    lines = exports.to_benchstat(said).splitlines()
    assert lines[2].split()[:4] == ["BenchmarkDecode/side=A", "8", "10000000", "ns/op"] and len(lines) == 2 + 16


def test_no_pairs_can_be_exported_and_shown():
    said = made(Outcome(cancelled=True))
    for make in (exports.to_csv, exports.to_markdown, exports.to_llama_bench, exports.to_benchstat):
        assert make(said)
    assert all(draw(said, WORDS) is None for draw in (plots_bench.ratio, plots_bench.slopes, plots_bench.over_time, plots_bench.gaps))
    for words in LANGUAGES:
        assert show.verdict(words, said) and show.table(words, said) and show.about(words, said)


# ---------------------------------------------------------------------------------------------- what is shown
def test_figures_hold_the_reports_numbers():
    said = made()
    ratio = plots_bench.ratio(said, WORDS)
    points = dict(zip(ratio.data[0].y, ratio.data[0].x))
    assert points[WORDS["decode"]] == pytest.approx(1.5) and points[WORDS["ttft"]] == pytest.approx(1.0)
    whole = said["measures"]["end_to_end"]["ratio"]
    assert whole < 1 and points[WORDS["end_to_end"]] == pytest.approx(1 / whole)              # times are turned over: right is faster
    lines = plots_bench.slopes(said, WORDS).data
    assert len(lines) == 8 and list(lines[0].y) == pytest.approx([100, 150])
    time_plot = plots_bench.over_time(said, WORDS)
    assert list(time_plot.data[0].y) == pytest.approx([1.5] * 8) and list(time_plot.data[1].y) == [20.0] * 8
    gaps = {trace.name: trace for trace in plots_bench.gaps(said, WORDS).data}
    assert list(gaps["A"].x) == pytest.approx([10.0] * len(gaps["A"].x)) and gaps["B"].y[-1] == 100
    roof = plots_bench.roofline(said, WORDS)
    assert list(roof.data[1].x) == [pytest.approx(150), pytest.approx(100)] and list(roof.data[1].y) == ["B", "A"]
    assert roof.data[0].x[0] == pytest.approx(2e10 / (100_000_000 + 24 * 1000))
    assert plots_bench.by_context(said, WORDS) is None and plots_bench.by_streams(said, WORDS) is None
    deep = made(outcome((1.5,) * 8, prompt=200))
    assert max(plots_bench.by_context(deep, WORDS).data[1].x) == 204


def test_what_several_answers_at_once_gave_is_drawn_and_told():
    side = {"goodput": 2.0, "kept_limits": 0.5, "queue_p50": 0.02, "queue_p99": 0.05, "answer_ttft_p50": 0.1, "answer_ttft_p99": 0.2}
    rows = [{"streams": n, "verdict": "FASTER", "pairs": 8, "ratio": 1.5, "interval": [1.4, 1.6],
             "a": side | {"tokens_per_second": 100.0 * n}, "b": side | {"tokens_per_second": 150.0 * n, "queue_p50": None}} for n in (1, 4, 16)]
    said = made() | {"levels": rows, "main": "throughput", "streams": 16}
    traces = plots_bench.by_streams(said, WORDS).data
    assert [list(trace.y) for trace in traces] == [[100, 400, 1600], [150, 600, 2400], [2] * 3, [2] * 3, [20] * 3, [None] * 3]
    assert [trace.yaxis for trace in traces] == ["y", "y", "y2", "y2", "y3", "y3"] and list(traces[0].x) == [1, 4, 16]
    assert show.levels("en", made()) == "" and show.levels("en", said).count("50 % within the limits · 20 ms in the queue") == 3
    assert show.levels("zh", said).count("更快") == 3 and "2,400 tok/s" in show.levels("zh", said)
    assert plots_bench.slopes(said | {"pairs": []}, WORDS) is None
    for pair in said["pairs"]:
        for arm in "ab":
            pair[arm]["throughput"] = 1600.0
    assert plots_bench.slopes(said, WORDS).layout.yaxis.title.text == WORDS["together"]
    assert plots_bench.roofline(said, WORDS).layout.xaxis.title.text == WORDS["each"]


def test_settings_that_differ_are_named_with_both_values():
    said = made() | {"cause": None, "differs": {"kv_type": ["float32", "int8"], "draft": [None, "lookup"]}}
    assert "KV cache type: float32 → int8; Speculation: – → lookup" in show.verdict("en", said)
    assert "推测解码" in show.verdict("zh", said)


def test_a_verdict_is_found_in_the_words_of_the_page(tmp_path):
    past = history.History(Records(tmp_path / "logs", tmp_path / "outputs"))
    kept = past.keep(made())
    for words, text in (("zh", "small 更快"), ("en", "FASTER"), ("zh", "faster")):
        assert [entry.name for entry in past.entries(show.searched(words, text))] == [kept["name"]]
    assert past.entries(show.searched("zh", "更慢")) == []
    assert show.searched("en", "CAN’T TELL") == "CAN'T TELL" and "更快" in show.label("zh", past.entries()[0])


def test_quality_speed_and_memory(tmp_path):
    records = Records(tmp_path / "logs", tmp_path / "outputs")
    assert beside(records, made()) == []
    records.write_output("quality", "q.json", {"reference": "big", "rows": [{"model": "small", "kl_mean": 0.19}]})
    records.write_output("quality", "torn.json", "{")
    a, b = beside(records, made())
    assert (a["kl"], b["kl"], b["speed"], b["size"]) == (None, 0.19, pytest.approx(150), 100_150_000) and b["low"] <= b["speed"] <= b["high"]


@pytest.mark.parametrize(("ratios", "sign"), [((1.5,) * 8, ("1.50", "1.50")), ((0.6,) * 8, ("0.60", "0.60")), ((1.0,) * 8, ("2 %", "2 %"))])
def test_the_verdict_is_one_sentence_in_both_languages(ratios, sign):
    for words, part in zip(LANGUAGES, sign):
        text = show.sentence(words, made(outcome(ratios)))
        assert part in text and "small" in text and "big" in text and "\n" not in text
    spread = made(outcome([math.exp(0.3 * (-1) ** n * (1 + n / 10)) for n in range(8)]))
    assert "CAN’T TELL" in show.sentence("en", spread) and "无法判断" in show.sentence("zh", spread)


NOISY = [math.exp(0.3 * (-1) ** n * (1 + n / 10)) for n in range(8)]


def test_a_cause_is_named_only_where_there_is_an_effect():
    drafted = {"cause": "draft", "differs": {"draft": [None, "lookup"]}}
    for found, told in ((outcome(), True), (outcome((1.0,) * 8), False), (outcome(NOISY), False), (Outcome(cancelled=True), False)):
        said = made(found) | drafted
        for words, cause, setting in zip(LANGUAGES, ("the cause", "原因"), ("One setting differs", "只有一项设置不同")):
            shown = show.verdict(words, said)
            assert (cause in shown) is told and setting in shown
        assert "the cause" not in show.verdict("en", said | {"planted": 0.1}), "held back on purpose: no setting is to blame"


@pytest.mark.parametrize(("more", "half", "told"), [(137, 0.01, 140), (7, None, 7), (1386, 0.01, 0), (20, 0.136, 0)])
def test_more_pairs_are_advised_only_where_they_would_tell(more, half, told):
    said = made(outcome(NOISY)) | {"more_pairs": more, "calibration": half and {"passed": True, "half_width": half, "pairs": 8}}
    for words, advice in zip(LANGUAGES, ("a quieter machine", "更安静的机器")):
        shown = show.sentence(words, said)
        assert (f" {told} " in shown and str(1386) not in shown) if told else (advice in shown and str(more) not in shown)
    assert ("more pairs would tell, if" in sentence(said)) is bool(told) and ("hardly tell" in sentence(said)) is not bool(told)
    few = made(outcome((1.5,) * 3))
    assert few["verdict"] == "CAN'T TELL" and "more" not in show.sentence("en", few), "without an interval nobody knows"


def test_the_table_says_how_it_is_read():
    said = made()
    for words, parts in zip(LANGUAGES, (("quotient", "Only “Decode” has a verdict; the other 95 % intervals"), ("两者之商", "只有“解码”有结论；其余 95 % 区间"))):
        assert all(part in show.table(words, said) for part in parts)
    text = exports.to_markdown(said | {"noisy": 3, "calibration": {"passed": True, "half_width": 0.031}})
    assert "3 of 8 pairs in noise" in text and "A against A: known to ± 3.1 %" in text and "Only decode has a verdict" in text


def test_the_run_that_is_open_is_no_baseline_of_itself(tmp_path):
    past = history.History(Records(tmp_path / "logs", tmp_path / "outputs"))
    one, two = (past.keep(made() | {"b": made()["b"] | {"asked": "big,draft=lookup"}})["name"] for _ in range(2))
    assert "big-draft-lookup" in one
    shown = Past(None, {}, None, past, None, None)
    for opened, offered, kept in ((None, {one, two}, one), ({"name": two}, {one}, one), ({"name": one}, {two}, None)):
        runs, baseline, _ = shown.list(None, "", one, one, opened)
        assert {name for _, name in runs.choices} == {one, two} and {name for _, name in baseline.choices} == offered
        assert baseline.value == kept and runs.value == one


@pytest.mark.parametrize("limit", [0, -1.0, math.nan, 3601])
def test_a_limit_that_is_none_is_named(limit):
    with pytest.raises(InvalidRequest, match="above 0") as error:
        Ask((Config("big"), Config("small")), Design(WORK), tpot_limit=limit)
    assert error.value.field == "tpot_limit" and "tpot_limit" in error.value.evidence


def test_names_and_settings_are_no_markup():
    said = made()
    said["b"]["asked"] = '<img src=x onerror=alert(1)>'
    for words in LANGUAGES:
        assert "<img" not in show.verdict(words, said) + show.table(words, said) + show.candidates(words, [said, said])
