"""Chat templates: messages to the text a model was trained on, exactly as transformers renders it.

A template comes from a stranger's file, so it runs in jinja2's immutable sandbox and sees plain data only. Knows nothing of
tokens or of models.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from backends.errors import InvalidRequest, NoChatTemplate, NotSupported

TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# What a foreign template can raise while it runs; anything else is a fault of ours.
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's part for training; when rendering it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Any) -> str:
        return caller()


class _Dict:
    """``dict(…)`` in a template, without the class's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """``namespace(…)`` that refuses names which could lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # self may be a keyword of the template
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
            sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise, dict=_Dict(), namespace=_Namespace,
                               strftime_now=lambda form: datetime.datetime.now().strftime(form))
    return environment


def plain(value: Any) -> Any:
    """The same value of JSON types only, so that a template meets no object with methods of its own."""
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise InvalidRequest(f"A template variable cannot be a {type(value).__name__}.", field="template",
                         remedy="Use texts, numbers, lists and objects of JSON.")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read a turn's reasoning under one of three names: give it under all that transformers gives."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class ChatTemplate:
    """One model's template, or several by name (``default``, ``tool_use``). ``variables``: bos_token and its like."""

    def __init__(self, source: str | Mapping[str, str], variables: Mapping[str, Any] = {}) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._variables = dict(variables)

    @cached_property
    def _compiled(self) -> dict[str, jinja2.Template]:
        return {}

    @cached_property
    def _reads_tools(self) -> bool:
        source = self._sources.get("tool_use", self._sources.get("default", ""))
        return "tools" in jinja2.meta.find_undeclared_variables(_environment().parse(source))

    def _template(self, tools: bool) -> jinja2.Template:
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise NoChatTemplate("The model has several templates, but none named default.",
                                 names=", ".join(sorted(self._sources)))
        if name not in self._compiled:
            try:
                self._compiled[name] = _environment().from_string(self._sources[name])
            except jinja2.TemplateError as error:
                raise NoChatTemplate("The model's chat template is not valid Jinja.", reason=error) from error
        return self._compiled[name]

    def render(self, messages: Sequence[Mapping[str, Any]], *, continue_last: bool = False, **variables: Any) -> str:
        """The prompt's text, ending where the assistant's turn begins, or inside the last message with ``continue_last``.

        Raises InvalidRequest with the template's own words when it refuses the messages.
        """
        if not messages:
            raise InvalidRequest("A chat needs at least one message.", field="messages")
        said = [{key: plain(item) for key, item in message.items() if item is not None} for message in messages]
        turns = [_with_reasoning(message) for message in said]
        if continue_last:
            turns[-1]["content"] = turns[-1].get("content", "") + TAG
        template = self._template(bool(variables.get("tools")))
        if variables.get("tools") and not self._reads_tools:
            raise NotSupported("The model's chat template has no place for tools.", field="tools",
                               remedy="Choose a model that was trained to call tools, or describe them in a message.")
        known = {**self._variables, "tools": None, "documents": None, "add_generation_prompt": not continue_last}
        known |= plain(variables)
        try:
            text = template.render(messages=turns, **known)
        except TEMPLATE_ERRORS as error:
            raise InvalidRequest(f"The model's chat template refuses these messages: {error}", field="messages",
                                 remedy="Check the order of the roles and what each message holds.") from error
        return _before_tag(text) if continue_last else text


def _before_tag(text: str) -> str:
    """What stands before the mark; where the template trimmed the mark's space, the message's goes as well."""
    place = text.rfind(TAG.strip())
    if place < 0:
        raise InvalidRequest("The model's chat template drops the last message, so it cannot be continued.",
                             field="continue_last")
    return text[:place] if text[place:place + len(TAG)] == TAG else text[:place].rstrip()
