"""A batch's tasks, read from JSON lines: ours ({task_id, prompt | messages, max_tokens …}) and OpenAI's batch lines.

Lines end with LF or CR LF and nothing else (a U+2028 in a text is text); a BOM at the start and blank lines are passed over; bytes
that are no UTF-8, JSON that is none, unknown fields, values out of range and ids that come twice are problems, each with its line.
Standard library only; nothing is run here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.base import TEXT_TOKENS, BrokenFile, DraftSpec, GainzError, InvalidRequest, Message, Request, Sampling
from backends.characters import check_characters
from gainz_ui.services.meant import meant

LONGEST = 16 << 20                      # bytes of one line
SHOWN = 20                              # problems that an error lists
LEFT_OUT = {"n", "logprobs", "prompt_logprobs"}                         # one text is what a row holds
SAMPLED = frozenset(Sampling.__dataclass_fields__) - LEFT_OUT
OWN = frozenset({"task_id", "prompt", "messages", "draft", "draft_length", "time_limit", "model"})
OPENAI = frozenset({"messages", "prompt", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop",
                    "presence_penalty", "frequency_penalty", "logit_bias", "n", "user", "metadata", "response_format", "stream"})
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
URLS = {CHAT: OPENAI - {"prompt"}, TEXT: OPENAI - {"messages", "response_format", "max_completion_tokens"}}


@dataclass(frozen=True)
class Task:
    """``line``: counted from 1; ``raw``: the line as it stood, without its end."""

    id: str
    line: int
    request: Request
    raw: bytes


@dataclass(frozen=True)
class Problem:
    line: int
    what: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}"


@dataclass(frozen=True)
class Tasks:
    tasks: tuple[Task, ...]
    problems: tuple[Problem, ...]

    def sound(self) -> tuple[Task, ...]:
        """All tasks; InvalidRequest that lists the problems, before any work."""
        if not self.tasks and not self.problems:
            raise InvalidRequest("The file holds no tasks.", field="tasks", remedy='One JSON object a line: {"task_id": "1", "prompt": "Hello"}')
        if self.problems:
            listed = "; ".join(map(str, self.problems[:SHOWN]))
            more = f"; and {len(self.problems) - SHOWN} more" if len(self.problems) > SHOWN else ""
            raise InvalidRequest(f"{len(self.problems)} line{'s' * (len(self.problems) > 1)} cannot be run: {listed}{more}.", field="tasks",
                                 remedy="Correct them, or have them left out: the page and the command (--skip-bad) can.")
        return self.tasks


def unreadable(path: Path, error: OSError) -> BrokenFile:
    return BrokenFile(f"{path} cannot be read.", reason=error.strerror, remedy="Name a file that is there and that you may read.")


def read(path: Path, model: str = "") -> Tasks:
    """``model``: that of the batch."""
    try:
        with open(path, "rb") as file:
            return parse(file, model)
    except OSError as error:
        raise unreadable(path, error) from error


def parse(lines: Iterable[bytes], model: str = "") -> Tasks:
    """``lines``: with their ends, split at LF, as a file opened in binary gives them. A line that names another model than the batch's
    ``model`` is a problem; "": any may be named."""
    tasks, problems, seen = [], [], {}
    for number, raw in _numbered(lines):
        try:
            task = _task(number, raw, model)
            if task.id in seen:
                raise InvalidRequest(f"task_id {task.id!r} stands on line {seen[task.id]} already.")
        except GainzError as error:
            problems.append(Problem(number, error.cause.rstrip(".")))
            continue
        seen[task.id] = number
        tasks.append(task)
    return Tasks(tuple(tasks), tuple(problems))


def _numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(lines, 1):
        raw = line.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if raw.strip():
            yield number, raw


def _task(number: int, raw: bytes, model: str) -> Task:
    if len(raw) > LONGEST:
        raise InvalidRequest(f"it is longer than {LONGEST} bytes.")
    data = _object(raw)
    name = data.get("custom_id", data.get("task_id"))
    if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
        raise InvalidRequest("it has no task_id (a text or a number).")
    request = _openai(data) if "custom_id" in data else _own(data)
    _named(data.get("body", data).get("model"), model)
    return Task(str(name), number, request, raw)


def _named(asked: Any, model: str) -> None:
    if asked is not None and not isinstance(asked, str):
        raise InvalidRequest("model is a text.")
    if asked is not None and model and asked != model:
        raise InvalidRequest(f"it asks for the model {asked[:80]!r}, and this batch runs {model!r}: leave model out, or give these lines a batch "
                             "of their own.")


def _object(raw: bytes) -> dict[str, Any]:
    try:
        data = check_characters("", json.loads(raw.decode("utf-8")))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"byte {error.start} is no UTF-8.") from error
    except RecursionError as error:
        raise InvalidRequest("it is nested too deeply.") from error
    except ValueError as error:
        raise InvalidRequest(f"it is no JSON: {error}.") from error
    if not isinstance(data, dict):
        raise InvalidRequest("it is no JSON object.")
    return data


# ---------------------------------------------------------------------------------------------- requests
def _own(data: Mapping[str, Any]) -> Request:
    _known(data, OWN | SAMPLED)
    usual = {"max_tokens": TEXT_TOKENS} if "prompt" in data else {}
    return Request(_prompt(data), _sampling(usual | {name: data[name] for name in SAMPLED & data.keys()}),
                   DraftSpec.asked(data.get("draft"), data.get("draft_length")), time_limit=data.get("time_limit"))


def _openai(data: Mapping[str, Any]) -> Request:
    _known(data, {"custom_id", "method", "url", "body"})
    url, body = data.get("url"), data.get("body")
    if data.get("method", "POST") != "POST" or url not in URLS or not isinstance(body, dict):
        raise InvalidRequest(f"an OpenAI line has method POST, url {' or '.join(URLS)}, and a body.")
    _known(body, URLS[url])
    if body.get("n", 1) != 1 or body.get("stream"):
        raise InvalidRequest("n other than 1 and stream have no place in a batch.")
    values = {"temperature": 1.0, **{name: body[name] for name in SAMPLED & body.keys() if body[name] is not None}}
    most = body.get("max_completion_tokens", body.get("max_tokens", None if url == CHAT else 16))
    return Request(_prompt(body), _sampling(values | {"max_tokens": most}), schema=_schema(body.get("response_format")))


def _schema(form: Any) -> str | None:
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return '{"type": "object"}'
    inner = form.get("json_schema") if kind == "json_schema" else None
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise InvalidRequest("response_format is text, json_object, or json_schema with a schema.")
    return json.dumps(inner["schema"])


def _known(data: Mapping[str, Any], names: Collection[str]) -> None:
    for name in data:
        if name not in names:
            guess = meant(name, names)
            raise InvalidRequest(f"unknown field {name!r}{f'; {guess} was probably meant' if guess else ''}.")


def _prompt(data: Mapping[str, Any]) -> str | tuple:
    given = [data[name] for name in ("prompt", "messages") if data.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest("it needs either prompt or messages.")
    if "messages" not in data or data["messages"] is None:
        return tuple(given[0]) if isinstance(given[0], list) else given[0]
    if not isinstance(given[0], list) or not given[0]:
        raise InvalidRequest("messages is a list of {role, content}.")
    return tuple(map(_message, given[0]))


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise InvalidRequest("a message is an object with role and content.")
    _known(turn, {"role", "content", "name"})
    if not isinstance(turn.get("name"), str | None):
        raise InvalidRequest("the name in a message is a text.")
    return Message(turn.get("role"), turn.get("content"), turn.get("name"))


def _sampling(values: dict[str, Any]) -> Sampling:
    for name in ("stop", "stop_ids"):
        if name in values:
            values[name] = (values[name],) if isinstance(values[name], str) else _listed(name, values[name])
    if "logit_bias" in values:
        values["logit_bias"] = _biases(values["logit_bias"])
    return Sampling(**values)


def _listed(name: str, value: Any) -> tuple:
    if value is not None and not isinstance(value, list):
        raise InvalidRequest(f"{name} is a list.")
    return tuple(value or ())


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(given, dict) or not all(key.isascii() and key.isdigit() and len(key) < 11 for key in given):
        raise InvalidRequest("logit_bias maps token ids to numbers.")
    return tuple((int(key), value) for key, value in given.items())
