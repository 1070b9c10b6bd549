"""The monitor tab in a browser: it lives while it is looked at, shows no word of what was asked, and gives a bundle to take home."""

from __future__ import annotations

import io
import json
import zipfile

import httpx
import pytest
from playwright.sync_api import expect

from gainz_ui import live
from tests.browser.steps import tab, wait_until


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(live, "WATCH", 0.25)    # of the page over the stage; the program in its own process keeps its pace


def test_the_monitor_shows_what_the_engine_does_and_its_bundle_can_be_taken_home(app, visit):
    body = {"model": "llama-fp16", "prompt": "a planted secret phrase", "max_tokens": 12, "ignore_eos": True}
    assert httpx.post(app + "generate", json=body, timeout=60).status_code == 200
    assert httpx.post(app + "generate", json={**body, "temperature": 5, "logit_bias": {"99999999": 1}}, timeout=60).status_code == 400
    page = visit(app)
    tab(page, "Monitor")
    live, recent = page.locator("#gz-monitor"), page.locator("#gz-monitor-recent")
    expect(live.locator(".gz-chart")).to_have_count(4)
    expect(live).to_contain_text("To the first token")
    expect(live.locator(".gz-log").last).to_contain_text("llama-fp16")
    expect(recent.locator("tbody tr").first).to_contain_text("A value cannot be honoured")
    expect(recent.locator("tbody tr").nth(1)).to_contain_text("cut at the token limit")
    expect(page.locator("#gz-monitor-errors")).to_contain_text("invalid_request")
    assert page.content().count("planted secret") == 0
    page.click("#gz-monitor-bundle")
    expect(page.locator("#gz-monitor-said")).to_contain_text("The bundle is made.")
    with page.expect_download() as got:
        page.locator("#gz-monitor-file a[download]").first.click()
    made = zipfile.ZipFile(io.BytesIO(got.value.path().read_bytes()))
    assert {"doctor.json", "monitor.json", "settings.json", "logs/requests.jsonl"} <= set(made.namelist())
    assert json.loads(made.read("loaded.json"))[0]["name"] == "llama-fp16"


def test_it_is_drawn_by_itself_and_only_while_it_is_open(stage, visit):
    looks = []

    def rests(page) -> bool:
        """Not looked at any more for three ticks; a look may be under way at first."""
        for _ in range(4):
            seen = len(looks)
            page.wait_for_timeout(900)
            if len(looks) == seen:
                return True
        return False

    real = stage.blocks.gainz_page.monitor.look
    stage.blocks.gainz_page.monitor.look = lambda: looks.append(1) or real()
    try:
        page = visit(stage.url)
        expect(page.locator("#gz-status")).to_contain_text("starter")
        assert not looks
        tab(page, "Monitor")
        expect(page.locator("#gz-monitor-tiles")).not_to_be_empty()
        stage.studio.meter.ended({"id": "7", "model": "newcomer", "backend": "fake", "finish": ["length"], "ttft_s": 0.5, "prompt_tokens": 4})
        expect(page.locator("#gz-monitor-recent tbody tr").first).to_contain_text("newcomer")
        wait_until(lambda: len(looks) >= 3)
        tab(page, "Doctor")
        expect(page.locator("#gz-monitor")).to_be_hidden()
        assert rests(page)
        seen = len(looks)
        tab(page, "Monitor")
        wait_until(lambda: len(looks) > seen)
        page.evaluate("Object.defineProperty(document, 'hidden', {get: () => true, configurable: true})")      # another program's window
        assert rests(page)
    finally:
        stage.blocks.gainz_page.monitor.look = real
