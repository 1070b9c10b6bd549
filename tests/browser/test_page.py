"""The page in a browser, over a studio whose speed and state the test sets."""

from __future__ import annotations

import re
import time

import pytest
from playwright.sync_api import expect

from backends.base import FetchFailed, Progress

ASK = "#gz-composer textarea"
ANSWER = "#gz-chatbot .bot.message"


def ask(page, text: str) -> None:
    page.fill(ASK, text)
    page.press(ASK, "Enter")


def answered(page) -> None:
    expect(page.locator("#gz-stats")).to_contain_text("complete")
    expect(page.locator("#gz-send")).to_be_visible()


def tab(page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def wait_until(truth, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.05)


# ---------------------------------------------------------------------------------------------- first run
def test_the_first_run_shows_the_fetch_then_the_chat(stage, visit):
    stage.reset(loaded=())
    go_on = []

    def work(report, cancel):
        report(Progress("fetch", 43_000_000, 98_362_432))
        while not go_on:
            time.sleep(0.02)
        stage.studio.load("starter")

    stage.startup.work = work
    stage.startup.begin()
    page = visit(stage.url)
    gate = page.locator("#gz-gate")
    expect(gate).to_contain_text("Fetching the starter model")
    expect(gate).to_contain_text("Fetching 43 MB of 98 MB")
    expect(gate.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "44")
    tab(page, "Models")
    expect(page.locator("#gz-catalog label").first).not_to_contain_text("loaded")
    go_on.append(True)
    expect(page.locator("#gz-catalog label").first).to_contain_text("loaded")
    tab(page, "Chat")
    expect(page.locator("#gz-chatbot")).to_be_visible()
    expect(gate).to_be_hidden()
    expect(page.locator("#gz-status")).to_contain_text("starter")
    ask(page, "Hello")
    answered(page)


def test_a_start_that_failed_says_why_and_can_be_tried_again(stage, visit):
    stage.reset(loaded=())
    stage.startup.error = FetchFailed("The index could not be reached.", host="example")
    stage.startup.work = lambda report, cancel: stage.studio.load("starter")
    page = visit(stage.url)
    expect(page.locator("#gz-gate")).to_contain_text("The index could not be reached.")
    page.click("#gz-start-again")
    expect(page.locator("#gz-chatbot")).to_be_visible()


def test_without_a_model_the_page_leads_to_the_models(stage, visit):
    stage.reset(loaded=())
    page = visit(stage.url)
    expect(page.locator("#gz-gate")).to_contain_text("No model is loaded")
    page.click("#gz-open-models")
    expect(page.locator("#gz-load")).to_be_visible()


# ---------------------------------------------------------------------------------------------- chat
def test_chat_with_its_figures_and_its_code(stage, visit):
    page = visit(stage.url)
    ask(page, "How fast is light?")
    answered(page)
    expect(page.locator(ANSWER).last).to_contain_text("299,792 kilometres a second")
    stats = page.locator("#gz-stats")
    for text in ("First token", "tok/s", "Answered by starter", "aten · 2 threads", "fused decoder", "2,048", "No C++ compiler"):
        expect(stats).to_contain_text(text)
    expect(stats.locator(".gz-tile").nth(2)).to_contain_text("40")
    page.locator("#gz-api-chat button").first.click()
    code = page.locator("#gz-api-code-chat")
    expect(code.locator("pre")).to_have_count(2)
    for text in ("gradio_client", "How fast is light?", f"curl {stage.url}generate"):
        expect(code).to_contain_text(text)
    request = stage.studio.requests[-1][1]
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.max_tokens) == (0.7, 40, 1024)


