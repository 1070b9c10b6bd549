"""What the browser tests do again and again."""

from __future__ import annotations

import time

from playwright.sync_api import expect

ASK = "#gz-composer textarea"
ANSWER = "#gz-chatbot .bot.message"


def ask(page, text: str) -> None:
    before(page)
    page.fill(ASK, text)
    page.press(ASK, "Enter")


def before(page) -> None:
    """The figures on the page are those of an earlier answer from here on: `answered` does not take them for the next one's."""
    page.evaluate("document.querySelectorAll('#gz-stats .gz-tile').forEach(tile => tile.classList.add('earlier'))")


def answered(page) -> None:
    """The answer to what was asked last stands complete."""
    expect(page.locator("#gz-stats:not(:has(.earlier))")).to_contain_text("complete")
    expect(page.locator("#gz-send")).to_be_visible()


def tab(page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def wait_until(truth, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.05)
