"""The frame in a browser: languages, colours, trouble, keyboard, phone, accessibility."""

from __future__ import annotations

import re
import time

import pytest
from playwright.sync_api import expect

from tests.browser.steps import ASK, answered, ask, tab


def test_language_and_colours_are_kept(stage, visit):
    page = visit(stage.url)
    ask(page, "你好")
    answered(page)
    page.click("#gz-language")
    expect(page.get_by_role("tab", name="对话", exact=True)).to_be_visible()
    expect(page.locator("#gz-send")).to_have_text("发送")
    expect(page.locator("#gz-status")).to_contain_text("引擎就绪")
    expect(page.locator("#gz-stats")).to_contain_text("首个词元")
    expect(page.locator("#gz-chatbot")).to_contain_text("你好")
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    page.click("#gz-scheme")
    expect(page.locator("body")).to_have_class(re.compile("dark"))
    page.reload(wait_until="domcontentloaded")
    expect(page.locator("body")).to_have_class(re.compile("dark"))
    expect(page.locator("#gz-send")).to_have_text("发送")
    assert "__theme" not in page.url or page.wait_for_function("!location.href.includes('__theme')")


def test_a_chinese_browser_gets_chinese_and_on_a_phone_nothing_of_its_monitor_sticks_out(stage, visit):
    stage.studio.resting = ("starter",)
    page = visit(stage.url, width=390, height=844, locale="zh-CN", scheme="dark")
    expect(page.get_by_role("tab", name="模型", exact=True)).to_be_visible()
    left = page.evaluate(
        r"document.body.innerText.split('\n').filter(line => line.trim() !== 'English' && /^[A-Za-z][A-Za-z ,.]{6,}$/.test(line.trim()))"
    )
    assert left == []
    tab(page, "监控")
    expect(page.locator("#gz-monitor")).to_contain_text("休眠中")
    expect(page.locator("#gz-status")).to_contain_text("休眠")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_dead_engine_is_said_in_words_and_the_doctor_reports_and_saves(stage, visit):
    page = visit(stage.url)
    stage.studio.dead = "the engine process ended with code -9"
    expect(page.locator("#gz-banner")).to_contain_text("ended with code -9")
    expect(page.locator("#gz-status")).to_contain_text("Engine stopped")
    stage.studio.dead = ""
    expect(page.locator("#gz-banner")).to_be_hidden()
    tab(page, "Doctor")
    page.click("#gz-doctor-run")
    expect(page.locator("#gz-doctor")).to_contain_text("Install g++.")
    with page.expect_download() as got:
        page.click("#gz-doctor-save")
    assert '"name": "C++ compiler"' in got.value.path().read_text(encoding="utf-8")


def test_the_keyboard_is_enough(stage, visit):
    page = visit(stage.url)
    page.locator(ASK).wait_for()
    page.focus(ASK)
    page.keyboard.type("By keyboard")
    page.keyboard.press("Enter")
    answered(page)
    page.get_by_role("tab", name="Chat", exact=True).focus()
    page.keyboard.press("Tab") if page.evaluate("document.activeElement.getAttribute('aria-selected')") != "true" else None
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("(document.activeElement.closest('[id^=gz-]') || {id: ''}).id"))
    assert {"gz-composer", "gz-send", "gz-new", "gz-model", "gz-system", "gz-preset"} <= reached


TABS = ("Chat", "Models", "Doctor")


def stands(page, name: str) -> None:
    """The tab is open, has what it shows, and moves no more."""
    tab(page, name)
    expect(page.get_by_role("tab", name=name, exact=True)).to_have_attribute("aria-selected", "true")
    if name == "Doctor":
        page.click("#gz-doctor-run")
        expect(page.locator("#gz-doctor")).to_contain_text("Python")
    time.sleep(0.4)


def test_nothing_scrolls_sideways_on_a_phone(stage, visit):
    page = visit(stage.url, width=390, height=844)
    ask(page, "unbroken" * 30)
    answered(page)
    for name in TABS:
        stands(page, name)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        wide = page.evaluate("""[...document.querySelectorAll('button, .gz-chip, .gz-tile dd, input')].filter(e => e.offsetParent &&
            e.getBoundingClientRect().right > innerWidth + 1).map(e => e.id || e.className)""")
        assert wide == [], name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(stage, visit, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = visit(stage.url, scheme=scheme)
    ask(page, "Hello")
    answered(page)
    for name in TABS:
        stands(page, name)
        found = axe.run(page).response["violations"]
        serious = [(item["id"], [node["html"][:160] for node in item["nodes"][:3]]) for item in found
                   if item["impact"] in {"serious", "critical"}]
        assert serious == [], name