def test_stop_keeps_the_partial_text_and_stops_the_engine(stage, visit):
    stage.studio.speed, stage.studio.tokens = 40.0, 1000
    page = visit(stage.url)
    ask(page, "Count")
    expect(page.locator(ANSWER).last).to_contain_text("kilometres")
    page.click("#gz-stop")
    expect(page.locator("#gz-stats")).to_contain_text("stopped")
    expect(page.locator("#gz-send")).to_be_visible()
    expect(page.locator("#gz-stop")).to_be_hidden()
    steps = stage.studio.steps
    time.sleep(0.5)
    assert stage.studio.steps == steps and stage.studio._running == 0
    expect(page.locator(ANSWER).last).to_contain_text("kilometres")
    assert page.locator(".toast-body.error").count() == 0
    page.click("#gz-continue")
    wait_until(lambda: len(stage.studio.requests) == 2)
    assert stage.studio.requests[-1][1].continue_last and stage.studio.requests[-1][1].prompt[-1].role == "assistant"
    page.click("#gz-stop")
    expect(page.locator("#gz-send")).to_be_visible()
    assert page.locator(ANSWER).count() == 1, "the answer went on in place"


def test_five_long_answers_do_not_hold_the_page_up(stage, visit):
    stage.studio.speed, stage.studio.tokens = 3.0, 2000     # slow: what is measured is the server, not five browsers painting
    pages = [visit(stage.url) for _ in range(5)]
    for page in pages:
        ask(page, "Go on for long")
    wait_until(lambda: stage.studio._running == 5)
    tab(pages[0], "Models")
    expect(pages[0].locator("#gz-unload")).to_be_visible()
    begun = time.monotonic()
    with pages[0].expect_response(lambda response: "/run/" in response.url and response.request.post_data_json["data"][:1] == ["starter-fp16"]):
        pages[0].locator("#gz-catalog label").nth(1).click()
    took = time.monotonic() - begun
    expect(pages[0].locator("#gz-details")).to_contain_text("starter-fp16")
    assert took < 5.0, "the answers run for ten minutes; on an idle machine this takes a tenth of a second"
    begun = time.monotonic()
    pages[1].click("#gz-stop")
    wait_until(lambda: stage.studio._running == 4)
    assert time.monotonic() - begun < 5.0
    for page in pages[2:]:
        page.click("#gz-stop")
    tab(pages[0], "Chat")
    pages[0].click("#gz-stop")
    wait_until(lambda: stage.studio._running == 0)


def test_edit_and_regenerate(stage, visit):
    page = visit(stage.url)
    ask(page, "First question")
    answered(page)
    page.get_by_role("button", name="Retry").click()
    wait_until(lambda: len(stage.studio.requests) == 2)
    answered(page)
    assert [m.content for m in stage.studio.requests[-1][1].prompt] == ["First question"]
    page.get_by_role("button", name="Edit").first.click()
    box = page.locator("#gz-chatbot textarea").first
    box.fill("Second question")
    page.get_by_role("button", name="Submit").click()
    wait_until(lambda: len(stage.studio.requests) == 3)
    answered(page)
    assert [m.content for m in stage.studio.requests[-1][1].prompt] == ["Second question"]
    expect(page.locator("#gz-chatbot")).not_to_contain_text("First question")


def test_a_long_chat_drops_its_oldest_turns_in_sight_or_refuses(stage, visit):
    stage.reset()
    stage.studio.context, stage.studio.tokens = 1100, 20
    from tests.fakes.studio import info
    stage.studio._models["starter"] = info("starter", 1100)
    page = visit(stage.url)
    ask(page, "one " * 40)
    answered(page)
    ask(page, "two " * 40)
    expect(page.locator("#gz-chatbot")).to_contain_text("no longer fit the context and are not sent")
    answered(page)
    assert all("one" not in m.content for m in stage.studio.requests[-1][1].prompt)
    page.get_by_label("refuse").check()
    ask(page, "three " * 40)
    expect(page.locator("#gz-notice")).to_contain_text("do not fit the context")
    assert len(stage.studio.requests) == 2
    page.get_by_label("drop the oldest turns").check()
    page.click("#gz-retry")
    wait_until(lambda: len(stage.studio.requests) == 3)
    answered(page)


