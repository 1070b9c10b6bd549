"""Which source wins, and that nothing misspelt or out of range passes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from backends.base import BadSetting
from gainz_ui.settings import Settings


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_defaults_listen_on_this_machine_only_and_log_no_content():
    settings = Settings.resolve()
    assert (settings.host, settings.port, settings.log_content, settings.starter) == ("127.0.0.1", 7860, False, True)


def test_later_sources_win():
    Path("gainz.toml").write_text('port = 1\nqueue = 10\nlanguage = "zh"\nmodels = "m"\n')
    settings = Settings.resolve({"port": 3, "queue": None}, {"GAINZ_PORT": "2", "GAINZ_QUEUE": "20", "PATH": "/bin"})
    assert (settings.port, settings.queue, settings.language, settings.models) == (3, 20, "zh", Path("m"))


def test_types_from_text():
    settings = Settings.resolve({}, {"GAINZ_LOAD": "a, b", "GAINZ_STARTER": "off", "GAINZ_TIME_LIMIT": "2.5", "GAINZ_LOGS": "l"})
    assert (settings.load, settings.starter, settings.time_limit, settings.logs) == (("a", "b"), False, 2.5, Path("l"))


@pytest.mark.parametrize(("arguments", "environment", "file", "where"), [
    ({"prot": 1}, {}, "", "--prot"),
    ({}, {"GAINZ_PROT": "1"}, "", "GAINZ_PROT"),
    ({}, {}, "prot = 1", "prot in gainz.toml"),
    ({"port": 70_000}, {}, "", "--port"),
    ({}, {"GAINZ_PORT": "http"}, "", "GAINZ_PORT"),
    ({}, {"GAINZ_STARTER": "perhaps"}, "", "GAINZ_STARTER"),
    ({}, {}, "port = true", "port in gainz.toml"),
    ({}, {}, "time_limit = nan", "time_limit in gainz.toml"),
    ({}, {}, "load = [1]", "load in gainz.toml"),
    ({}, {}, 'language = "fr"', "language in gainz.toml"),
    ({"log_content": "x"}, {}, "", "--log-content")])
def test_a_bad_key_or_value_names_where_it_stands(arguments, environment, file, where):
    if file:
        Path("gainz.toml").write_text(file)
    with pytest.raises(BadSetting) as caught:
        Settings.resolve(arguments, environment)
    assert caught.value.evidence["where"] == where


def test_an_unknown_key_lists_the_known_ones():
    with pytest.raises(BadSetting, match="log_content"):
        Settings.resolve({"prot": 1})


def test_a_file_that_was_named_must_be_there():
    with pytest.raises(BadSetting, match="nowhere.toml"):
        Settings.resolve({}, {"GAINZ_CONFIG": "nowhere.toml"})


def test_a_file_that_is_no_toml_is_named():
    Path("gainz.toml").write_text("port: 1")
    with pytest.raises(BadSetting, match=r"gainz\.toml"):
        Settings.resolve()


def test_frozen_and_the_key_stays_out_of_the_text():
    settings = Settings(api_key="hunter2")
    assert "hunter2" not in repr(settings)
    with pytest.raises(FrozenInstanceError):
        settings.port = 1
