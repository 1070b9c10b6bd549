"""The diagnostics bundle: secrets are planted wherever one could be, and none is found in it."""

from __future__ import annotations

import base64
import getpass
import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from gainz_ui.services import diagnostics
from gainz_ui.services.diagnostics import Redactor
from gainz_ui.services.monitor import Monitor
from gainz_ui.settings import Settings
from tests.api_fakes import INFO, FakeStudio

KNOWN = "pläin/geheim+wort=42"          # set somewhere by name, without the shape of any token
ENVIRONMENT = {"HF_TOKEN": KNOWN, "GAINZ_API_KEY": "the-settings-key", "MY_DB_PASSWORD": "correct horse", "HTTPS_PROXY": "http://joe:pr0xypass@proxy:3128",
               "HOME": "/srv/people/annabel", "PATH": "/usr/bin", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI", "HF_HOME": "/srv/people/annabel/hf",
               "PIP_INDEX_URL": "https://user:indexpass@index.example/simple", "SSH_AUTH_SOCK": "/run/ssh-agent-socket", "OMP_NUM_THREADS": "2"}
PLANTED = {     # text → what must not be left of it
    f"token is {KNOWN} here": KNOWN, f"url?x={quote(KNOWN, safe='')}&y=1": quote(KNOWN, safe=""), json.dumps({"a": KNOWN}): json.dumps(KNOWN)[1:-1],
    "Authorization: Basic " + base64.b64encode(b"me:hunter2hunter2").decode(): base64.b64encode(b"me:hunter2hunter2").decode(),
    "blob " + base64.b64encode(b"xy correct horse z").decode(): base64.b64encode(b"correct horse")[4:12].decode(), "curl -H 'Authorization: Bearer abcdef123456'": "abcdef123456",
    "GET /v1?api_key=qwertz99&z=1": "qwertz99", "https://bob:s3cr3t@host/path": "s3cr3t", "git+ssh://git:p%40ss@host": "p%40ss",
    "hf_abcdefghijklmnop": "abcdefghijklmnop", "sk-proj-abc_DEF-123456": "abc_DEF", "gz-" + "A" * 43: "AAAA", "ghp_0123456789abcdef": "0123456789abcdef",
    'password = "open sesame"': "sesame", "{'api_token': 'tok tok'}": "tok tok", '{"client_secret": "quo\\"ted"}': "quo", "PGPASSWORD=plainpg psql": "plainpg",
    "python app.py serve --api-key cmdline77": "cmdline77", "--hf-token=cmdline78": "cmdline78", "Cookie: session=deadbeef; a=b": "deadbeef",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl": "eyJzdWIi", "-----BEGIN PRIVATE KEY-----\nMIIEvQ\nxyz\n-----END PRIVATE KEY-----": "MIIEvQ",
    "AKIAIOSFODNN7EXAMPLE": "IOSFODNN7", "open /srv/people/annabel/x failed": "annabel", "C:\\Users\\Annabel\\models": "Annabel", '"C:\\\\Users\\\\Annabel\\\\m"': "Annabel",
    "/home/charlie/models/x": "charlie", "/Users/dora/Library": "dora", "X-API-Key: headerkey9": "headerkey9"}


@pytest.fixture
def redactor():
    return Redactor(["the-settings-key"], ENVIRONMENT)


@pytest.mark.parametrize("text", PLANTED)
def test_no_secret_is_left(redactor, text):
    left = redactor.text(f"before {text} after")
    assert PLANTED[text] not in left, left
    assert left.startswith("before ")


def test_what_explains_a_fault_stays(redactor):
    for text in ("tokens=12 key_width=64 max_tokens: 5", '{"completion_tokens": 9, "model": "starter", "ttft_s": 0.01}', "OMP_NUM_THREADS=2",
                 "Traceback (most recent call last): KeyError: 'model.layers.0'", "http://127.0.0.1:7860/v1/models"):
        assert redactor.text(text) == text


def test_values_under_a_name_that_sounds_like_a_secret_go(redactor):
    value = {"hub": {"access_token": "short", "n_tokens": 3, "list": ["/srv/people/annabel/a"]}, "passwd": ["x1", "x2"], "empty_key": ""}
    assert redactor.value(value) == {"hub": {"access_token": "[removed]", "n_tokens": 3, "list": ["~/a"]}, "passwd": ["[removed]"] * 2, "empty_key": ""}


def test_the_bundle_holds_none_of_what_was_planted(tmp_path, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    logs = tmp_path / "logs"
    logs.mkdir()
    everything = "\n".join(PLANTED)
    (logs / "engine.log").write_text(everything, encoding="utf-8")
    rows = [{"id": "1", "key": "ann", "prompt": "what I asked", "answers": ["what it said"], "error": text} for text in PLANTED]
    (logs / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"torn": "what I as', encoding="utf-8")
    (logs / "requests.1.jsonl").write_text(json.dumps(rows[0]) + '\n{"id": "\\udc00"}\n', encoding="utf-8")
    (logs / "core.bin").write_bytes(b"what I asked")
    studio = FakeStudio(Settings(models=tmp_path / "m", outputs=tmp_path / "o", logs=logs, api_key="the-settings-key",
                                 allowed_origins=("https://bob:s3cr3t@host",)))
    studio.present = {"tiny": replace(INFO, notes=tuple(PLANTED))}
    studio.meter.ended({"finish": ["error"], "error": "x", "id": "gz-" + "A" * 43, "model": "https://bob:s3cr3t@host/path", "backend": None})
    studio.meter.ended({"finish": ["error"], "error": "x", "id": "\udc00", "model": "\ud800", "draft": "\udc00"})        # costs no bundle
    made = zipfile.ZipFile(io.BytesIO(diagnostics.bundle(studio, Monitor(studio, tuple))))
    texts = {name: made.read(name).decode() for name in made.namelist()}
    whole = "\n".join(texts.values())
    for secret in {*PLANTED.values(), *ENVIRONMENT.values(), "pr0xypass", "indexpass", "what I asked", "what it said", "the-settings-key"} - {"/usr/bin", "2"}:
        assert secret not in whole and json.dumps(secret)[1:-1] not in whole, (secret, [name for name in texts if secret in texts[name]])
    assert set(texts) >= {"about.json", "doctor.json", "settings.json", "environment.json", "monitor.json", "logs/engine.log", "logs/requests.1.jsonl"}
    assert "logs/core.bin" not in texts and "PATH" not in json.loads(texts["environment.json"])
    assert json.loads(texts["environment.json"])["OMP_NUM_THREADS"] == "2" and json.loads(texts["settings.json"])["api_key"] is True
    assert len(texts["logs/requests.jsonl"].splitlines()) == len(PLANTED) and json.loads(texts["logs/requests.jsonl"].splitlines()[0])["key"] == "ann"


def test_a_long_log_gives_its_end_in_whole_lines(tmp_path):
    path = tmp_path / "engine.log"
    path.write_text("\n".join(f"line {n}" for n in range(100_000)), encoding="utf-8")
    kept = diagnostics._log(path, Redactor([], {})).splitlines()
    assert kept[-1] == "line 99999" and 1000 < len(kept) < 30_000 and kept[0].startswith("line ")


def test_who_runs_it_is_not_told(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "annabel")
    assert "annabel" not in Redactor([], {}).text(f"owner annabel, group annabel at {Path('/data')}")
