"""The compare tab in a browser: side by side, the report and its files, the first run's offer; and the form that makes a
variant."""

from __future__ import annotations

import csv
import json
import struct
from pathlib import Path

import pytest
from playwright.sync_api import expect

from backends.base import OutOfMemory
from gainz_ui.services import starter
from gainz_ui.settings import Settings
from tests.browser.steps import tab, wait_until
from tests.browser.test_drafts import choose


@pytest.fixture
def both(stage):
    """Two models in memory, both loaded ones chosen."""
    stage.reset(("starter", "starter-fp16"))
    return stage


def compare(page, text: str = "How fast is light?") -> None:
    tab(page, "Compare")
    page.fill("#gz-compare-prompt textarea", text)
    page.click("#gz-compare-run")


def test_two_answers_grow_side_by_side_with_their_figures(both, visit):
    page = visit(both.url)
    compare(page, "")
    expect(page.locator("#gz-compare-plan")).to_contain_text("There is no prompt")
    assert both.studio.requests == []
    compare(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for number, name in enumerate(("starter", "starter-fp16")):
        card = page.locator(f"#gz-side-{number}")
        expect(card).to_contain_text("kilometres a second")
        expect(card.locator(".gz-chip")).to_contain_text("done")
        for text in (name, "First token", "tok/s", "40", "255MB", "aten · 2 threads"):
            expect(card).to_contain_text(text)
    expect(page.locator("#gz-side-0")).to_contain_text("reference")
    expect(page.locator("#gz-side-1")).to_contain_text("The same answer as starter")
    expect(page.locator("#gz-side-2")).to_be_hidden()
    expect(page.locator("#gz-compare-plan")).to_contain_text("2 models answer at the same time")
    seeds = {request.sampling.seed for _, request in both.studio.requests}
    assert len(both.studio.requests) == 2 and len(seeds) == 1 and None not in seeds
    with page.expect_download() as caught:
        page.click("#gz-compare-save")
    saved = json.loads(Path(caught.value.path()).read_text())
    assert saved["seed"] in seeds and [answer["tokens"] for answer in saved["answers"]] == [40, 40]


def test_one_draft_for_all_that_it_fits(both, visit):
    from dataclasses import replace
    models = both.studio._models
    models["starter-fp16"] = replace(models["starter-fp16"], capabilities=("logprobs",))
    both.studio.changed.emit()
    page = visit(both.url)
    tab(page, "Compare")
    expect(page.locator("#gz-compare-draft-length")).to_be_hidden()
    choose(page, "#gz-compare-draft", "Lookup in the text")
    expect(page.locator("#gz-compare-draft-note")).to_contain_text("starter-fp16 answers without it: starter-fp16 runs one sequence")
    choose(page, "#gz-compare-draft-length", "4")
    compare(page)
    first, second = (page.locator(f"#gz-side-{number}") for number in (0, 1))
    for text in ("It pays: the answer came 1.62 × as fast.", "75% of 32 draft tokens accepted, 2.50 tokens a pass"):
        expect(first).to_contain_text(text)
    expect(second).to_contain_text("Answered without a draft: Lookup in the text does not fit")
    asked = {name: request.draft for name, request in both.studio.requests[-2:]}
    assert (asked["starter"].name, asked["starter"].length, asked["starter-fp16"]) == ("lookup", 4, None)
    page.locator("#gz-api-compare button").first.click()
    expect(page.locator("#gz-api-code-compare")).to_contain_text("draft='lookup', draft_length=4")


def test_where_answers_part_is_marked(both, visit):
    stream = both.studio._stream

    def other(request, prompt, cancel):
        for event in stream(request, prompt, cancel):
            if event.ids and event.ids[0] == 5 and both.studio.requests[-1][0] == "starter-fp16":
                from dataclasses import replace
                event = replace(event, text=" wholly", ids=(999,))
            yield event

    both.studio._stream = other
    try:
        page = visit(both.url)
        tab(page, "Compare")
        page.locator("#gz-tab-tab_compare .gz-fold button").first.click()
        page.locator("#gz-compare-turn").get_by_role("checkbox").check()    # so that each stream knows whose it is
        compare(page)
        card = page.locator("#gz-side-1")
        expect(card).to_contain_text("Parts from starter at token 6")
        expect(card.locator("mark")).to_have_text("wholly")
        expect(page.locator("#gz-side-0 mark")).to_have_count(1)
        expect(card.locator(".gz-other")).to_have_count(0)                  # all the rest is the same
    finally:
        del both.studio._stream


def test_stop_ends_both_and_keeps_what_was_said_and_leaving_the_page_stops_them_too(both, visit):
    both.studio.speed, both.studio.tokens = 30.0, 5000
    page = visit(both.url)
    compare(page)
    expect(page.locator("#gz-side-1 .gz-answer")).to_contain_text("kilometres")
    page.click("#gz-compare-stop")
    expect(page.locator("#gz-compare-run")).to_be_visible()
    wait_until(lambda: both.studio._running == 0)
    expect(page.locator("#gz-side-0 .gz-answer")).to_contain_text("kilometres")
    compare(page)
    wait_until(lambda: both.studio._running == 2)
    visit.leaving()
    page.goto("about:blank")
    wait_until(lambda: both.studio._running == 0)


def test_what_memory_does_not_hold_runs_in_turn_and_the_page_says_so(stage, visit, monkeypatch):
    from gainz_ui.services import compare as service
    stage.reset(())
    one = stage.studio.estimate("starter", {"context": 4096}).total
    monkeypatch.setattr(service, "free_memory", lambda device: int(one * 1.5))
    page = visit(stage.url)
    compare(page)
    expect(page.locator("#gz-compare-plan")).to_contain_text("Memory does not hold all of them at once")
    for number in (0, 1):
        expect(page.locator(f"#gz-side-{number} .gz-chip")).to_contain_text("done, unloaded")
    assert stage.studio.loaded() == {}


def test_the_report_with_its_plot_and_its_files(both, visit):
    page = visit(both.url)
    tab(page, "Compare")
    page.click("#gz-quality-run")
    expect(page.locator("#gz-quality-work")).to_contain_text("Comparing on the text")
    report = page.locator("#gz-quality-report")
    for text in ("measurably different", "0.300 – 0.320", "76.0 % – 78.0 %", "44.60", "± 1.90", "9 lost, 5 won",
                 "bundled evaluation text",
                 "95 % intervals"):
        expect(report).to_contain_text(text)
    expect(page.locator("#gz-plot-quality svg.main-svg").first).to_be_visible()
    with page.expect_download() as caught:
        page.click("#gz-quality-csv")
    (row,) = csv.DictReader(Path(caught.value.path()).read_text().splitlines())
    assert row["model"] == "starter-fp16" and row["kl_mean"] == "0.31"
    with page.expect_download() as caught:
        page.click("#gz-quality-json")
    assert json.loads(Path(caught.value.path()).read_text())["format"] == "gainz-quality-1"
    with page.expect_download() as caught:
        page.click("#gz-quality-png")
    raw = Path(caught.value.path()).read_bytes()
    width, height = struct.unpack(">II", raw[16:24])
    assert raw[:8] == b"\x89PNG\r\n\x1a\n" and width > 1000 and height == 800 and len(raw) > 10_000
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    phone = visit(both.url, width=390, height=844, scheme="dark", locale="zh-CN")      # another page finds it, in its own words
    tab(phone, "对比")
    for text in ("有可测的差别", "由对变错 9", "44.60"):
        expect(phone.locator("#gz-quality-report")).to_contain_text(text)
    expect(phone.locator("#gz-plot-quality svg.main-svg").first).to_be_visible()
    phone.fill("#gz-compare-prompt textarea", "How fast is light?")
    phone.click("#gz-compare-run")
    expect(phone.locator("#gz-side-1 .gz-answer")).to_contain_text("kilometres")
    assert phone.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_report_can_be_cancelled_and_short_memory_offers_to_unload(both, visit):
    both.jobs.seconds = 30.0
    page = visit(both.url)
    tab(page, "Compare")
    page.click("#gz-quality-run")
    page.click("#gz-quality-cancel")
    expect(page.locator("#gz-quality-work")).to_contain_text("cancelled")
    expect(page.locator("#gz-quality-run")).to_be_visible()
    both.jobs.seconds = 0.5
    both.jobs.error = OutOfMemory("This job needs more memory than is free.", need_bytes=2, free_bytes=1)
    page.click("#gz-quality-run")
    expect(page.locator("#gz-quality-work")).to_contain_text("more memory than is free")
    both.jobs.error = None
    page.click("#gz-quality-free")
    expect(page.locator("#gz-quality-report")).to_contain_text("measurably different")
    assert both.studio.loaded() == {}


def test_the_first_run_makes_both_variants_and_shows_them(stage, visit, tmp_path):
    from types import SimpleNamespace
    (tmp_path / starter.NAME).mkdir()
    stage.studio.settings = Settings(models=tmp_path)
    entry = vars(stage.studio._entries["starter"]) | {"name": starter.NAME}
    stage.studio._entries[starter.NAME] = SimpleNamespace(**entry)
    try:
        page = visit(stage.url)
        tab(page, "Compare")
        expect(page.locator("#gz-offer-text")).to_contain_text("GPTQ + AWQ")
        page.click("#gz-offer")
        expect(page.locator("#gz-offer-work")).to_contain_text("Quantizing")
        for number, name in enumerate((starter.NAME, "SmolLM2-135M-Instruct-gptq-4bit-g64",
                                       "SmolLM2-135M-Instruct-awq-4bit-g64")):
            expect(page.locator(f"#gz-side-{number}")).to_contain_text(name)
            expect(page.locator(f"#gz-side-{number} .gz-chip")).to_contain_text("done")
        expect(page.locator("#gz-offer-card")).to_be_hidden()
        assert [call[1][call[1].index("--model") + 1] for call in stage.jobs.calls] == [starter.NAME] * 2
        assert stage.jobs.calls[1][1][-1] == "--method=awq"
    finally:
        del stage.studio._entries[starter.NAME]
        stage.studio.settings = Settings(models=Path("no-such-folder"))


def test_a_variant_is_made_on_the_models_tab(stage, visit):
    page = visit(stage.url)
    tab(page, "Models")
    page.locator("#gz-make button").first.click()
    page.click("#gz-variant-run")
    expect(page.locator("#gz-models-notice")).to_contain_text("starter-gptq-4bit-g64 is made")
    expect(page.locator("#gz-catalog")).to_contain_text("starter-gptq-4bit-g64")
    assert stage.jobs.calls[0][1] == ["--model", "starter", "--out", "starter-gptq-4bit-g64"]
    page.locator("#gz-variant-group input").click()
    page.get_by_role("option", name="512", exact=True).click()
    page.click("#gz-variant-run")
    expect(page.locator("#gz-models-notice")).to_contain_text("do not divide this model's matrices: 576")
