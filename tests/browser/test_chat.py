"""The chat tab in a browser, over a studio whose speed and state the test sets."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from playwright.sync_api import expect

from tests.browser.relay import Relay
from tests.browser.steps import ANSWER, answered, ask, before, tab, wait_until

KEPT = "() => (localStorage.getItem('gainz-chat') || '').length"            # enciphered; nothing takes 44 signs


def test_a_chat_with_its_figures_its_code_its_files_and_its_place_in_the_history(stage, visit):
    page = visit(stage.url)
    ask(page, "How fast is light?")
    answered(page)
    expect(page.locator(ANSWER).last).to_contain_text("299,792 kilometres a second")
    stats = page.locator("#gz-stats")
    for text in (
        "First token",
        "tok/s",
        "Answered by starter",
        "aten · 2 threads",
        "fused decoder",
        "2,048",
        "No C++ compiler",
    ):
        expect(stats).to_contain_text(text)
    expect(stats.locator(".gz-tile").nth(2)).to_contain_text("40")
    page.locator("#gz-api-chat button").first.click()
    code = page.locator("#gz-api-code-chat")
    expect(code.locator("pre")).to_have_count(2)
    for text in ("gradio_client", "How fast is light?", f"curl {stage.url}generate"):
        expect(code).to_contain_text(text)
    request = stage.studio.requests[-1][1]
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.max_tokens) == (0.7, 40, 1024)
    for button, name, wanted in (
        ("#gz-export-md", "gainz-chat.md", "**You**"),
        ("#gz-export-json", "gainz-chat.json", '"format": "gainz-chat-1"'),
    ):
        with page.expect_download() as got:
            page.click(button)
        assert got.value.suggested_filename == name
        text = got.value.path().read_text(encoding="utf-8")
        assert wanted in text and "How fast is light?" in text and "print(299_792_458)" in text
    page.click("#gz-new")
    expect(page.locator("#gz-chatbot")).not_to_contain_text("How fast is light?")
    page.locator("#gz-earlier button").first.click()
    page.locator("#gz-history input").click()
    page.get_by_role("option", name="How fast is light?").click()
    expect(page.locator("#gz-chatbot")).to_contain_text("How fast is light?")


def test_gr_07_an_export_has_what_is_written_so_far_and_stop_keeps_it_and_stops_the_engine(stage, visit):
    stage.studio.speed, stage.studio.tokens = 20.0, 1000
    page = visit(stage.url)
    ask(page, "Count")
    expect(page.locator(ANSWER).last).to_contain_text("kilometres")
    with page.expect_download() as got:
        page.click("#gz-export-md")
    text = got.value.path().read_text(encoding="utf-8")
    assert "Count" in text and "kilometres" in text
    page.click("#gz-stop")
    expect(page.locator("#gz-stats")).to_contain_text("stopped")
    expect(page.locator("#gz-send")).to_be_visible()
    expect(page.locator("#gz-stop")).to_be_hidden()
    wait_until(lambda: stage.studio._running == 0)
    steps = stage.studio.steps
    time.sleep(0.3)
    assert stage.studio.steps == steps
    expect(page.locator(ANSWER).last).to_contain_text("kilometres")
    assert page.locator(".toast-body.error").count() == 0
    page.click("#gz-continue")
    wait_until(lambda: len(stage.studio.requests) == 2)
    assert stage.studio.requests[-1][1].continue_last and stage.studio.requests[-1][1].prompt[-1].role == "assistant"
    page.click("#gz-stop")
    expect(page.locator("#gz-send")).to_be_visible()
    assert page.locator(ANSWER).count() == 1, "the answer went on in place"


def test_long_answers_hold_up_neither_their_page_nor_another(stage, visit):
    """That nothing which generates has a limit of Gradio's, tests/test_shell.py has; that five at once run, tests/test_gradio_client.py."""
    stage.studio.speed, stage.studio.tokens = 3.0, 2000  # eleven minutes; slow, since what is tested is the server, not a browser's painting
    pages = [visit(stage.url) for _ in range(2)]
    for page in pages:
        ask(page, "Go on for long")
    wait_until(lambda: stage.studio._running == 2)
    tab(pages[0], "Models")
    expect(pages[0].locator("#gz-unload")).to_be_visible()
    with pages[0].expect_response(
        lambda response: "/run/" in response.url and response.request.post_data_json["data"][:1] == ["starter-fp16"]
    ):
        pages[0].locator("#gz-catalog label").nth(1).click()
    expect(pages[0].locator("#gz-details")).to_contain_text("starter-fp16")
    pages[1].click("#gz-stop")
    wait_until(lambda: stage.studio._running == 1)
    tab(pages[0], "Chat")
    pages[0].click("#gz-stop")
    wait_until(lambda: stage.studio._running == 0)


