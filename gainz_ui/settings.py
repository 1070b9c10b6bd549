"""The program's settings: one frozen value, made once at the start.

Later sources win: defaults, file (gainz.toml), environment (GAINZ_*), command line. A key that nobody knows and a value out
of range are a BadSetting that names the source, so that a misspelt setting never silently does nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from backends.base import BadSetting

PREFIX, FILE = "GAINZ_", "gainz.toml"
BESIDE = {"config", "remote_key"}        # GAINZ_CONFIG names the file itself; GAINZ_REMOTE_KEY is read where other servers' keys are
TRUE, FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
LANGUAGES = ("auto", "en", "zh")


def _knob(default: Any, help: str, **more: Any) -> Any:  # noqa: A002  "help" is what every parser calls it
    return field(default=default, metadata={"help": help, **more}, repr=not more.get("secret", False))


@dataclass(frozen=True)
class Settings:
    host: str = _knob("127.0.0.1", "address to listen on; 0.0.0.0 opens it to the network")
    port: int = _knob(7860, "port of page and API", low=0, high=65535)
    models: Path = _knob(Path("models"), "folder of the models")
    outputs: Path = _knob(Path("outputs"), "folder for results and exports")
    logs: Path = _knob(Path("logs"), "folder for logs")
    load: tuple[str, ...] = _knob((), "models to load at the start")
    load_on_demand: bool = _knob(False, "load a model that a request names and that is not loaded")
    idle_unload: float = _knob(0.0, "seconds after which a model that nobody asks gives its memory back until it is asked for again, 0 = never",
                               low=0, high=604_800)
    starter: bool = _knob(True, "fetch the starter model when models/ is empty")
    queue: int = _knob(256, "requests that may wait before more are refused", low=1, high=100_000)
    queue_time: float = _knob(0.0, "seconds a request may wait for its turn, 0 = no limit", low=0, high=86_400)
    time_limit: float = _knob(0.0, "seconds one request may take, 0 = no limit", low=0, high=86_400)
    drain: float = _knob(3.0, "seconds that running answers get at shutdown", low=0, high=3600)
    language: str = _knob("auto", "language of the page", choices=LANGUAGES)
    log_content: bool = _knob(False, "write prompts and answers into the request log")
    log_size: int = _knob(10_000_000, "bytes of the request log before it is rotated", low=10_000, high=1 << 40)
    api_key: str = _knob("", "key that the API asks for, empty = none", secret=True)
    keys: Path = _knob(Path("keys.json"), "file of the API keys that `python app.py keys` makes")
    allowed_hosts: tuple[str, ...] = _knob((), "further Host names to answer to")
    allowed_origins: tuple[str, ...] = _knob((), "further web origins that may call the API")
    remote_hosts: tuple[str, ...] = _knob((), "hosts (box, box:8000) and networks (10.1.0.0/16) whose servers' models may be used, besides public ones")
    remote_private: bool = _knob(True, "let models of other servers lie on this machine and in private networks while we listen on loopback "
                                       "only; say no behind a reverse proxy")
    remote_key_file: Path = _knob(Path("remote-keys.json"), "file of other servers' keys, readable by its owner only")

    def __post_init__(self) -> None:
        for item in fields(self):
            _check(item.name, getattr(self, item.name), item.metadata, "settings")

    @classmethod
    def resolve(cls, arguments: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None,
                file: str | Path | None = None) -> Settings:
        """Merge the sources. ``arguments``: fields given on the command line, None = not given. ``file`` None: GAINZ_CONFIG,
        else gainz.toml in the working folder if it is there; a file that was named and is missing is a BadSetting."""
        environment = environment or {}
        named = file or environment.get(PREFIX + "CONFIG")
        values = _from_file(Path(named), must=True) if named else _from_file(Path(FILE), must=False)
        values |= _from_environment(environment)
        given = {key: value for key, value in (arguments or {}).items() if value is not None}
        return cls(**(values | _read(given, lambda key: "--" + key.replace("_", "-"))))


def _from_file(path: Path, must: bool) -> dict[str, Any]:
    if not path.is_file():
        if must:
            raise BadSetting(f"There is no settings file {path}.", file=path)
        return {}
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, OSError) as error:
        raise BadSetting(f"{path} is no TOML.", file=path, reason=error) from error
    return _read(data, lambda key: f"{key} in {path}")


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found = {key[len(PREFIX):].lower(): value for key, value in environment.items() if key.upper().startswith(PREFIX)}
    return _read({key: value for key, value in found.items() if key not in BESIDE}, lambda key: PREFIX + key.upper())


def _read(values: Mapping[str, Any], place) -> dict[str, Any]:
    """Values in the types of their fields; ``place(key)`` is how the source calls the key."""
    known = {item.name: item for item in fields(Settings)}
    out = {}
    for raw, value in values.items():
        key = raw.replace("-", "_")
        if key not in known:
            raise BadSetting(f"Unknown setting: {place(raw)}.", field=key, where=place(raw),
                             remedy=f"Known settings: {', '.join(sorted(known))}.")
        out[key] = _convert(known[key], value, place(raw))
        _check(key, out[key], known[key].metadata, place(raw))
    return out


def _convert(item: Any, value: Any, place: str) -> Any:
    """One value from text or TOML into its field's type."""
    try:
        return _CONVERT[item.type](value)
    except (TypeError, ValueError) as error:
        raise BadSetting(f"{place} must be {_KINDS[item.type]}.", field=item.name, where=place, value=value) from error


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in TRUE | FALSE:
        return value.strip().lower() in TRUE
    raise ValueError(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(value)
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(value)
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _names(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else list(value)
    return tuple(_text(part).strip() for part in parts if _text(part).strip())


_CONVERT = {"str": _text, "int": _whole, "float": _number, "bool": _flag, "Path": lambda value: Path(value).expanduser(),
            "tuple[str, ...]": _names}
_KINDS = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false", "Path": "a path",
          "tuple[str, ...]": "a list of names"}


def _check(name: str, value: Any, meta: Mapping[str, Any], place: str) -> None:
    if "low" in meta and not meta["low"] <= value <= meta["high"]:      # a NaN fails this, too
        raise BadSetting(f"{place}: {name} must be from {meta['low']:g} to {meta['high']:g}.", field=name, where=place,
                         value=value)
    if "choices" in meta and value not in meta["choices"]:
        raise BadSetting(f"{place}: {name} must be one of {', '.join(meta['choices'])}.", field=name, where=place,
                         value=value)
