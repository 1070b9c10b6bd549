"""What visitors leave behind (case GR-10): nothing that grows with their number."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import httpx
import psutil
from gradio_client import Client

from gainz_ui import server, shell
from tests.test_gradio_client import serving

VISITS, MEGABYTE = 100, 1 << 20


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def uploads(folder: Path) -> int:
    return sum(item.stat().st_size for item in folder.rglob("*") if item.is_file())


def test_a_hundred_visits_leave_neither_memory_nor_files(tmp_path, monkeypatch):
    monkeypatch.setattr(shell, "FORGET", (1, 2))
    monkeypatch.setattr(shell, "SESSIONS", 16)
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "uploads"))
    with serving(tmp_path, page=server._page) as (studio, url):
        client, at_20 = Client(url, verbose=False), 0
        for visit in range(VISITS):
            client.session_hash = f"visit{visit:03}"            # a session of its own, without a page's start-up each time
            client.predict("Hi", [{"role": "user", "content": "x" * MEGABYTE}], max_tokens=2, api_name="/chat")
            sent = httpx.post(url + "/gradio_api/upload", files={"files": (f"{visit}.txt", b"y" * MEGABYTE)})
            assert sent.status_code == 200
            studio.requests.clear()                             # the fake remembers what it was asked
            if visit == 20:
                at_20 = resident()
        client.close()
        deadline = time.monotonic() + 30
        while uploads(tmp_path / "uploads") and time.monotonic() < deadline:
            time.sleep(0.2)
        assert uploads(tmp_path / "uploads") == 0, "uploads are kept for ever"
        assert resident() < at_20 + 40 * MEGABYTE, "eighty further sessions of one megabyte each are still held"
