"""The only writer of outputs/ and of the request log in logs/.

A line of logs/requests.jsonl tells whose key asked which model, how fast it answered and how that ended. It holds no prompt, no
answer and no key (only its label) unless the settings ask for the first two; without them the meter hears it. Refuses every name
that would leave its folder.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backends.base import DiskFull, Event, GainzError, Message, ModelInfo, NameRefused, Request, Speculation
from backends.characters import printable

log = logging.getLogger(__name__)
KEPT = 5                                # rotated files beside the current one
SENT = 80                               # signs of a name that somebody sent and that is no model's
_NAME = re.compile(r"[^\W_][\w.\- ]{0,119}\Z")      # letters of any script; no separator, no leading dot
_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}   # Windows


def safe_name(name: str) -> str:
    """``name`` itself; NameRefused where it could leave its folder or cannot be a file on every system."""
    if not isinstance(name, str) or not _NAME.match(name) or ".." in name or name.endswith((".", " ")) \
            or name.partition(".")[0].lower() in _RESERVED:
        raise NameRefused(f"{name!r} is no plain name.", field="name")
    return name


class Records:
    """Thread-safe. ``rotate``: bytes after which the request log starts a new file; `KEPT` old ones stay. ``heard``: is told the
    facts of every request that is over."""

    def __init__(self, logs: Path, outputs: Path, content: bool = False, rotate: int = 10_000_000,
                 heard: Callable[[dict[str, Any]], None] = lambda facts: None) -> None:
        self.outputs, self.log = Path(outputs), Path(logs) / "requests.jsonl"
        self._content, self._rotate = content, rotate
        self._lock = threading.Lock()
        self._file, self._heard = None, heard

    # ------------------------------------------------------------------------------------------ requests
    def follow(self, request: Request, info: ModelInfo, events: Iterator[Event]) -> Followed:
        """The same events; after the last one, or when it is closed before, a line in the log."""
        return Followed(self, request, info, events)

    def refused(self, request: Request, model: ModelInfo | str | None, error: GainzError) -> None:
        """A request that never began. ``model``: or the name that was asked for, where there is none of it."""
        self._tell({**_head(request, model), "finish": ["error"], "error": error.code})

    @contextmanager
    def embedding(self, info: ModelInfo, key: str, texts: int) -> Iterator[list[int]]:
        """Around the embedding of ``texts`` texts; the tokens of each are put into the list."""
        began, tokens, error = time.monotonic(), [], None
        try:
            yield tokens
        except GainzError as raised:
            error = raised.code
            raise
        finally:
            self._tell({**_embed_head(info, key, texts), "finish": ["error" if error else "stop"],
                        "prompt_tokens": sum(tokens) if tokens else None, "total_s": _round(time.monotonic() - began), "error": error})

    def refused_embedding(self, model: str | None, key: str, texts: int, error: GainzError) -> None:
        """One that never began, since the model is not there or not loaded."""
        self._tell({**_embed_head(model, key, texts), "finish": ["error"], "error": error.code})

    def _tell(self, facts: dict[str, Any], content: dict[str, Any] | None = None) -> None:
        facts = {name: printable(value) if isinstance(value, str) else value for name, value in facts.items()}     # names that somebody sent
        self._heard(facts)
        self.line({**facts, **(content or {})})

    def line(self, facts: dict[str, Any]) -> None:
        """One line. A disk that is full costs the line and not the answer; the next line tries again."""
        text = json.dumps(facts, ensure_ascii=False, separators=(",", ":")) + "\n"
        with self._lock:
            try:
                file = self._open()
                file.write(text)
                file.flush()
                if file.tell() >= self._rotate:
                    self._turn()
            except OSError as error:
                self._file = None
                log.warning("the request log cannot be written: %s", error)

    def _open(self):
        if self._file is None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.log, "a", encoding="utf-8", errors="replace")  # noqa: SIM115  stays open between lines
        return self._file

    def _turn(self) -> None:
        self._file.close()
        self._file = None
        old = [self.log.with_name(f"requests.{n}.jsonl") for n in range(1, KEPT + 1)]
        for newer, older in zip([self.log, *old[:-1]][::-1], old[::-1], strict=True):
            if newer.exists():
                newer.replace(older)

    # ------------------------------------------------------------------------------------------ results
    def write_output(self, kind: str, name: str, data: str | bytes | dict | list) -> Path:
        """outputs/<kind>/<name>, whole or not at all; text as UTF-8, values as JSON. NameRefused, DiskFull."""
        folder = self.outputs / safe_name(kind)
        path = folder / safe_name(name)
        if isinstance(data, (dict, list)):
            data = json.dumps(data, ensure_ascii=False, indent=1)
        raw = data.encode() if isinstance(data, str) else data
        partial = path.with_name(f".{path.name}.{threading.get_ident()}.part")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(raw)
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise DiskFull(f"{kind}/{name} cannot be written.", bytes=len(raw), reason=error) from error
        return path

    def output(self, kind: str, name: str) -> Path:
        """The path of a result that is there; NameRefused."""
        path = self.outputs / safe_name(kind) / safe_name(name)
        if not path.is_file():
            raise NameRefused(f"There is no {kind}/{name}.", field="name")
        return path

    def outputs_of(self, kind: str) -> list[Path]:
        """Newest first."""
        folder = self.outputs / safe_name(kind)
        inside = folder.iterdir() if folder.is_dir() else ()
        found = [path for path in inside if path.is_file() and not path.name.startswith(".")]
        return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


class Followed(Iterator[Event]):
    """An answer on its way to whoever asked, and what the log will say about it."""

    def __init__(self, records: Records, request: Request, info: ModelInfo, events: Iterator[Event]) -> None:
        self._done = False
        self._records, self._events, self._request, self._info = records, events, request, info
        self._finish: dict[int, str] = {}
        self._texts: dict[int, list[str]] = {}
        self._tokens, self._began = 0, time.monotonic()

    def __next__(self) -> Event:
        event, code = None, "internal_error"
        try:
            event = next(self._events)
        except GainzError as error:
            code = error.code
            raise
        finally:
            if event is None and not self._done:            # it broke off without a last event
                self._write(None, code)
        self._tokens += len(event.ids)
        if event.finish is not None:
            self._finish[event.index] = event.finish
        if event.text and self._records._content:
            self._texts.setdefault(event.index, []).append(event.text)
        if event.last:
            self._write(event)
        return event

    def close(self) -> None:
        """Cancels what is still running."""
        close = getattr(self._events, "close", None)       # a plain iterator has nothing to close
        if close is not None:
            close()
        if not self._done:
            self._write(None)

    def _write(self, last: Event | None, error: str | None = None) -> None:
        self._done = True
        facts = {**_head(self._request, self._info), "finish": list(self._finish.values()) or ["error" if error else "cancelled"]}
        if last is None:                # left before its end: what was seen until then
            facts |= {"completion_tokens": self._tokens, "total_s": _round(time.monotonic() - self._began), "error": error}
        else:
            usage, timing = last.usage, last.timing
            facts |= {"prompt_tokens": usage and usage.prompt_tokens, "completion_tokens": usage and usage.completion_tokens,
                      "cached_tokens": usage and usage.cached_tokens, "drafted": usage and usage.drafted,
                      "accepted": usage and usage.accepted, "queue_s": _round(timing.queue_seconds),
                      "ttft_s": _round(timing.ttft_seconds), "total_s": _round(timing.total_seconds),
                      "prefill_tps": _round(timing.prefill_tokens_per_second),
                      "decode_tps": _round(timing.decode_tokens_per_second),
                      "error": last.error and last.error.code}
            facts |= _drafting(usage.speculation if usage else None)
        content = {"prompt": _prompt(self._request), "answers": ["".join(parts) for parts in self._texts.values()]} \
            if self._records._content else {}
        self._records._tell(facts, content)

    def __del__(self) -> None:
        if not self._done:
            self.close()


def _head(request: Request, model: ModelInfo | str | None) -> dict[str, Any]:
    return {"time": _now(), "id": request.id, "key": request.key or None, **_of(model), "draft": request.draft and request.draft.name}


def _embed_head(model: ModelInfo | str | None, key: str, texts: int) -> dict[str, Any]:
    return {"time": _now(), "id": uuid.uuid4().hex[:16], "kind": "embed", "key": key or None, **_of(model), "texts": texts}


def _of(model: ModelInfo | str | None) -> dict[str, Any]:
    """Which model: one that is loaded, or the name that somebody asked for."""
    info = model if isinstance(model, ModelInfo) else None
    return {"model": info.name if info else model and printable(model, SENT), "revision": info and info.revision, "backend": info and info.backend,
            "context": info and info.context or None}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _drafting(told: Speculation | None) -> dict[str, Any]:
    """How drafting went, where it was asked for."""
    if told is None:
        return {}
    return {"draft_length": told.length, "acceptance": _round(told.acceptance), "tokens_per_pass": _round(told.tokens_per_pass),
            "acceptance_by_position": [_round(right / tried) for tried, right in told.positions],
            "draft_lengths": dict(told.lengths), "speedup": _round(told.speedup), "draft_resting": told.resting}


def _prompt(request: Request) -> Any:
    if isinstance(request.prompt, tuple) and request.prompt and isinstance(request.prompt[0], Message):
        return [asdict(message) for message in request.prompt]
    return request.prompt


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
