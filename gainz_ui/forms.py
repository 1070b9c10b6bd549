"""Options dataclass ↔ widgets: the only place where they meet.

A widget is made from a field's type, default and metadata (``label``, ``help``, ``choices``, ``low``, ``high``,
``advanced``), so a knob that is added to a dataclass shows up on the page by itself. Values from widgets go back through
the dataclass's own checks. Knows no particular options class; `HINTS` says only how some well-known names like to look.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Any

import gradio as gr

from backends.base import InvalidRequest
from gainz_ui.i18n import option_label

Read = Callable[[Any], Any]


@dataclass(frozen=True)
class Hint:
    """A comfortable range for a slider, inside what the dataclass allows."""

    low: float
    high: float
    step: float


HINTS: Mapping[str, Hint] = {
    "temperature": Hint(0, 2, 0.05), "top_k": Hint(0, 200, 1), "top_p": Hint(0, 1, 0.01), "min_p": Hint(0, 1, 0.01),
    "repetition_penalty": Hint(0.5, 2, 0.01), "frequency_penalty": Hint(-2, 2, 0.05), "presence_penalty": Hint(-2, 2, 0.05),
}


@dataclass(frozen=True)
class Knob:
    """One field and its widget. ``read`` turns the widget's value into the field's, ``show`` the other way."""

    name: str
    widget: Any
    read: Read
    show: Read
    default: Any


class Form:
    """Widgets for a dataclass, made where the constructor is called inside a layout. ``skip`` fields have none, those in
    ``advanced`` (or with ``advanced`` metadata) stand in the folded part, ``title``; ``defaults``: what they show at
    first, where that is not the class's own default."""

    def __init__(self, cls: type, *, skip: Collection[str] = (), advanced: Collection[str] = (), title: Any = "",
                 defaults: Mapping[str, Any] | None = None, prefix: str = "option") -> None:
        self.cls = cls
        kinds = typing.get_type_hints(cls)
        shown = [item for item in fields(cls) if item.name not in skip and item.init]
        folded = [item for item in shown if item.name in advanced or item.metadata.get("advanced")]
        made: dict[str, Knob] = {}
        defaults = defaults or {}

        def add(items: Sequence[Field]) -> None:
            for item in items:
                first = defaults.get(item.name, _default(item))
                made[item.name] = replace(
                    _knob(item, kinds[item.name], first, f"{prefix}-{item.name}"), default=_default(item)
                )

        add([item for item in shown if item not in folded])
        if folded:
            with gr.Accordion(title, open=False, elem_classes="gz-fold"):
                add(folded)
        self.knobs = [made[item.name] for item in shown]

    @property
    def widgets(self) -> list[Any]:
        """In the order in which `read` takes their values."""
        return [knob.widget for knob in self.knobs]

    def read(self, values: Sequence[Any]) -> dict[str, Any]:
        """Field values of the widgets' values; InvalidRequest naming the field where a text is no such value."""
        if len(values) != len(self.knobs):
            raise InvalidRequest("The form's values do not match its fields.", expected=len(self.knobs), found=len(values))
        out = {}
        for knob, value in zip(self.knobs, values, strict=True):
            try:
                out[knob.name] = knob.read(value)
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"{knob.name}: {value!r} is not understood.", field=knob.name, reason=error) from error
        return out

    def make(self, values: Sequence[Any]) -> Any:
        """The dataclass itself, checked by its own rules."""
        return self.cls(**self.read(values))

    def write(self, values: Mapping[str, Any]) -> list[Any]:
        """Updates for all widgets: given fields take the given value, others the class's default."""
        known = {knob.name for knob in self.knobs}
        for name in values:
            if name not in known:
                raise InvalidRequest(
                    f"Unknown option {name!r}.", field=name, remedy=f"Known options: {', '.join(sorted(known))}."
                )
        return [knob.show(values.get(knob.name, knob.default)) for knob in self.knobs]


def _default(item: Field) -> Any:
    if item.default is not MISSING:
        return item.default
    return item.default_factory() if item.default_factory is not MISSING else None


# ---------------------------------------------------------------------------------------------- one widget
def _knob(item: Field, kind: Any, default: Any, elem_id: str) -> Knob:
    meta = item.metadata
    common = {"label": option_label(None, item.name, meta.get("label", item.name.replace("_", " "))),
              "info": _info(item), "elem_id": elem_id}
    for matches, make in _MAKERS:
        if matches(item, kind):
            widget, read, show = make(item, kind, default, common)
            return Knob(item.name, widget, read, show, default)
    raise TypeError(f"no widget for {item.name}: {kind}")