def test_what_a_person_typed_is_shown_as_typed_and_can_be_asked_again_and_edited(stage, visit):
    page = visit(stage.url)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    typed = "<img src=x onerror=alert(1)> [a](javascript:alert(3)) ![t](http://evil.example/x.png) What does <div class=x> do?"
    ask(page, typed)
    answered(page)
    bubble = page.locator("#gz-chatbot .user .md").first
    assert bubble.inner_text().replace("\u2060", "").strip() == typed
    assert bubble.locator("img, .x, a[href^=javascript]").count() == 0
    assert not any(url.endswith("/x") or "evil" in url for url in asked)
    before(page)
    page.get_by_role("button", name="Retry").click()
    answered(page)
    assert len(stage.studio.requests) == 2
    assert [m.content for m in stage.studio.requests[-1][1].prompt] == [typed]
    page.get_by_role("button", name="Edit").first.click()
    box = page.locator("#gz-chatbot textarea").first
    box.fill("Second question")
    before(page)
    page.get_by_role("button", name="Submit").click()
    answered(page)
    assert len(stage.studio.requests) == 3
    assert [m.content for m in stage.studio.requests[-1][1].prompt] == ["Second question"]
    expect(page.locator("#gz-chatbot")).not_to_contain_text("What does")


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
    stage.studio.speed, stage.studio.tokens = 10.0, 400
    page = visit(stage.url, width=360, height=800)
    ask(page, "A long one")
    expect(page.locator(ANSWER).last).to_contain_text("kilometres")
    wait_until(lambda: page.evaluate(KEPT) > 150)
    visit.leaving()
    page.reload(wait_until="domcontentloaded")
    expect(page.locator("#gz-stop")).to_be_visible()
    stage.studio.speed = 1000.0
    answered(page)
    expect(page.locator(ANSWER).last).to_contain_text("Moon")
    assert len(stage.studio.requests) == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


HIDE = """hidden => { Object.defineProperty(document, 'hidden', {get: () => hidden, configurable: true});
                      document.dispatchEvent(new Event('visibilitychange')); }"""


@pytest.fixture
def relay(stage):
    relay = Relay(stage.url)
    yield relay
    relay.close()


def test_gr_08_a_page_that_was_away_has_its_answer(stage, visit, relay):
    """A phone shows another program: its connections are cut, the page is not loaded by anybody. It loads itself as soon as the
    server can be reached again."""
    stage.studio.speed, stage.studio.tokens = 10.0, 400
    page = visit(relay.url, width=360, height=800)
    ask(page, "A long one")
    expect(page.locator(ANSWER).last).to_contain_text("kilometres")
    wait_until(lambda: page.evaluate(KEPT) > 150)
    visit.leaving("ERR_", "Failed to fetch", "network error")
    page.evaluate(HIDE, True)
    relay.cut()
    stage.studio.speed = 1000.0
    wait_until(lambda: stage.studio._running == 0)
    relay.mend()
    page.evaluate(HIDE, False)
    answered(page)
    expect(page.locator(ANSWER).last).to_contain_text("Moon")
    assert len(stage.studio.requests) == 1 and page.locator(ANSWER).count() == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_page_that_could_not_fetch_a_part_of_its_script_loads_itself_anew(stage, visit):
    """What shows a programming language is fetched with the first answer in it, and a browser asks for a script only once."""
    stage.studio.speed, stage.studio.tokens = 10.0, 400
    page = visit(stage.url)
    ask(page, "A long one")
    expect(page.locator(ANSWER).last).to_contain_text("kilometres")
    wait_until(lambda: page.evaluate(KEPT) > 150)
    visit.leaving("ERR_", "Failed to fetch")
    with page.expect_event("requestfailed", lambda request: "prism-python" in request.url):
        page.route("**/prism-python*", lambda route: route.abort(), times=1)
        stage.studio.speed = 1000.0
    expect(page.locator(ANSWER).last).to_contain_text("Moon")
    answered(page)
    assert len(stage.studio.requests) == 1 and page.locator(ANSWER).count() == 1


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


def test_a_model_that_can_chat_is_chosen_first_and_presets_are_chosen_saved_and_kept(stage, visit):
    stage.studio._models["talker"] = stage.studio._models.pop("starter")
    stage.studio._models["zz-draft"] = replace(stage.studio._models["talker"], name="zz-draft", chat_template=False)
    stage.studio._models["talker"] = replace(stage.studio._models["talker"], name="talker")
    page = visit(stage.url)
    expect(page.locator("#gz-model input")).to_have_value("talker")
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

