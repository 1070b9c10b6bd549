"""Keys: hashed at rest, revoked at once, limited each by its own; no route of the whole application escapes them."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from backends.base import BadSetting, InvalidRequest, NameTaken
from gainz_ui.api import openai_routes
from gainz_ui.api.security import PUBLIC, Guard
from gainz_ui.server import build_app, furnish
from gainz_ui.services import keys as ours
from gainz_ui.services.keys import KeyFile, KeyLimits, KeyRing
from gainz_ui.settings import Settings
from tests.api_fakes import FakeStudio
from tests.test_api import running

ROOT = Path(__file__).parents[1]


@pytest.fixture
def file(tmp_path):
    return KeyFile(tmp_path / "keys.json")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---------------------------------------------------------------------------------------------- the file
def test_the_file_holds_no_key_and_is_this_users(file):
    made, secret = file.add("ann", KeyLimits(per_minute=5))
    text = file.path.read_text()
    assert secret.startswith("gz-") and len(secret) > 40 and secret not in text and secret[3:] not in text
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    (read,) = file.read()
    assert read == made and read.limits.per_minute == 5
    with pytest.raises(NameTaken):
        file.add("ann")


def test_a_name_that_no_log_can_hold_is_refused(file):
    with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
        file.add("ann\udc00")
    assert not file.read()


def test_a_revoked_key_stops_at_once_and_its_name_is_free(file, monkeypatch):
    monkeypatch.setattr(ours, "LOOK_SECONDS", 0.0)
    _, first = file.add("ann")
    _, second = file.add("bob")
    ring = KeyRing(file)
    assert ring.find(first).name == "ann" and ring.find(second).name == "bob" and ring.find("gz-other") is None
    file.revoke("ann")
    assert ring.find(first) is None and ring.find(second).name == "bob"
    file.revoke("bob")
    assert ring.required and ring.find(second) is None                 # all revoked: closed, not open
    file.add("ann")
    with pytest.raises(BadSetting, match="no valid key"):
        file.revoke("carl")


def test_a_broken_file_ends_the_start_and_later_closes_the_door(file, monkeypatch):
    monkeypatch.setattr(ours, "LOOK_SECONDS", 0.0)
    file.path.write_text("{")
    with pytest.raises(BadSetting):
        KeyRing(file)
    file.path.unlink()
    _, secret = file.add("ann")
    ring = KeyRing(file)
    assert ring.find(secret)
    file.path.write_text("[]")
    assert ring.required and ring.find(secret) is None


def test_without_file_and_key_nothing_is_asked(file):
    assert not KeyRing(file).required and KeyRing(single="x").required and KeyRing(single="x").find("x").name == "settings"


def test_every_key_is_compared_in_constant_time(file, monkeypatch):
    seen = []
    monkeypatch.setattr(ours.hmac, "compare_digest", lambda a, b: seen.append((len(a), len(b))) or a == b)
    secrets = [file.add(name)[1] for name in ("a", "b", "c")]
    ring = KeyRing(file, "single")
    for presented in (*secrets, "single", "", "gz-wrong"):
        seen.clear()
        ring.find(presented)
        assert seen == [(64, 64)] * 4


def test_the_rate_and_what_runs_are_counted_by_key():
    now = [0.0]
    ring = KeyRing(clock=lambda: now[0])
    holder, other = (ours.Holder(name, name, KeyLimits(per_minute=2, concurrent=1)) for name in "ab")
    assert ring.begin(holder) is None
    assert "at once" in ring.begin(holder)[0] and ring.begin(other) is None
    ring.end(holder)
    assert ring.begin(holder) is None
    ring.end(holder)
    now[0] = 10.0
    why, seconds = ring.begin(holder)
    assert "minute" in why and seconds == 50.0
    now[0] = 60.0
    assert ring.begin(holder) is None


@pytest.mark.parametrize("limits", [{"per_minute": -1}, {"concurrent": 1.5}, {"prompt_tokens": True}, {"output_tokens": 10**10}])
def test_a_limit_that_is_none_is_refused(limits):
    with pytest.raises(BadSetting):
        KeyLimits(**limits)


# ---------------------------------------------------------------------------------------------- at the door
@pytest.fixture
def door(file, monkeypatch):
    """A server with a free key, and one whose every limit is 2."""
    monkeypatch.setattr(ours, "LOOK_SECONDS", 0.0)
    secrets = {"free": file.add("free")[1], "short": file.add("short", KeyLimits(prompt_tokens=4, output_tokens=6))[1], "tight": file.add("tight", KeyLimits(per_minute=3, concurrent=1, prompt_tokens=4, output_tokens=6))[1]}
    studio = FakeStudio()

    def extend(app):
        app.include_router(openai_routes.router(studio))
        app.user_middleware.clear()
        app.add_middleware(Guard, host="127.0.0.1", keys=KeyRing(file))

    with running(studio, extend=extend) as (url, _), httpx.Client(base_url=url, timeout=20) as client:
        yield studio, client, secrets


def test_a_keys_limits_hold_over_http(door):
    studio, client, secrets = door
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    ask = lambda key, **more: client.post("/v1/chat/completions", json={**body, **more}, headers=bearer(secrets[key]))  # noqa: E731
    assert ask("free", max_tokens=50).status_code == 200 and studio.requests[-1].prompt_limit is None
    assert ask("tight").json()["usage"]["completion_tokens"] == 6              # without max_tokens: what is allowed
    assert studio.requests[-1].prompt_limit == 4
    answer = ask("tight", max_tokens=4, n=2)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
    assert client.post("/v1/embeddings", json={"input": "a b c d e"}, headers=bearer(secrets["tight"])).json()["error"]["param"] == "input"
    answer = ask("tight")
    assert answer.status_code == 429 and 0 < int(answer.headers["retry-after"]) <= 60 and answer.json()["error"]["type"] == "rate_limit_error"
    assert client.get("/", headers=bearer(secrets["tight"])).status_code == 403
    assert client.get("/v1/models", headers=bearer(secrets["tight"])).status_code == 200
    assert ask("free").status_code == 200


@pytest.mark.parametrize("path,body,field", [
    ("/v1/embeddings", {"input": "a b c d"}, "input"), ("/v1/embeddings", {"input": ["a b", "c d"]}, "input"),      # one token begins each
    ("/v1/embeddings", {"input": [[1, 2, 3], [4, 5]]}, "input"), ("/v1/completions", {"prompt": ["a b", "c d"], "max_tokens": 1}, "prompt"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4, "n": 2}, "max_tokens"), ("/generate", {"prompt": "a", "max_tokens": 7}, "max_tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 7}, "max_tokens"),
    ("/tokenize", {"prompt": "a b c d"}, "prompt"), ("/detokenize", {"tokens": [1] * 5}, "tokens")])
def test_prompt_and_output_limits_hold_on_every_route(door, path, body, field):
    _, client, secrets = door
    answer = client.post(path, json=body, headers=bearer(secrets["short"]))
    assert answer.status_code == 400 and answer.json()["error"]["field"] == field, answer.text
    assert "key" in answer.json()["error"]["message"]
    assert client.post(path, json=body, headers=bearer(secrets["free"])).status_code == 200


def test_a_request_carries_the_label_of_its_key_and_not_the_key(door):
    studio, client, secrets = door
    for path, body in (("/generate", {"prompt": "a", "max_tokens": 1}), ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
                       ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}), ("/v1/embeddings", {"input": "a"})):
        assert client.post(path, json=body, headers=bearer(secrets["free"])).status_code == 200
        seen = studio.requests[-1]
        assert getattr(seen, "key", seen) == "free" and secrets["free"] not in repr(seen), path


def test_what_runs_is_counted_until_its_last_byte(door):
    studio, client, secrets = door
    studio.pace = 0.02
    body = {"prompt": "a", "max_tokens": 5}
    first = threading.Thread(target=lambda: client.post("/generate", json={**body, "stream": True}, headers=bearer(secrets["tight"])))
    first.start()
    deadline = time.monotonic() + 5
    while not studio.running and time.monotonic() < deadline:
        time.sleep(0.005)
    answer = client.post("/generate", json=body, headers=bearer(secrets["tight"]))
    assert answer.status_code == 429 and "at once" in answer.json()["error"]["message"]
    first.join()
    assert client.post("/generate", json=body, headers=bearer(secrets["tight"])).status_code == 200


# ---------------------------------------------------------------------------------------------- every route there is
def test_sv_10_no_route_of_the_whole_application_escapes(tmp_path):
    """The routes are read from the application itself, Gradio's among them, so that a new one is in this test without a word."""
    settings = Settings(models=tmp_path / "m", outputs=tmp_path / "o", logs=tmp_path / "l", keys=tmp_path / "k.json", api_key="secret",
                        allowed_origins=("https://friend.example",))
    studio = FakeStudio(settings)
    app = build_app(furnish(settings, studio), page=_blocks)
    routes = sorted(set(found(app)))
    assert {("POST", "/v1/chat/completions"), ("GET", "/metrics"), ("POST", "/generate"), ("GET", "/config"), ("GET", "/page/monitor")} <= set(routes)
    assert len(routes) > 40

    async def drive() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            for method, path in routes:
                for headers in ({}, bearer("wrong"), {"x-api-key": "wrong"}, {"authorization": "Basic eDp3cm9uZw=="}):
                    answer = await client.request(method, path, headers=headers)
                    wanted = 401 if path not in PUBLIC else answer.status_code
                    assert answer.status_code == wanted, (method, path, headers)
                answer = await client.options(path, headers={"origin": "https://friend.example", "access-control-request-method": method})
                assert answer.status_code == 204 and answer.headers["access-control-allow-headers"], path
            assert (await client.get("/v1/models", headers={"authorization": "bearer secret"})).status_code == 200

    asyncio.run(drive())


