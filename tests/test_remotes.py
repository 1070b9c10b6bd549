"""Another server's model as one of ours, through the services, the routes and the command line: added, loaded, asked, kept secret."""

from __future__ import annotations

import io
import json
import os
import stat
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest

from backends.base import (AddressRefused, BadSetting, DraftSpec, InvalidRequest, Message, NameRefused, NameTaken, NotSupported, RemoteRefused,
                           RemoteUnreachable, Request, Sampling)
from backends.reach import Address
from gainz_ui import cli
from gainz_ui.api import openai_routes
from gainz_ui.api.security import Guard
from gainz_ui.services import compare, remotes
from gainz_ui.services.remote_keys import VARIABLE, RemoteKeys
from gainz_ui.services.store import Store
from gainz_ui.services.studio import Studio
from gainz_ui.settings import Settings
from tests.remote_server import Server, answer, then
from tests.test_api import running

CHAT = (Message("user", "Hello?"),)
SECRET = "sk-very-s3cret"


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


@pytest.fixture
def settings(tmp_path):
    return Settings(models=tmp_path / "models", outputs=tmp_path / "outputs", logs=tmp_path / "logs", remote_key_file=tmp_path / "rk.json")


@pytest.fixture
def studio(settings):
    made = Studio(settings)
    yield made
    made.close()


@pytest.fixture
def store(settings):
    return Store(settings.models)


def test_added_loaded_asked_and_gone_again(studio, store, server, settings):
    assert remotes.add(studio, store, server.url) == "far"
    entry = studio.entry("far")
    assert entry.ready and not entry.local and entry.source == server.url and entry.revision is None
    info = studio.load("far", {"streams": 2})
    assert info.path == "remote" and studio.snapshot().status == "ready" and studio.host.beat().state == "idle", "and no engine was started"
    assert "".join(event.text for event in studio.submit(Request(CHAT), "far")) == "Hello there"
    line = json.loads((settings.logs / "requests.jsonl").read_text())
    assert (line["model"], line["backend"], line["completion_tokens"], line["cached_tokens"]) == ("far", "remote", 2, None)
    assert studio.load("far", {"streams": 3}).streams == 3, "reloaded with other options"
    studio.unload("far")
    assert studio.loaded() == {}
    store.remove("far")
    assert store.names() == []


def test_a_draft_for_it_is_refused_when_it_is_asked_for(studio, store, server):
    studio.load(remotes.add(studio, store, server.url))
    with pytest.raises(NotSupported, match="no logits to verify drafts") as caught:
        studio.submit(Request(CHAT, draft=DraftSpec("lookup")), "far")
    assert caught.value.field == "draft" and server.asked == []
    assert [(one.fits, one.code) for one in studio.drafts("far")][0] == (False, "target_remote")


def test_which_model_must_be_clear(studio, store, server):
    server.models = ["one", "org/two"]
    with pytest.raises(InvalidRequest, match="several") as caught:
        remotes.add(studio, store, server.url)
    assert "one, org/two" in caught.value.remedy and store.names() == []
    with pytest.raises(InvalidRequest, match="no model 'three'"):
        remotes.add(studio, store, server.url, "three")
    assert remotes.add(studio, store, server.url, "org/two") == "two"
    with pytest.raises(NameTaken):
        remotes.add(studio, store, server.url, "org/two")
    with pytest.raises(NameRefused):
        remotes.add(studio, store, server.url, "one", "../x")


def test_a_server_that_is_not_there_becomes_no_model(studio, store, server):
    url = server.url
    server.close()
    with pytest.raises(RemoteUnreachable):
        remotes.add(studio, store, url)
    assert store.names() == []


# ---------------------------------------------------------------------------------------------- addresses
@pytest.mark.parametrize("host, more, passes", [
    ("127.0.0.1", {}, True), ("0.0.0.0", {}, False), ("192.168.7.7", {}, False), ("127.0.0.1", {"remote_private": False}, False),
    ("0.0.0.0", {"remote_hosts": ("127.0.0.1",)}, True), ("0.0.0.0", {"remote_hosts": ("127.0.0.0/8",)}, True)])
def test_private_addresses_only_beside_a_loopback_server_or_by_the_list(settings, store, server, host, more, passes):
    studio = Studio(replace(settings, host=host, **more))
    try:
        if passes:
            assert remotes.add(studio, store, server.url) == "far"
            return
        with pytest.raises(AddressRefused, match="private network"):
            remotes.add(studio, store, server.url)
        store.root.mkdir(exist_ok=True)
        (store.root / "byhand").mkdir()                     # a folder is no way around it
        (store.root / "byhand" / "manifest.json").write_text(json.dumps(remotes.manifest(Address.parse(server.url), "far")))
        with pytest.raises(AddressRefused):
            studio.load("byhand")
        assert server.seen == []
    finally:
        studio.close()


