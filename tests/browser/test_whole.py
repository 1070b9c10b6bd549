"""The whole program in a browser: a real engine, tiny real checkpoints."""

from __future__ import annotations

import httpx
from playwright.sync_api import expect

ASK = "#gz-composer textarea"


def test_a_chat_is_answered_or_says_what_is_missing_and_a_model_comes_and_goes(app, visit):
    """The tiny checkpoints may come without a chat template: then that is said, in words and with the remedy."""
    page = visit(app)
    expect(page.locator("#gz-status")).to_contain_text("llama-fp16")
    box = page.locator("#gz-sampling-max_tokens textarea, #gz-sampling-max_tokens input").first
    box.fill("16")
    page.fill(ASK, "Hello there")
    page.press(ASK, "Enter")
    done = page.locator("#gz-stats .gz-tile").or_(page.locator("#gz-notice .gz-bad"))
    expect(done.first).to_be_visible()
    expect(page.locator("#gz-send")).to_be_visible()
    page.get_by_role("tab", name="Models", exact=True).click()
    expect(page.locator("#gz-loaded")).to_contain_text("fused decoder")
    page.locator("#gz-catalog label").nth(1).click()
    expect(page.locator("#gz-details")).to_contain_text("qwen2-fp16")
    expect(page.locator("#gz-memory")).to_contain_text("largest that fits")
    page.click("#gz-load")
    expect(page.locator("#gz-models-notice")).to_contain_text("qwen2-fp16 is loaded")
    assert {"llama-fp16", "qwen2-fp16"} == set(httpx.get(f"{app}health").json()["models"])
    page.click("#gz-unload")
    expect(page.locator("#gz-models-notice")).to_contain_text("qwen2-fp16 is unloaded")
    assert httpx.get(f"{app}health").json()["models"] == ["llama-fp16"]
