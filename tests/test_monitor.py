"""What the server knows of itself: totals that only grow, distributions, percentiles; /metrics by the rules; the diagnostics' secrets."""

from __future__ import annotations

import json
import random
import re
import statistics
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st
from prometheus_client.parser import text_string_to_metric_families

from fastapi import FastAPI
from fastapi.testclient import TestClient

from backends.base import DraftSpec, Event, InvalidRequest, Request, Sampling, Timing, Usage
from gainz_ui import live
from gainz_ui.services.tasks import Task
from gainz_ui.api import metrics
from gainz_ui.services import gpu, monitor
from gainz_ui.services.gpu import GpuUse
from gainz_ui.services.meter import EngineTotals, Histogram, Meter, percentile
from gainz_ui.services.monitor import Monitor
from gainz_ui.services.records import Records
from gainz_ui.sparks import Line, chart, thinned
from gainz_ui.tabs.monitor_view import PARTS
from tests.api_fakes import INFO, FakeStudio

NASTY = 'a"b\\c\nd é 世'


def facts(**more) -> dict:
    return {"id": "1", "model": "tiny", "backend": "fake", "finish": ["stop"], "prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": 4,
            "drafted": 8, "accepted": 6, "queue_s": 0.001, "ttft_s": 0.03, "total_s": 0.4, "decode_tps": 50.0, "error": None, **more}


# ---------------------------------------------------------------------------------------------- counting
def test_totals_outlive_unloads_deaths_and_new_loads():
    totals = EngineTotals()
    totals.take({"a": {"tokens": 10}, "b": {"tokens": 5}})
    totals.take({"a": {"tokens": 15}})                  # b went
    totals.take({"a": {"tokens": 15}, "b": {"tokens": 7}})      # and came anew: all of its 7 are new
    totals.take({})                                     # the engine died
    totals.take({"a": {"tokens": 3}})
    assert totals.sum("tokens") == 15 + 5 + 7 + 3
    assert totals.sums["b"]["tokens"] == 12


def test_a_load_between_two_heartbeats_takes_nothing_away():
    totals = EngineTotals()
    totals.take({"a": {"tokens": 10}})
    totals.take({"a": {"tokens": 4}})
    assert totals.sum("tokens") == 14


def test_a_histogram_counts_by_upper_bound():
    made = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 1.0, 7.0):
        made.add(value)
    assert made.buckets() == [("0.1", 2), ("1.0", 4), ("+Inf", 5)] and made.sum == pytest.approx(8.65)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40))