def _info(item: Field) -> Any:
    from gainz_ui.i18n import T, has
    key = f"help_{item.name}"
    return T(key) if has(key) else item.metadata.get("help")


def _same(value: Any) -> Any:
    return value


def _choice(item: Field, kind: Any, default: Any, common: dict) -> tuple:
    choices = list(item.metadata["choices"])
    return gr.Dropdown(choices, value=default, **common), _same, _same


def _flag(item: Field, kind: Any, default: Any, common: dict) -> tuple:
    return gr.Checkbox(value=default, **common), _strict_bool, _same


def _slider(item: Field, kind: Any, default: Any, common: dict) -> tuple:
    hint = HINTS[item.name]
    read = _whole if kind is int else float
    return gr.Slider(hint.low, hint.high, value=default, step=hint.step, **common), read, _same


def _number(item: Field, kind: Any, default: Any, common: dict) -> tuple:
    whole = kind is int
    box = gr.Number(value=default, precision=0 if whole else None, minimum=item.metadata.get("low"),
                    maximum=item.metadata.get("high"), **common)
    return box, _whole if whole else float, _same


def _optional(item: Field, kind: Any, default: Any, common: dict) -> tuple:
    """A number that may be absent: a text, since a browser's number holds no 64-bit seed."""
    inner = next(part for part in typing.get_args(kind) if part is not type(None))
    read = lambda text: None if not str(text if text is not None else "").strip() else inner(str(text).strip())  # noqa: E731
    show = lambda value: "" if value is None else str(value)                                                     # noqa: E731
    from gainz_ui.i18n import T
    return gr.Textbox(value=show(default), placeholder=T("form_none"), **common), read, show


def _texts(item: Field, kind: Any, default: Any, common: dict) -> tuple:
    show = lambda value: "\n".join(_escape(text) for text in value)                          # noqa: E731
    read = lambda text: tuple(_unescape(line) for line in (text or "").split("\n") if line)  # noqa: E731
    return gr.Textbox(value=show(default), lines=2, **common), read, show


def _whole_list(item: Field, kind: Any, default: Any, common: dict) -> tuple:
    show = lambda value: ", ".join(str(number) for number in value)                                          # noqa: E731
    read = lambda text: tuple(int(part) for part in (text or "").replace(",", " ").split())                  # noqa: E731
    return gr.Textbox(value=show(default), **common), read, show


def _pairs(item: Field, kind: Any, default: Any, common: dict) -> tuple:
    """(token id, number) a line: ``198: -5``."""
    show = lambda value: "\n".join(f"{key}: {number:g}" for key, number in value)            # noqa: E731
    return gr.Textbox(value=show(default), lines=2, **common), _read_pairs, show


def _plain(item: Field, kind: Any, default: Any, common: dict) -> tuple:
    return gr.Textbox(value=default or "", **common), str, _same


def _is_optional_number(item: Field, kind: Any) -> bool:
    return set(typing.get_args(kind)) in ({int, type(None)}, {float, type(None)})


_MAKERS: Sequence[tuple[Callable[[Field, Any], bool], Callable]] = (
    (lambda item, kind: "choices" in item.metadata, _choice),
    (lambda item, kind: kind is bool, _flag),
    (lambda item, kind: item.name in HINTS and kind in (int, float), _slider),
    (lambda item, kind: kind in (int, float), _number),
    (_is_optional_number, _optional),
    (lambda item, kind: kind == tuple[str, ...], _texts),
    (lambda item, kind: kind == tuple[int, ...], _whole_list),
    (lambda item, kind: kind == tuple[tuple[int, float], ...], _pairs),
    (lambda item, kind: kind is str, _plain),
)


# ---------------------------------------------------------------------------------------------- texts and values
def _strict_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def _whole(value: Any) -> int:
    if value is None or float(value) != int(value):
        raise ValueError("not a whole number")
    return int(value)


def _read_pairs(text: str | None) -> tuple[tuple[int, float], ...]:
    out = []
    for line in (text or "").splitlines():
        if line.strip():
            key, _, number = line.partition(":")
            out.append((int(key), float(number)))
    return tuple(out)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")


def _unescape(text: str) -> str:
    """``\\n``, ``\\t``, ``\\r`` and ``\\\\`` in a one-line field mean the characters themselves."""
    signs, out, rest = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}, [], iter(text)
    for sign in rest:
        if sign == "\\":
            follow = next(rest, "")
            sign = signs.get(follow, "\\" + follow)
        out.append(sign)
    return "".join(out)