# ---------------------------------------------------------------------------------------------- circles
def test_a_server_that_is_this_one_is_refused_at_once(studio, store, settings):
    with serving(studio) as url:
        for act in (lambda: remotes.add(studio, store, url, "me"), lambda: remotes.listed(Studio(settings), url)):      # the command line, too
            with pytest.raises(AddressRefused, match="this very server"):
                act()
        write(store, "me", url)
        with pytest.raises(AddressRefused, match="this very server"):
            studio.load("me")
        assert httpx.post(url + "/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]}).status_code == 409


def test_a_circle_of_servers_ends(studio, store, settings, tmp_path):
    other = Studio(replace(settings, models=tmp_path / "others"))
    with serving(studio) as here, serving(other) as there:
        write(store, "a", there, "b")
        write(Store(other.settings.models), "b", here, "a")
        for one, name in ((studio, "a"), (other, "b")):
            one.load(name)
        last = list(studio.submit(Request(CHAT), "a"))[-1]
    other.close()
    assert "leads back to it" in last.error.cause, last.error


def test_what_another_server_answers_counts_as_running(studio, store, server):
    studio.load(remotes.add(studio, store, server.url), {"streams": 1})
    gate = threading.Event()
    server.script = [then(lambda h: gate.wait(10) and h.stream(answer("x")))]
    asked = [studio.submit(Request(CHAT), "far") for _ in range(2)]
    deadline = time.monotonic() + 10
    while studio.snapshot().waiting < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (studio.snapshot().running, studio.snapshot().waiting) == (1, 1)
    gate.set()
    assert all(list(events)[-1].error is None for events in asked)
    while studio.snapshot().running and time.monotonic() < deadline:    # the connection is read to its end
        time.sleep(0.01)
    assert (studio.snapshot().running, studio.snapshot().waiting) == (0, 0)


@contextmanager
def serving(studio):
    """The address of the OpenAI routes over a studio, behind the guard that knows whose they are."""
    def extend(app):
        app.include_router(openai_routes.router(studio))
        app.user_middleware.clear()
        app.add_middleware(Guard, host="127.0.0.1", here=studio.reach.here)

    with running(studio, extend=extend) as (url, _):
        yield url + "/v1"


def write(store, name, url, called="me"):
    (store.root / name).mkdir(parents=True)
    (store.root / name / "manifest.json").write_text(json.dumps(remotes.manifest(Address.parse(url), called)))


# ---------------------------------------------------------------------------------------------- keys
def test_a_key_is_kept_in_its_file_and_shows_nowhere(studio, store, server, settings, capsys):
    remotes.add(studio, store, server.url, key=SECRET)
    assert stat.S_IMODE(settings.remote_key_file.stat().st_mode) == 0o600
    info = studio.load("far")
    server.script = [then(lambda h: h.fail(400, json.dumps({"error": {"message": f"what is {SECRET}?"}})))]
    last = [event for event in studio.submit(Request(CHAT), "far") if event.last][0]
    assert isinstance(last.error, RemoteRefused) and server.seen[-1][2]["authorization"] == f"Bearer {SECRET}"
    everything = [str(last.error), repr(last.error.to_dict()), repr(info), repr(studio.entry("far")), repr(settings), repr(studio.reach),
                  repr(studio.remote_keys.origins()), *(file.read_text(errors="replace") for folder in (settings.models, settings.logs)
                                                        for file in folder.rglob("*") if file.is_file())]
    assert not any(SECRET in text for text in everything)


def test_a_key_belongs_to_a_server_and_not_to_a_name(studio, store, server, settings):
    """Whoever changes the manifest gets no key at the other address."""
    remotes.add(studio, store, server.url, key=SECRET)
    other = Server()
    manifest = settings.models / "far" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(server.url, other.url))
    studio.load("far")
    list(studio.submit(Request(CHAT), "far"))
    assert other.asked and all("authorization" not in headers for _, _, headers, _ in other.seen)
    other.close()


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_a_key_file_that_others_may_read_is_refused(tmp_path):
    keys = RemoteKeys(tmp_path / "keys.json", {})
    keys.put(Address.parse("http://box:8000"), SECRET)
    assert keys.find("http://box:8000") == SECRET and keys.find("http://box:8001") is None and keys.origins() == ["http://box:8000"]
    (tmp_path / "keys.json").chmod(0o640)
    with pytest.raises(BadSetting, match="others may read it") as caught:
        keys.find("http://box:8000")
    assert SECRET not in str(caught.value)
    (tmp_path / "keys.json").chmod(0o600)
    keys.put(Address.parse("http://box:8000/v1"), "")
    assert keys.find("http://box:8000") is None