def _blocks(house):
    """A page without widgets; what pages ask for again belongs to it."""
    import gradio as gr
    made = gr.Blocks()
    made.gainz_page = SimpleNamespace()
    return made


def found(app, before: str = "") -> list[tuple[str, str]]:
    """(method, path) of every route, those of mounted applications too."""
    out = []
    for route in app.routes:
        path = before + getattr(route, "path", "").rstrip("/") if before else getattr(route, "path", "")
        inner = next((one for one in (getattr(route, "app", None), getattr(route, "original_router", None), route) if hasattr(one, "routes")), None)
        if inner is not None:
            out += found(inner, path.rstrip("/"))
        elif getattr(route, "methods", None):
            filled = path.replace(":path", "").replace("{", "").replace("}", "") or "/"
            out += [(method, filled) for method in route.methods]
        else:
            out.append(("GET", path or "/"))
    return out


# ---------------------------------------------------------------------------------------------- on the command line
def command(tmp_path, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "app.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          env={"PATH": "/usr/bin:/bin", "GAINZ_KEYS": str(tmp_path / "keys.json")})


def test_keys_on_the_command_line(tmp_path):
    made = command(tmp_path, "keys", "add", "ann", "--per-minute", "9")
    secret = made.stdout.strip()
    assert made.returncode == 0 and KeyRing(KeyFile(tmp_path / "keys.json")).find(secret).limits.per_minute == 9
    listed = json.loads(command(tmp_path, "keys", "list", "--json").stdout)
    assert listed[0]["name"] == "ann" and "digest" not in listed[0]
    assert command(tmp_path, "keys", "revoke", "ann").returncode == 0
    again = command(tmp_path, "keys", "revoke", "ann")
    assert again.returncode == 2 and "no valid key" in again.stderr


def test_another_address_needs_a_key_or_the_words(tmp_path):
    refused = command(tmp_path, "serve", "--host", "0.0.0.0", "--port", "0")
    assert refused.returncode == 2 and "--insecure-no-key" in refused.stderr and "keys add" in refused.stderr


