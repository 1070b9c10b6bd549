"""The batch tab in a browser, on the whole program: a file of tasks runs on a real model, and its results can be taken home."""

from __future__ import annotations

import json

from playwright.sync_api import expect

from tests.browser.steps import tab


def tasks(tmp_path, name: str, *lines: str):
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def task(number: int, tokens: int = 8) -> str:
    return json.dumps({"task_id": f"t{number}", "prompt": f"{number} 世界", "max_tokens": tokens, "ignore_eos": True}, ensure_ascii=False)


def test_a_bad_line_is_named_and_left_out_and_the_results_can_be_taken(app, visit, tmp_path):
    page = visit(app)
    tab(page, "Batch")
    expect(page.locator("#gz-batch-model input")).to_have_value("llama-fp16")
    page.locator("#gz-batch-file input[type=file]").set_input_files(
        tasks(tmp_path, "jobs.jsonl", task(0), '{"task_id": "x"', *(task(n) for n in range(1, 6))))
    expect(page.locator("#gz-batch-file")).to_contain_text("jobs")
    page.click("#gz-batch-run")
    expect(page.locator("#gz-batch-work")).to_contain_text("line 2")
    page.get_by_role("button", name="More options").locator("visible=true").click()
    page.locator("#gz-batch-skip input").check()
    page.click("#gz-batch-run")
    expect(page.locator("#gz-batch-work")).to_contain_text("jobs: done")
    expect(page.locator("#gz-batch-work")).to_contain_text("6 of 6")
    expect(page.locator("#gz-batch-results")).to_contain_text("jobs.results")
    with page.expect_download() as got:
        page.locator("#gz-batch-results a[download]").first.click()
    rows = [json.loads(line) for line in got.value.path().read_text(encoding="utf-8").splitlines()]
    assert sorted(row["task_id"] for row in rows) == [f"t{n}" for n in range(6)] and all(row["usage"]["completion_tokens"] == 8 for row in rows)


def test_a_batch_is_paused_goes_on_and_is_cancelled(app, visit, tmp_path):
    page = visit(app)
    tab(page, "Batch")
    expect(page.locator("#gz-batch-model input")).to_have_value("llama-fp16")
    page.locator("#gz-batch-file input[type=file]").set_input_files(tasks(tmp_path, "long.jsonl", *(task(n, 200) for n in range(400))))
    expect(page.locator("#gz-batch-file")).to_contain_text("long")
    page.click("#gz-batch-run")
    page.click("#gz-batch-pause")
    expect(page.locator("#gz-batch-work")).to_contain_text("paused")
    page.click("#gz-batch-resume")
    expect(page.locator("#gz-batch-pause")).to_be_visible()
    page.click("#gz-batch-cancel")
    expect(page.locator("#gz-batch-work")).to_contain_text("cancelled; run it again")
    expect(page.locator("#gz-batch-run")).to_be_visible()