def test_a_page_that_is_reloaded_in_mid_answer_finds_it_again(stage, visit):
    stage.studio.speed, stage.studio.tokens = 25.0, 100
    page = visit(stage.url, width=360, height=800)
    ask(page, "A long one")
    expect(page.locator(ANSWER).last).to_contain_text("kilometres")
    visit.leaving()
    page.reload(wait_until="domcontentloaded")
    expect(page.locator("#gz-stop")).to_be_visible()
    answered(page)
    expect(page.locator(ANSWER).last).to_contain_text("Moon")
    assert len(stage.studio.requests) == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_answer_that_was_lost_offers_a_retry(stage, visit):
    stage.studio.speed, stage.studio.tokens = 20.0, 2000
    page = visit(stage.url)
    ask(page, "Lost?")
    expect(page.locator(ANSWER).last).to_contain_text("kilometres")
    visit.leaving()
    page.goto("about:blank")
    answers = stage.blocks.gainz_page.answers
    for chat in list(answers._answers):
        answers.stop(chat)
    wait_until(lambda: stage.studio._running == 0)
    answers._answers.clear()
    page.goto(stage.url, wait_until="domcontentloaded")
    expect(page.locator("#gz-notice")).to_contain_text("answer to the last question is missing")
    stage.studio.speed, stage.studio.tokens = 200.0, 40
    page.click("#gz-retry")
    answered(page)


def test_history_new_chat_and_export(stage, visit):
    page = visit(stage.url)
    ask(page, "Keep me")
    answered(page)
    for button, name, wanted in (("#gz-export-md", "gainz-chat.md", "**You**"), ("#gz-export-json", "gainz-chat.json", '"format": "gainz-chat-1"')):
        with page.expect_download() as got:
            page.click(button)
        assert got.value.suggested_filename == name
        text = got.value.path().read_text(encoding="utf-8")
        assert wanted in text and "Keep me" in text and "print(299_792_458)" in text
    page.click("#gz-new")
    expect(page.locator("#gz-chatbot")).not_to_contain_text("Keep me")
    page.locator("#gz-earlier button").first.click()
    page.locator("#gz-history input").click()
    page.get_by_role("option", name="Keep me").click()
    expect(page.locator("#gz-chatbot")).to_contain_text("Keep me")


def test_presets_are_chosen_saved_and_kept(stage, visit):
    page = visit(stage.url)
    temperature = page.locator("#gz-sampling-temperature input[type=number]")
    page.locator("#gz-preset input").click()
    page.get_by_role("option", name="Precise").click()
    expect(temperature).to_have_value("0")
    expect(page.locator("#gz-sampling-top_k input[type=number]")).to_have_value("0")
    temperature.fill("1.3")
    page.locator("#gz-presets button").first.click()
    page.fill("#gz-preset-name input, #gz-preset-name textarea", "mine")
    page.click("#gz-preset-save")
    expect(page.locator("#gz-presets")).to_contain_text("is saved in this browser")
    page.reload(wait_until="domcontentloaded")
    expect(temperature).to_have_value("1.3")
    page.locator("#gz-preset input").click()
    page.get_by_role("option", name="Creative").click()
    expect(temperature).to_have_value("1.1")
    page.locator("#gz-preset input").click()
    page.get_by_role("option", name="mine").click()
    expect(temperature).to_have_value("1.3")


# ---------------------------------------------------------------------------------------------- models
def test_load_with_progress_cancel_and_unload(stage, visit):
    stage.studio.load_seconds = 4.0
    page = visit(stage.url)
    tab(page, "Models")
    page.locator("#gz-catalog label").nth(1).click()
    expect(page.locator("#gz-memory")).to_contain_text("the largest that fits is 8,192")
    page.click("#gz-load")
    expect(page.locator("#gz-work")).to_contain_text("Loading starter-fp16")
    page.click("#gz-cancel")
    expect(page.locator("#gz-models-notice")).to_contain_text("cancelled")
    assert "starter-fp16" not in stage.studio.loaded()
    stage.studio.load_seconds = 0.3
    page.click("#gz-load")
    expect(page.locator("#gz-models-notice")).to_contain_text("is loaded")
    expect(page.locator("#gz-loaded")).to_contain_text("fused decoder")
    expect(page.locator("#gz-status")).to_contain_text("starter-fp16")
    tab(page, "Chat")
    page.locator("#gz-model input").click()
    expect(page.get_by_role("option")).to_have_count(2)
    page.keyboard.press("Escape")
    tab(page, "Models")
    page.click("#gz-unload")
    expect(page.locator("#gz-models-notice")).to_contain_text("is unloaded")
    expect(page.locator("#gz-status")).not_to_contain_text("starter-fp16")
    assert list(stage.studio.loaded()) == ["starter"]