def test_percentiles_are_those_of_the_textbook(values):
    """The inclusive method of the standard library is the same definition."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for share, place in ((0.5, 49), (0.9, 89), (0.99, 98)):
        assert percentile(values, share) == pytest.approx(cuts[place], rel=1e-9, abs=1e-9)
    assert percentile([], 0.5) is None and percentile([3.0], 0.9) == 3.0


def test_the_meter_hears_every_end(tmp_path):
    meter = Meter()
    records = Records(tmp_path / "logs", tmp_path / "out", heard=meter.ended)
    last = Event(-1, usage=Usage(10, 5, 4, 8, 6), timing=Timing(0.001, 0.03, 0.02, 0.1, 0.4, 300.0, 50.0))
    list(records.follow(Request("secret words", Sampling(), key="ann"), INFO, iter((Event(finish="stop"), last))))
    left = records.follow(Request("secret words", Sampling()), INFO, iter((Event(text="x", ids=(1, 2)), last)))
    next(left)
    left.close()
    records.refused(Request("secret words"), INFO, InvalidRequest("no", field="prompt"))
    records.refused(Request("secret words"), "x" * 500, InvalidRequest("no", field="model"))
    with records.embedding(INFO, "bob", 2) as tokens:
        tokens += [3, 4]
    with pytest.raises(InvalidRequest), records.embedding(INFO, "bob", 1):
        raise InvalidRequest("no")
    records.refused_embedding("gone", "bob", 1, InvalidRequest("no", field="model"))
    broken = records.follow(Request("x"), INFO, iter(()))
    with pytest.raises(StopIteration):
        next(broken)
    records.close()
    lost, absent, failed, embedded, unknown, refused, cancelled, ended = meter.recent()
    assert (ended.key, ended.finish, ended.ttft, ended.tpot, ended.tokens_per_second, ended.draft) == ("ann", "stop", 0.03, 0.02, 50.0, "")
    assert (cancelled.finish, cancelled.completion_tokens, cancelled.ttft) == ("cancelled", 2, None)
    assert refused.error == "invalid_request" and len(unknown.model) == 80
    assert (embedded.kind, embedded.key, embedded.prompt_tokens, failed.error) == ("embed", "bob", 7, "invalid_request")
    assert (absent.kind, absent.model, absent.key, absent.error, lost.error) == ("embed", "gone", "bob", "invalid_request", "internal_error")
    assert meter.finished() == {("tiny", "stop"): 2, ("tiny", "cancelled"): 1, ("tiny", "error"): 3, ("", "error"): 2}
    meter.failed("internal_error")
    assert meter.errors() == {("tiny", "invalid_request"): 2, ("", "invalid_request"): 2, ("tiny", "internal_error"): 1,
                              ("", "internal_error"): 1}       # no series for a name that somebody made up
    assert "secret words" not in (tmp_path / "logs" / "requests.jsonl").read_text() + repr(meter.recent())


def test_a_record_holds_no_half_of_a_character_and_no_name_without_end(tmp_path):
    meter = Meter()
    records = Records(tmp_path / "logs", tmp_path / "out", content=True, heard=meter.ended)
    records.refused(Request("x", draft=DraftSpec("\udc00" * 1000), key="k\ud800"), "m\udc00", InvalidRequest("no", field="model"))
    list(records.follow(Request("said \udc00"), INFO, iter((Event(text="\ud800", finish="stop"), Event(-1)))))
    records.close()
    refused, followed = map(json.loads, (tmp_path / "logs" / "requests.jsonl").read_text(encoding="utf-8").splitlines())
    assert (refused["model"], refused["key"], len(refused["draft"])) == ("m\ufffd", "k\ufffd", 255) and followed["prompt"] == "said ?"
    assert (meter.recent()[1].model, meter.recent()[1].key) == ("m\ufffd", "k\ufffd") and len(meter.recent()[1].draft) == 255


def test_what_is_remembered_is_bounded():
    meter = Meter()
    for n in range(3000):
        meter.ended(facts(id=str(n)))
        meter.mark(0, 0, (0, 0), 0, 0)
    assert len(meter.recent()) == 1000 and meter.recent()[0].id == "2999" and len(meter.moments()) == 300
    assert meter.times("ttft")["tiny"][0][-1] == ("+Inf", 3000)


# ---------------------------------------------------------------------------------------------- looking
def test_figures_over_the_window(monkeypatch):
    studio = FakeStudio()
    rng = random.Random(1)
    times = [rng.uniform(0.01, 0.5) for _ in range(100)]
    for n, ttft in enumerate(times):
        studio.meter.ended(facts(id=str(n), ttft_s=ttft))
    studio.meter.ended(facts(finish=["error"], error="queue_full", ttft_s=None, prompt_tokens=None, cached_tokens=None, drafted=None, accepted=None))
    found = Monitor(studio, lambda: (GpuUse("H", 1, 2, 0.5),)).look()
    assert found.ttft.count == 100 and found.ttft.p50 == pytest.approx(statistics.median(times))
    assert (found.acceptance, found.cache_hits, found.errors) == (0.75, 0.4, (("queue_full", 1),))
    assert found.recent[0].error == "queue_full" and len(found.recent) == monitor.SHOWN and found.gpus[0].busy == 0.5
    one, = found.models
    assert (one.name, one.pages_used, one.pages_total, one.tokens) == ("tiny", 3, 8, 7)
    late = time.time() + monitor.WINDOW + 1
    monkeypatch.setattr(time, "time", lambda: late)
    assert Monitor(studio, tuple).look().ttft == monitor.Spread(0, None, None, None)


def test_a_rate_is_what_a_total_grew_in_the_last_seconds():
    moments = tuple(SimpleNamespace(at=float(at), tokens=tokens) for at, tokens in ((0, 0), (10, 1000), (11, 1100), (15, 1500), (16, 1800)))
    assert monitor.rate(moments, "tokens") == 140.0             # from 11 to 16
    assert monitor.rate(moments[:1], "tokens") == 0.0
    assert monitor.rates(moments, "tokens")[-1] == (16.0, 300.0)


def test_a_resting_model_holds_nothing():
    studio = FakeStudio()
    now = replace(studio.snapshot(), resting=("tiny",))
    one, = monitor.model_uses(now, {"tiny": 9})
    assert (one.resting, one.weights, one.pages_total, one.tokens) == (True, 0, 0, 9)


# ---------------------------------------------------------------------------------------------- prometheus
def rendered() -> str:
    studio = FakeStudio()
    studio.present = {NASTY: replace(INFO, name=NASTY, weights_bytes=5)}
    for model in ("tiny", NASTY):
        studio.meter.ended(facts(model=model))
        studio.meter.ended(facts(model=model, finish=["error"], error="queue_full", ttft_s=99.0))
    studio.meter.heard({"models": {NASTY: {"tokens": 3, "steps": 2}}})
    for status in (200, 200, 401):
        studio.meter.answered(status)
    return metrics.render(studio, (GpuUse('A "100"', 3, 4, 0.25), GpuUse("slice", 1, 2, None)))[0]


def test_metrics_obey_prometheus_own_parser():
    families = {family.name: family for family in text_string_to_metric_families(rendered())}
    samples = {(one.name, *sorted(one.labels.items())): one.value for family in families.values() for one in family.samples}
    assert samples["gainz_tokens_total", ("model", NASTY)] == 3                 # escaped there and back
    assert samples["gainz_errors_total", ("code", "queue_full"), ("model", "tiny")] == 1
    assert samples["gainz_http_responses_total", ("status", "200")] == 2
    assert samples["gainz_ttft_seconds_bucket", ("le", "0.05"), ("model", "tiny")] == 1
    assert samples["gainz_ttft_seconds_bucket", ("le", "60.0"), ("model", "tiny")] == 1
    assert samples["gainz_ttft_seconds_bucket", ("le", "+Inf"), ("model", "tiny")] == samples["gainz_ttft_seconds_count", ("model", "tiny")] == 2
    assert samples["gainz_ttft_seconds_sum", ("model", "tiny")] == pytest.approx(99.03)
    assert samples["gainz_gpu_memory_bytes", ("gpu", "0"), ("name", 'A "100"'), ("of", "used")] == 3
    assert [one.labels["gpu"] for one in families["gainz_gpu_utilization_ratio"].samples] == ["0"]


def test_metrics_obey_the_rules_of_the_format():
    """Names, units, HELP and TYPE before the samples, one group a family, no series twice: what the parser forgives."""
    text, groups, seen = rendered(), [], set()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, help_text = line[7:].split(" ", 1)
            assert help_text and name not in groups and re.fullmatch(r"gainz_[a-z][a-z0-9_]*", name)
            groups.append(name)
        elif line.startswith("# TYPE "):
            name, kind = line[7:].split(" ")
            assert name == groups[-1] and kind in ("counter", "gauge", "histogram")
            assert (kind == "counter") == name.endswith("_total") and not name.endswith(("_ms", "_mb", "_percent"))
        else:
            series = line.rsplit(" ", 1)[0]
            assert series.startswith(groups[-1]) and series not in seen
            float(line.rsplit(" ", 1)[1])
            seen.add(series)
    assert len(groups) >= 25


def test_counters_only_grow_whatever_is_unloaded():
    studio = FakeStudio()
    studio.mark()
    before = metrics.render(studio)[0]
    studio.present = {}
    studio.meter.heard({"models": {}})
    assert 'gainz_tokens_total{model="tiny"} 7.0' in before and 'gainz_tokens_total{model="tiny"} 7.0' in metrics.render(studio)[0]


# ---------------------------------------------------------------------------------------------- drawing
def test_a_line_has_one_point_a_step_and_stands_still_where_its_values_do():
    steady = [(at / 2, 4.0) for at in range(200)]                       # two a second, 0.0 to 99.5
    later = [(at + 5.0, value) for at, value in steady]
    assert thinned(steady, 99.5, 5.0, 10, max) == [(place, 4.0) for place in range(1, 11)] == thinned(later, 104.5, 5.0, 10, max)
    assert thinned([(1.0, 2.0), (4.9, 6.0), (11.0, 1.0)], 11.0, 5.0, 60, statistics.fmean) == [(58, 4.0), (60, 1.0)]
    drawn = chart("t", "n", "9", [Line("", [(1, 0.0), (2, 9.0), (4, 4.5)])], 4, 9.0, ("then", "now"))
    assert drawn.count("<polyline") == 2 and 'points="75,72 150,0"' in drawn and 'points="300,36"' in drawn


def test_a_page_gets_only_the_parts_that_have_changed():
    made = {"a": "one", "b": "two"}
    same, first = live.changed("en", made, "")
    assert not same and first["parts"] == made
    assert live.changed("en", made, first["mark"]) == (True, {**first, "parts": {}})
    assert live.changed("en", {**made, "b": "three"}, first["mark"])[1]["parts"] == {"b": "three"}
    assert live.changed("zh", made, first["mark"])[1]["parts"] == made == live.changed("en", made, "x.y.z")[1]["parts"]


def test_what_a_page_asks_for_again_is_small_and_nothing_where_nothing_changed():
    studio = FakeStudio()
    watched = Monitor(studio, tuple)
    for n in range(300):
        studio.meter.mark(n % 3, 0, (3, 8), 2 * 10**9, 10**8)
    app = FastAPI()
    app.include_router(live.router(SimpleNamespace(studio=studio, tasks=SimpleNamespace(running=lambda: []), monitor=watched,
                                                   startup_task=lambda: None, startup_error=lambda: None)))
    studio.mark = lambda: None
    with TestClient(app) as client:
        state, board = client.get("/page/state").json(), client.get("/page/monitor").json()
        assert "tiny" in state["status"] and state["banner"] == "" and state["version"] == studio.changed.version
        assert set(board["parts"]) == set(PARTS) and sum(map(len, board["parts"].values())) < 12_000
        assert client.get("/page/state", params={"seen": state["mark"]}).status_code == 204
        assert client.get("/page/monitor", params={"seen": board["mark"]}).status_code == 204
        studio.status, studio.reason = "dead", "code -9"
        assert "code -9" in client.get("/page/state", params={"seen": state["mark"]}, headers={"accept-language": "zh"}).json()["banner"]
        studio.meter.ended(facts(error="queue_full", finish=["error"]))
        parts = client.get("/page/monitor", params={"seen": board["mark"]}).json()["parts"]
        assert "queue_full" in parts["errors"] and "charts" not in parts
        studio.meter.ended(facts(model="\udc00"))                                   # whatever a record holds
        assert client.get("/page/monitor").status_code == 200


def test_a_place_of_a_tab_is_asked_for_by_its_name_and_a_measured_machine_less_often():
    studio, running = FakeStudio(), []
    said = {"text": "<b>2 / 8</b>"}
    app = FastAPI()
    app.include_router(live.router(SimpleNamespace(studio=studio, tasks=SimpleNamespace(running=lambda: running), monitor=None,
                                                   startup_task=lambda: None, startup_error=lambda: None,
                                                   places={"bench": lambda words: f"{words} {said['text']}"})))
    with TestClient(app) as client:
        first = client.get("/page/place/bench", headers={"accept-language": "zh"}).json()
        assert first["html"] == "zh <b>2 / 8</b>"
        assert client.get("/page/place/bench", params={"seen": first["mark"]}, headers={"accept-language": "zh"}).status_code == 204
        said["text"] = "<b>3 / 8</b>"
        assert client.get("/page/place/bench", params={"seen": first["mark"]}, headers={"accept-language": "zh"}).json()["html"] == "zh <b>3 / 8</b>"
        assert client.get("/page/place/other").status_code == 404
        for kind, pace in (("pull", live.BUSY), (live.MEASURED, live.CALM)):
            running[:] = [Task(1, kind, "x")]
            assert client.get("/page/state").json()["pace"] == pace


# ---------------------------------------------------------------------------------------------- devices
class FakeNvml:
    """The four calls that are made of the driver's library."""

    class NVMLError(Exception):
        pass

    def __init__(self, devices: int) -> None:
        self.devices, self.inits, self.broken = devices, 0, False

    def nvmlInit(self):
        self.inits += 1
        if not self.devices:
            raise self.NVMLError("no driver")

    def nvmlDeviceGetCount(self):
        if self.broken:
            raise self.NVMLError("gone")
        return self.devices

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=10 * (handle + 1), total=100)

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle == 1:
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=40)

    def nvmlDeviceGetName(self, handle):
        return b"Device"


def test_devices_tell_memory_and_how_busy_they_are(monkeypatch):
    nvml = FakeNvml(2)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    watch = gpu.GpuWatch()
    assert watch.use() == (GpuUse("Device", 10, 100, 0.4), GpuUse("Device", 20, 100, None)) == watch.use()
    assert nvml.inits == 1
    nvml.broken = True
    assert watch.use() == ()


def test_without_a_driver_it_is_asked_once(monkeypatch):
    nvml = FakeNvml(0)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    watch = gpu.GpuWatch()
    assert watch.use() == watch.use() == () and nvml.inits == 1
