"""Drafting on the page: what can be chosen and why not, accepted tokens tinted, what it brought."""

from __future__ import annotations

from dataclasses import replace

from playwright.sync_api import expect

from tests.browser.steps import ANSWER, answered, ask, wait_until

TINTED = "() => Array.from(CSS.highlights.get('gz-drafted') || []).map(range => range.toString())"


def choose(page, field: str, option: str) -> None:
    page.locator(f"{field} input").click()
    page.get_by_role("option", name=option, exact=True).click()
    shut(page, field)


def shut(page, field: str) -> None:
    """A list that is still closing takes no click, and a field that has the focus does not open it again."""
    page.locator(f"{field} input").blur()
    expect(page.get_by_role("option")).to_have_count(0)


def test_a_draft_is_chosen_and_its_tokens_are_tinted(stage, visit):
    stage.reset(("starter", "starter-fp16"))
    models = stage.studio._models
    models["starter-fp16"] = replace(models["starter-fp16"], vocab_fingerprint="another")
    stage.studio.changed.emit()
    page = visit(stage.url)
    expect(page.locator("#gz-draft-length")).to_be_hidden()
    choose(page, "#gz-model", "starter")
    page.locator("#gz-draft input").click()
    for option in ("None", "Lookup in the text", "starter-fp16 (through text)", "Lookup, then starter-fp16",
                   "✕ giant: not loaded; with 9.0 GB for 4.0 GB free it does not fit"):
        expect(page.get_by_role("option", name=option).first).to_be_visible()
    shut(page, "#gz-draft")
    choose(page, "#gz-draft", "starter-fp16 (through text)")
    expect(page.locator("#gz-draft-note")).to_contain_text("id 7 is 'b' there and 'a' here")
    choose(page, "#gz-draft", "Lookup in the text")
    expect(page.locator("#gz-draft-note")).to_contain_text("costs no memory")
    choose(page, "#gz-draft-length", "4")
    ask(page, "How fast is light?")
    answered(page)
    request = stage.studio.requests[-1][1]
    assert (request.draft.name, request.draft.length) == ("lookup", 4)
    stats = page.locator("#gz-stats")
    for text in ("It pays: the answer came 1.62 × as fast.", "75% of 32 draft tokens accepted, 2.50 tokens a pass",
                 "Accepted by place in the draft: 88% · 71%", "0 (2) · 2 (14)", "tinted in the answer"):
        expect(stats).to_contain_text(text)
    two_of_three = ["Light in", "vacuum travels", "about 299,792"]           # whatever Markdown made of the rest
    wait_until(lambda: page.evaluate(TINTED)[:3] == two_of_three)             # a redrawn answer is tinted a moment later
    expect(page.locator(ANSWER).last.locator("strong")).to_have_text("299,792 kilometres a second")
    code = page.locator("#gz-api-code-chat")
    page.locator("#gz-api-chat button").first.click()
    expect(code).to_contain_text('"draft": {')


def test_what_does_not_pay_or_cannot_be_exact_is_said(stage, visit):
    stage.studio._models["starter"] = replace(stage.studio._models["starter"], lossless=False)
    stage.studio.speedup = 0.48
    page = visit(stage.url, locale="zh-CN")
    choose(page, "#gz-draft", "在文本中查找")
    expect(page.locator("#gz-draft-note")).to_contain_text("概率几乎相等")
    ask(page, "光速是多少？")
    expect(page.locator("#gz-stats")).to_contain_text("得不偿失：速度只有原来的 0.48 倍")
    assert stage.studio.requests[-1][1].draft.length is None
    stage.studio.speedup = None
    ask(page, "再来一次")
    expect(page.locator("#gz-stats")).to_contain_text("自行暂停")