def test_a_key_from_the_environment(tmp_path):
    keys = RemoteKeys(tmp_path / "keys.json", {VARIABLE: f"http://box:8000/v1={SECRET} https://api.example.com=other="})
    assert keys.find("http://box:8000") == SECRET and keys.find("https://api.example.com:443") == "other="
    assert Settings.resolve(environment={VARIABLE: f"http://box={SECRET}"}) == Settings(), "the variable is no unknown setting"
    for wrong in (SECRET, f"box={SECRET}", "http://box="):
        with pytest.raises(BadSetting) as caught:
            RemoteKeys(tmp_path / "keys.json", {VARIABLE: wrong}).find("http://box:80")
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("key", ["a b", "a\nb", "k\u00e9y", "x" * 5000, "a\r\nx-evil: 1"])
def test_a_key_that_no_header_can_carry_is_refused(tmp_path, key):
    with pytest.raises(InvalidRequest):
        RemoteKeys(tmp_path / "keys.json", {}).put(Address.parse("http://box"), key)


@pytest.mark.parametrize("text", ["{", "[]", '{"http://box:80": 7}'])
def test_a_key_file_that_is_none_of_ours_is_said(tmp_path, text):
    (tmp_path / "keys.json").write_text(text)
    (tmp_path / "keys.json").chmod(0o600)
    with pytest.raises(BadSetting):
        RemoteKeys(tmp_path / "keys.json", {}).find("http://box:80")


# ---------------------------------------------------------------------------------------------- what uses models
def test_it_can_be_compared(studio, store, server):
    server.models = ["far", "farther"]
    for name in server.models:
        remotes.add(studio, store, server.url, name)
    plan = compare.plan(studio, ["far", "farther"])
    assert plan.need == 0
    comparison = compare.Comparison(studio, plan, Request(CHAT, Sampling(max_tokens=8)))
    assert comparison.wait(20)
    told = compare.to_dict(comparison, comparison.shots())
    assert [(one["text"], one["tokens"], one["peak_bytes"]) for one in told["answers"]] == [("Hello there", 2, None)] * 2


def test_a_batch_runs_on_it(settings, server, tmp_path, capsys):
    server.script = [answer("Yes", completion_tokens=1)]
    options = [part for name in ("models", "outputs", "logs") for part in (f"--{name}", str(getattr(settings, name)))]
    assert cli.main(["connect", server.url, *options]) == 0 and capsys.readouterr().out == "far\n"
    tasks, out = tmp_path / "t.jsonl", tmp_path / "r.jsonl"
    tasks.write_text("".join(json.dumps({"task_id": f"t{i}", "messages": [{"role": "user", "content": "Is it?"}]}) + "\n" for i in range(6)))
    assert cli.main(["batch", str(tasks), "--model", "far", "--output", str(out), *options]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["task_id"] for row in rows) == [f"t{i}" for i in range(6)] and {row["output"] for row in rows} == {"Yes"}
    assert rows[0]["model"] == "far" and rows[0]["usage"]["completion_tokens"] == 1 and rows[0]["usage"]["cached_tokens"] is None


def test_the_command_lists_and_asks_for_a_key_on_a_pipe(settings, server, capsys, monkeypatch, tmp_path):
    server.models, server.facts = ["a", "b"], {"max_model_len": 4096}
    options = [part for name in ("models", "outputs", "logs") for part in (f"--{name}", str(getattr(settings, name)))]
    options += ["--remote-key-file", str(settings.remote_key_file)]
    assert cli.main(["connect", server.url, "--list", "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)[1] == {"model": "b", "owner": "vllm", "context": 4096}
    monkeypatch.setattr("sys.stdin", io.StringIO(SECRET + "\n"))
    assert cli.main(["connect", server.url, "--model", "b", "--name", "bee", "--key", "--json", *options]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["remote"] == {"address": server.url, "model": "b"} and SECRET not in out.out + out.err
    assert server.seen[-1][2]["authorization"] == f"Bearer {SECRET}"
    assert cli.main(["connect", "nonsense", *options]) == 1 and "http://127.0.0.1:8000/v1" in capsys.readouterr().err


def test_running_answers_get_the_drain_time_at_shutdown(settings, store, server):
    studio = Studio(replace(settings, drain=5.0))
    studio.load(remotes.add(studio, store, server.url))
    server.script = [then(lambda h: h.stream(answer("Still ", "here"), 0.1))]
    events = studio.submit(Request(CHAT), "far")
    assert next(event.text for event in events if event.text) == "Still "
    studio.close()
    rest = list(events)
    assert "".join(event.text for event in rest) == "here" and [event.finish for event in rest if event.finish] == ["stop"]
