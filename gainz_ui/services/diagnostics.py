"""A bundle for a report: what machine, which versions and settings, how the server does, the ends of the logs; one zip, and nothing in it
that is anybody's secret.

`Redactor` is the one way into the zip: every text passes through it. It removes what is known to be secret (the key of the settings,
whatever stands in an environment variable that sounds like one), what looks like a secret (tokens, passwords in addresses and in pairs
of name and value, private keys) and who the user is (home folders, the login and machine names). Prompts and answers, which the log
holds only where the settings ask for them, are dropped by name. Better too much than too little.
"""

from __future__ import annotations

import base64
import getpass
import io
import json
import os
import platform
import re
import socket
import time
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from backends.characters import printable
from gainz_ui import __version__
from gainz_ui.services import doctor
from gainz_ui.services.monitor import Monitor

KIND = "diagnostics"
TAIL = 200_000                          # bytes of the end of a log
GONE = "[removed]"
SENSITIVE = re.compile(r"key|token|secret|passw|passphrase|pwd|credential|auth|cookie|signature|private|netrc|dsn", re.IGNORECASE)
HARMLESS = {"GAINZ_KEYS", "TOKENIZERS_PARALLELISM", "KEYS"}         # sound like a secret and are none
TOLD = re.compile(r"^(GAINZ|HF|HUGGINGFACE|TRANSFORMERS|TORCH|PYTORCH|CUDA|NVIDIA|OMP|MKL|KMP|TRITON|GRADIO|PIP|LC|LANG|TOKENIZERS)(_|$)|_PROXY$",
                  re.IGNORECASE)        # of the environment, what may explain a fault
CONTENT = ("prompt", "answers", "messages", "text", "output")       # of a line of the request log
NAMED = r"[\w.\-]*(?:api[_\-]?key|access[_\-]?key|key|token|secret|passw(?:or)?d|passphrase|pwd|credentials?|authorization|cookie|signature|sig)"
PATTERNS = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), GONE),
    (re.compile(r"(?<=://)[^/\s@\"']+@"), GONE + "@"),                                         # user and password of an address
    (re.compile(r"(?i)\b(bearer|basic|digest|negotiate)(\s+|%20)[\w+/=.~:\-]{4,}"), rf"\1 {GONE}"),
    (re.compile(rf"(?i)(?<=[?&;])({NAMED})=[^&\s\"'#]+"), rf"\1={GONE}"),                      # of an address
    (re.compile(rf"(?i)([\"']?{NAMED}[\"']?\s*[:=]\s*)(\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*')"), rf'\1"{GONE}"'),
    (re.compile(rf"(?i)(--{NAMED})([ =])(?!-)[^\s\"',]+"), rf"\1\2{GONE}"),                    # of a command line
    (re.compile(rf"(?im)(\b{NAMED}\s*=\s*)(?![\"'\[])[^\s,;\"']+"), rf"\1{GONE}"),
    (re.compile(r"(?i)(\b(?:authorization|proxy-authorization|x-api-key|cookie|set-cookie)\s*:\s*)[^\n\"']+"), rf"\1{GONE}"),       # headers
    (re.compile(r"\b(?:gz-|sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|ya29\.|npm_|pypi-)[\w\-.]{8,}"), GONE),
    (re.compile(r"\beyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*"), GONE),                               # JSON web tokens
    (re.compile(r"(?i)((?:/home/|/Users/|[a-z]:\\{1,2}Users\\{1,2}))[^/\\\s\"':,]+"), r"\1someone"))


