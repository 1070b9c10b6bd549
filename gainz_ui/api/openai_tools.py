"""Tools: what of them a request may ask for, the schema of a forced call, and calls found in the text of an answer.

Knows the ways in which models write a call: Hermes and Qwen (``<tool_call>`` around JSON), Llama 3 (a JSON object with
``parameters``, after ``<|python_tag|>`` where that shows), Mistral (``[TOOL_CALLS]`` and a JSON array, or name and arguments). What
looks like a call and is none stays text: nothing a model said is lost.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.base import InvalidRequest
from gainz_ui.api.openai_schema import ChatBody, NamedTool, Tool

TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
PLAIN = re.compile(r"\s*(?:\[TOOL_CALLS\]|<\|python_tag\|>)?\s*(.*)\Z", re.DOTALL)
NAMED = re.compile(r"([\w.-]{1,256})\s*(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str                      # JSON
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:9])      # nine letters and digits: Mistral's templates insist

    def wire(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Plan:
    """``shown``: the tools the template gets; ``schema``: of the answer, where a call is forced."""

    shown: tuple[dict[str, Any], ...] = ()
    names: frozenset[str] = frozenset()
    schema: str | None = None

    @property
    def forced(self) -> bool:
        return self.schema is not None


# ---------------------------------------------------------------------------------------------- what is asked for
def plan(body: ChatBody) -> Plan:
    """InvalidRequest names what cannot be honoured."""
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        for name, given in (("tool_choice", choice not in (None, "none")), ("parallel_tool_calls", body.parallel_tool_calls is not None)):
            if given:
                raise InvalidRequest(f"{name} is given without tools.", field=name)
        return Plan()
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("Two tools have the same name.", field="tools")
    if choice == "none":
        return Plan()
    forced = [tool for tool in tools if not isinstance(choice, NamedTool) or tool.function.name == choice.function.name]
    if not forced:
        raise InvalidRequest(f"tool_choice names no tool of tools: {choice.function.name!r}.", field="tool_choice")
    must = choice == "required" or isinstance(choice, NamedTool)
    if not must:
        _refuse_promises(body, tools)
    if must and body.response_format is not None and body.response_format.type != "text":
        raise InvalidRequest("A forced call and response_format cannot both shape the answer.", field="response_format")
    shown = tuple(tool.model_dump(exclude_none=True) for tool in tools)
    return Plan(shown, frozenset(names), json.dumps(_call_schema(forced)) if must else None)


def _refuse_promises(body: ChatBody, tools: Sequence[Tool]) -> None:
    """What only a forced call can promise."""
    remedy = "Leave it out, or force the call with tool_choice: required, or a function by its name."
    if body.parallel_tool_calls is False:
        raise InvalidRequest("parallel_tool_calls false can be kept only where the call is forced.", field="parallel_tool_calls",
                             remedy=remedy)
    if any(tool.function.strict for tool in tools):
        raise InvalidRequest("strict can be kept only where the call is forced.", field="tools", remedy=remedy)


def _call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """One call of one of the tools. Definitions move to the root, where references look for them."""
    shapes, shared = [], {}
    for tool in tools:
        parameters = dict(tool.function.parameters or {"type": "object"})
        for place in ("$defs", "definitions"):
            for name, shape in dict(parameters.pop(place, {})).items():
                if shared.setdefault(place, {}).setdefault(name, shape) != shape:
                    raise InvalidRequest(f"Two tools define {name!r} differently.", field="tools", remedy="Rename one of the definitions.")
        shapes.append({"type": "object", "properties": {"name": {"const": tool.function.name}, "arguments": parameters},
                       "required": ["name", "arguments"], "additionalProperties": False})
    return {**(shapes[0] if len(shapes) == 1 else {"anyOf": shapes}), **shared}


# ---------------------------------------------------------------------------------------------- what was answered
def parse(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    """(what is said beside the calls, the calls). Untagged JSON counts only if it calls one of ``names``."""
    calls, kept, end = [], [], 0
    for found in TAGGED.finditer(text):
        inside = _calls(found[1], None)
        kept.append(text[end:found.start() if inside else found.end()])
        end = found.end()
        calls += inside
    if calls:
        return "".join((*kept, text[end:])).strip(), calls
    calls = _calls(PLAIN.match(text)[1], names)
    return ("", calls) if calls else (text, [])


def _calls(text: str, names: Collection[str] | None) -> list[Call]:
    """All of ``text`` as calls, or none."""
    values, place, reader = [], 0, json.JSONDecoder()
    while place < len(text):
        named = NAMED.match(text, place)
        try:
            value, place = reader.raw_decode(text, named.end() if named else place)
        except (ValueError, RecursionError):
            return []
        values += [{"name": named[1], "arguments": value}] if named else value if isinstance(value, list) else [value]
        while place < len(text) and text[place] in " \t\r\n;,":
            place += 1
    made = [_call(value, names) for value in values]
    return [] if None in made else made


def _call(value: Any, names: Collection[str] | None) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or names is not None and value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


class Held:
    """One answer's text in a stream: hands on what cannot be a call, and keeps the rest to the end."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._kept, self._said = plan, "", False

    def push(self, text: str) -> str:
        self._kept += text
        sure = self._sure()
        out, self._kept = self._kept[:sure], self._kept[sure:]
        self._said = self._said or bool(out.strip())
        return out

    def _sure(self) -> int:
        """How many characters are certain."""
        start = self._kept.lstrip()
        if self._plan.forced or not self._said and (not start or start[0] in "{["):
            return 0
        places = [place for mark in MARKS if (place := self._kept.find(mark)) >= 0]
        if places:
            return min(places)
        return len(self._kept) - max(_begun(self._kept, mark) for mark in MARKS)

    def close(self) -> tuple[str, list[Call]]:
        text, self._kept = self._kept, ""
        return parse(text, self._plan.names)


def _begun(text: str, mark: str) -> int:
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)
