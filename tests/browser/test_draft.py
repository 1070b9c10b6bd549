"""Making a draft on the models tab: first what it costs, then the button that goes on, then the draft is there."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.steps import tab


def test_the_cost_is_shown_before_a_draft_is_made_and_too_many_layers_are_refused_there(stage, visit):
    stage.reset()
    page = visit(stage.url)
    tab(page, "Models")
    page.locator("#gz-make-draft button").first.click()
    run, layers = page.locator("#gz-draft-run"), page.locator("#gz-newdraft-layers input").first
    expect(run).to_be_hidden()
    usual = layers.input_value()
    layers.fill("400")
    page.click("#gz-draft-look")
    expect(page.locator("#gz-draft-notice")).to_contain_text("keeps from 1 to")
    assert not stage.jobs.calls
    expect(run).to_be_hidden()
    layers.fill(usual)
    page.locator("#gz-newdraft-minutes input").first.fill("0")
    page.click("#gz-draft-look")
    expect(page.locator("#gz-draft-cost")).to_contain_text("from 9.5 to 1,234")
    expect(page.locator("#gz-draft-cost")).to_contain_text("no training was asked for")
    command, arguments, _ = stage.jobs.calls[0]
    assert command == "draft" and "--plan" in arguments and "--minutes=0" in " ".join(arguments)
    run.click()
    expect(page.locator("#gz-draft-notice")).to_contain_text("is made")
    assert "--plan" not in stage.jobs.calls[1][1] and stage.jobs.calls[1][1] == arguments[:-1]
    expect(run).to_be_hidden()
