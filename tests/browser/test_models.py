"""First run and the models tab in a browser."""

from __future__ import annotations

import time
from dataclasses import replace

from playwright.sync_api import expect

from backends.base import FetchFailed, OutOfMemory, Progress
from tests.browser.steps import answered, ask, tab, wait_until


def test_the_first_run_shows_the_fetch_then_the_chat(stage, visit):
    stage.reset(loaded=())
    go_on = []

    def work(report, cancel):
        report(Progress("fetch", 43_000_000, 98_362_432))
        while not go_on:
            cancel.raise_if_set()
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


def test_without_a_model_the_page_leads_to_the_models_and_a_start_that_failed_says_why_and_can_be_tried_again(stage, visit):
    stage.reset(loaded=())
    stage.startup.work = lambda report, cancel: stage.studio.load("starter")
    page = visit(stage.url)
    expect(page.locator("#gz-gate")).to_contain_text("No model is loaded")
    expect(page.locator("#gz-start-again")).to_be_hidden()
    page.click("#gz-open-models")
    expect(page.locator("#gz-load")).to_be_visible()
    tab(page, "Chat")
    expect(page.locator("#gz-gate")).to_be_visible()
    stage.startup.error = FetchFailed("The index could not be reached.", host="example")
    expect(page.locator("#gz-gate")).to_contain_text("The index could not be reached.")
    page.click("#gz-start-again")
    expect(page.locator("#gz-chatbot")).to_be_visible()


def test_work_of_another_tab_is_not_the_models_tabs_to_show_or_cancel(stage, visit):
    """A page that is opened meanwhile: what another tab began is watched and stopped there."""
    def work(report, cancel):
        while not ended and not cancel.is_set():
            time.sleep(0.02)

    ended: list[bool] = []
    one, own = stage.tasks.start("quality", "starter", work), stage.tasks.start("import", "given", work)
    page = visit(stage.url)
    tab(page, "Models")
    expect(page.locator("#gz-work")).to_contain_text("given")
    expect(page.locator("#gz-work")).not_to_contain_text("starter")
    page.click("#gz-cancel")
    wait_until(own.cancel.is_set)
    assert not one.cancel.is_set()
    ended.append(True)
    expect(page.locator("#gz-cancel")).to_be_hidden()


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
    assert page.locator("#gz-unload").is_hidden() and page.locator("#gz-loaded").is_hidden()         # at once, not when the list comes round
    expect(page.locator("#gz-status")).not_to_contain_text("starter-fp16")
    assert list(stage.studio.loaded()) == ["starter"]


def test_what_works_is_kept_and_offered_when_a_load_fails(stage, visit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)             # where the stage's models/ would be
    (tmp_path / "models").mkdir()
    stage.studio._models["starter"] = replace(stage.studio._models["starter"], context=1024, options=(("context", 0), ("streams", 2)))
    page = visit(stage.url)
    tab(page, "Models")
    page.click("#gz-working-keep")
    expect(page.locator("#gz-working-said")).to_contain_text("Kept: it is offered")
    expect(page.locator("#gz-working-said")).to_contain_text("context = 1024, streams = 2")
    page.click("#gz-unload")
    expect(page.locator("#gz-working-keep")).to_be_hidden()
    load, asked = stage.studio.load, []

    def refused(name, options={}, progress=None, cancel=None):  # noqa: B006
        asked.append(dict(options))
        if options.get("context") != 1024:
            raise OutOfMemory(f"{name} does not fit the free memory.")
        return load(name, options, progress, cancel)

    monkeypatch.setattr(stage.studio, "load", refused)
    page.click("#gz-load")
    expect(page.locator("#gz-models-notice")).to_contain_text("does not fit the free memory")
    expect(page.locator("#gz-working-said")).to_contain_text("context = 1024, streams = 2")
    page.click("#gz-working-load")
    expect(page.locator("#gz-models-notice")).to_contain_text("is loaded")
    expect(page.locator("#gz-working-load")).to_be_hidden()
    assert asked[-1] == {"context": 1024, "streams": 2}


def test_what_does_not_fit_is_said_before_the_load_and_what_is_broken_and_an_import_that_fails_say_why(stage, visit):
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
    page.locator("#gz-catalog label").nth(2).click()
    expect(page.locator("#gz-details")).to_contain_text("model.gguf is cut")
    expect(page.locator("#gz-load")).to_be_hidden()
    page.locator("#gz-add-local button").first.click()
    page.fill("#gz-path input, #gz-path textarea", "/nowhere")
    page.click("#gz-import")
    expect(page.locator("#gz-import-notice")).to_contain_text("There is nothing at /nowhere.")      # beside the form, not the model
    expect(page.locator("#gz-models-notice")).to_be_hidden()