class Redactor:
    """Text → text without secrets. ``secrets``: values that are known to be some, in whatever form they appear."""

    def __init__(self, secrets: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        known = {value for value in secrets if value}
        known |= {value for name, value in environment.items() if SENSITIVE.search(name) and name.upper() not in HARMLESS and len(value) >= 4}
        forms = {form for value in known for form in _forms(value)}
        self._known = sorted(forms, key=len, reverse=True)              # a secret may be a part of another one
        self._homes = sorted({home for name in ("HOME", "USERPROFILE") if len(home := environment.get(name, "").rstrip("/\\")) > 2}
                             | {str(Path.home())} - {"/"}, key=len, reverse=True)
        self._names = [name for name in (_login(), socket.gethostname()) if len(name) >= 3 and name not in ("root", "localhost")]

    def text(self, text: str) -> str:
        for secret in self._known:
            text = text.replace(secret, GONE)
        for home in self._homes:
            text = text.replace(home, "~").replace(home.replace("\\", "\\\\"), "~")
        for pattern, instead in PATTERNS:
            text = pattern.sub(instead, text)
        for name in self._names:
            text = re.sub(rf"(?<![\w]){re.escape(name)}(?![\w])", "someone", text)
        return text

    def value(self, value: Any, name: str = "") -> Any:
        """Of JSON: what stands under a name that sounds like a secret goes, whatever it is."""
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(one, str(key)) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(one, name) for one in value]
        if isinstance(value, str):
            return GONE if value and SENSITIVE.search(name) and name.upper() not in HARMLESS and name not in ("key", "tokens") else self.text(value)
        return value if value is None or isinstance(value, (int, float, bool)) else self.text(str(value))


def _forms(secret: str) -> Iterable[str]:
    """As it is, and as addresses, JSON and Basic logins write it."""
    yield secret
    yield from {quote(secret, safe=""), quote_plus(secret), json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]} - {secret}
    if len(secret) >= 6:
        raw = secret.encode()
        for shift in range(3):          # wherever in a base64 text it stands: the characters that depend on its neighbours cut off
            coded = base64.b64encode(b"\0" * shift + raw).decode()
            yield coded[(0, 2, 3)[shift]:len(coded.rstrip("=")) - (0 if (len(raw) + shift) % 3 == 0 else 1)]


def _login() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):         # a container without an entry for this user
        return ""


# ---------------------------------------------------------------------------------------------- the bundle
def write(studio: Any, monitor: Monitor) -> Path:
    """outputs/diagnostics/gainz-….zip; DiskFull."""
    return studio.records.write_output(KIND, f"gainz-{time.strftime('%Y%m%d-%H%M%S')}.zip", bundle(studio, monitor))


def bundle(studio: Any, monitor: Monitor, environment: Mapping[str, str] | None = None) -> bytes:
    """The zip."""
    environment = os.environ if environment is None else environment
    settings = studio.settings
    redactor = Redactor([settings.api_key], environment)
    values = {
        "about.json": {"gainz": __version__, "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "python": platform.python_version(),
                       "system": platform.platform()},
        "doctor.json": doctor.examine(settings, studio.registry, deep=False).to_dict(),
        "settings.json": {name: value if name != "api_key" else bool(value) for name, value in _plain(asdict(settings)).items()},
        "environment.json": {name: value for name, value in sorted(environment.items()) if TOLD.search(name)},
        "monitor.json": monitor.plain(), "loaded.json": [asdict(info) for info in studio.loaded().values()],
        "models.json": [asdict(entry) for entry in studio.catalog()]}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for name, value in values.items():
            made.writestr(name, _bytes(json.dumps(redactor.value(value), ensure_ascii=False, indent=1)))
        for path in sorted(Path(settings.logs).glob("*")):
            if path.is_file() and path.suffix in (".log", ".jsonl"):
                made.writestr(f"logs/{printable(redactor.text(path.name))}", _bytes(_log(path, redactor)))
        made.writestr("README.txt", "Made by Gainz for a report. Keys, tokens, passwords, home folders, prompts and answers were removed;\n"
                                    "still, look through it before you pass it on.\n")
    return out.getvalue()


def _bytes(text: str) -> bytes:
    """Half of a surrogate pair, as the name of a file can hold it, costs its sign and not the bundle."""
    return text.encode("utf-8", "replace")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _log(path: Path, redactor: Redactor) -> str:
    """The end of a log in whole lines; of the request log without what was said."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        raw = file.read().decode("utf-8", errors="replace")
    lines = raw.split("\n")[1:] if size > TAIL else raw.split("\n")
    if path.suffix != ".jsonl":
        return redactor.text("\n".join(lines))
    return "\n".join(json.dumps(redactor.value(row), ensure_ascii=False) for row in map(_row, lines) if row is not None)


def _row(line: str) -> dict[str, Any] | None:
    """A line without its content; None: it is torn, or none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return {key: value for key, value in row.items() if key not in CONTENT} if isinstance(row, dict) else None
