"""The benchmark tab in a browser, over real (tiny) models in a real engine: from the form to a verdict, its figures, its files, and back
from the history."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.steps import tab


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "mine.txt"
    path.write_text("one\ntwo\nthree\nfour\nfive\nsix\n")
    return path


def choose(page, place: str, option: str) -> None:
    page.locator(f"{place} input").first.click()
    page.get_by_role("option", name=option).first.click()


def measure(page, prompts, pairs: str = "8") -> None:
    """llama against qwen, eight tokens an answer."""
    choose(page, "#gz-bench-a-model", "llama-fp16")
    choose(page, "#gz-bench-b-model", "qwen2-fp16")
    page.fill("#gz-bench-tokens input", "8")
    page.locator("#gz-bench-pairs input").first.click()
    page.get_by_role("option", name=pairs, exact=True).first.click()
    page.locator("#gz-bench-more button").first.click()
    page.set_input_files("#gz-bench-file input[type=file]", str(prompts))
    expect(page.locator("#gz-bench-file")).to_contain_text("mine")
    page.click("#gz-bench-run")


def test_from_the_form_to_a_verdict_and_back(app, visit, prompts):
    page = visit(app)
    tab(page, "Benchmark")
    measure(page, prompts)
    verdict = page.locator("#gz-bench-verdict")
    expect(verdict).to_contain_text("qwen2-fp16", timeout=90_000)
    expect(verdict).to_contain_text("from 6 prompts")
    expect(page.locator("#gz-bench-table")).to_contain_text("Decode")
    expect(page.locator("#gz-bench-about")).to_contain_text("A against A")
    for name in ("ratio", "time", "slopes", "gaps", "roofline"):
        expect(page.locator(f"#gz-plot-bench-{name} svg.main-svg").first).to_be_visible()
    expect(page.locator("#gz-plot-bench-trade")).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    with page.expect_download() as caught:
        page.click("#gz-bench-json")
    report = json.loads(Path(caught.value.path()).read_text())
    assert len(report["pairs"]) == 8 and report["workload"] == "mine.txt" and report["name"] in caught.value.suggested_filename
    for name, part in (("csv", "pair,prompt"), ("benchstat", "BenchmarkDecode/side=A"), ("llama", "model_filename"), ("md", "| measure |")):
        with page.expect_download() as caught:
            page.click(f"#gz-bench-{name}")
        assert part in Path(caught.value.path()).read_text()
    with page.expect_download() as caught:
        page.click("#gz-bench-png")
    assert Path(caught.value.path()).read_bytes()[:4] == b"\x89PNG"
    _history(page, report["name"])
    page.click("#gz-bench-use-b")
    expect(page.locator("#gz-bench-used")).to_contain_text("In use: qwen2-fp16")
    expect(page.locator("#gz-status")).to_contain_text("qwen2-fp16")


def _history(page, name: str) -> None:
    expect(page.locator("#gz-bench-runs")).to_contain_text("llama-fp16 → qwen2-fp16")
    page.fill("#gz-bench-filter input, #gz-bench-filter textarea", "no-such-thing")
    expect(page.locator("#gz-bench-none")).to_contain_text("has all of these words")
    page.fill("#gz-bench-filter input, #gz-bench-filter textarea", "qwen2")
    expect(page.locator("#gz-bench-runs label").first).to_be_visible()
    page.locator("#gz-bench-runs label").first.click()
    page.fill("#gz-bench-tokens input", "99")
    page.click("#gz-bench-again")
    expect(page.locator("#gz-bench-past-said")).to_contain_text("as it was then")
    expect(page.locator("#gz-bench-tokens input")).to_have_value("8")


def test_it_fits_a_phone_and_reads_in_chinese(app, visit):
    """The last report can be opened on every page; so does what went wrong stand there, in words."""
    page = visit(app, width=390, scheme="dark", locale="zh-CN")
    tab(page, "基准测试")
    expect(page.locator("#gz-bench-runs label").first).to_be_visible()
    page.locator("#gz-bench-runs label").first.click()
    page.click("#gz-bench-open")
    expect(page.locator("#gz-bench-verdict strong")).to_contain_text("qwen2-fp16")
    expect(page.locator("#gz-plot-bench-ratio svg.main-svg").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.fill("#gz-bench-tokens input", "8")
    choose(page, "#gz-bench-a-model", "llama-fp16")
    page.locator("#gz-bench-a-draft input").fill("no-such-draft")
    page.keyboard.press("Enter")
    page.click("#gz-bench-run")
    expect(page.locator("#gz-bench-work")).to_contain_text("no-such-draft")


def test_stopping_keeps_what_is_done(app, visit, prompts):
    page = visit(app)
    tab(page, "Benchmark")
    measure(page, prompts, "64")
    expect(page.locator("#gz-bench-work")).to_contain_text(re.compile(r"([2-9]|\d\d) / 64"), timeout=90_000)
    page.click("#gz-bench-cancel")
    expect(page.locator("#gz-bench-run")).to_be_visible()
    expect(page.locator("#gz-bench-verdict")).to_contain_text("Stopped early")
    expect(page.locator("#gz-plot-bench-slopes svg.main-svg").first).to_be_visible()
    with page.expect_download() as caught:
        page.click("#gz-bench-json")
    report = json.loads(Path(caught.value.path()).read_text())
    assert report["cancelled"] and 1 <= len(report["pairs"]) < 64
    choose(page, "#gz-bench-baseline", "llama-fp16")
    expect(page.locator("#gz-bench-changes")).to_contain_text("No setting, version or machine differs")