def test_what_does_not_fit_is_said_before_the_load(stage, visit):
    page = visit(stage.url)
    tab(page, "Models")
    page.locator("#gz-catalog label").nth(1).click()
    context = page.locator("#gz-gguf-context input")
    context.fill("500000")
    context.press("Tab")
    expect(page.locator("#gz-memory")).to_contain_text("but only 4.0 GB are free")
    expect(page.locator("#gz-load")).to_be_disabled()
    page.click("#gz-largest")
    expect(context).to_have_value("8192")
    expect(page.locator("#gz-load")).to_be_enabled()


def test_a_broken_entry_says_why_and_an_import_that_fails_too(stage, visit):
    page = visit(stage.url)
    tab(page, "Models")
    page.locator("#gz-catalog label").nth(2).click()
    expect(page.locator("#gz-details")).to_contain_text("model.gguf is cut")
    expect(page.locator("#gz-load")).to_be_hidden()
    page.locator("#gz-add-local button").first.click()
    page.fill("#gz-path input, #gz-path textarea", "/nowhere")
    page.click("#gz-import")
    expect(page.locator("#gz-models-notice")).to_contain_text("There is nothing at /nowhere.")


# ---------------------------------------------------------------------------------------------- frame
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


def test_a_chinese_browser_gets_chinese(stage, visit):
    page = visit(stage.url, locale="zh-CN")
    expect(page.get_by_role("tab", name="模型", exact=True)).to_be_visible()
    left = page.evaluate(r"document.body.innerText.split('\n').filter(line => line.trim() !== 'English' && /^[A-Za-z][A-Za-z ,.]{6,}$/.test(line.trim()))")
    assert left == []


def test_a_dead_engine_is_said_in_words(stage, visit):
    page = visit(stage.url)
    stage.studio.dead = "the engine process ended with code -9"
    expect(page.locator("#gz-banner")).to_contain_text("ended with code -9")
    expect(page.locator("#gz-status")).to_contain_text("Engine stopped")
    stage.studio.dead = ""
    expect(page.locator("#gz-banner")).to_be_hidden()


def test_the_doctor_reports_and_saves(stage, visit):
    page = visit(stage.url)
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


@pytest.mark.parametrize("name", ["Chat", "Models", "Doctor"])
def test_nothing_scrolls_sideways_on_a_phone(stage, visit, name):
    page = visit(stage.url, width=390, height=844)
    ask(page, "unbroken" * 30)
    answered(page)
    tab(page, name)
    if name == "Doctor":
        page.click("#gz-doctor-run")
        expect(page.locator("#gz-doctor")).to_contain_text("Python")
    time.sleep(0.3)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    wide = page.evaluate("""[...document.querySelectorAll('button, .gz-chip, .gz-tile dd, input')].filter(e => e.offsetParent &&
        e.getBoundingClientRect().right > innerWidth + 1).map(e => e.id || e.className)""")
    assert wide == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["Chat", "Models", "Doctor"])
def test_axe_finds_nothing_serious(stage, visit, name, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = visit(stage.url, scheme=scheme)
    ask(page, "Hello")
    answered(page)
    tab(page, name)
    if name == "Doctor":
        page.click("#gz-doctor-run")
        expect(page.locator("#gz-doctor")).to_contain_text("Python")
    time.sleep(0.5)
    found = axe.Axe().run(page).response["violations"]
    serious = [(item["id"], [node["html"][:160] for node in item["nodes"][:3]]) for item in found
               if item["impact"] in {"serious", "critical"}]
    assert serious == []
