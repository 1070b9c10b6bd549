"""What pydantic found wrong with a body, in our words: which field, what it must be, and what was probably meant. Pure; the only place
that knows the kinds of its faults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from backends.base import InvalidRequest
from gainz_ui.services.meant import meant

Fault = Mapping[str, Any]
WHAT = {"string_type": "a text", "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
        "bool_type": "true or false", "list_type": "a list", "dict_type": "an object", "model_type": "an object",
        "model_attributes_type": "an object", "none_required": "null"}
KINDS = ((bool, "true or false"), (str, "a text"), (int | float, "a number"), (list, "a list"), (dict, "an object"))
BOUNDS = {"too_short": ("min_length", "at least {} entries"), "too_long": ("max_length", "at most {} entries"),
          "string_too_short": ("min_length", "at least {} characters"), "string_too_long": ("max_length", "at most {} characters")}
MEDIA = {"image_url": "Images", "image": "Images", "input_image": "Images", "input_audio": "Sounds", "audio": "Sounds",
         "audio_url": "Sounds", "video_url": "Videos", "video": "Videos", "file": "Files", "input_file": "Files"}
QUOTED = 40                             # signs of a value that is shown


@dataclass(frozen=True)
class Told:
    """``field``: its whole path, "draft.length"; empty: the body itself."""

    message: str
    remedy: str
    field: str


def told(faults: Sequence[Fault], body: Any) -> Told:
    """About the first field that is wrong. ``body``: the annotation of what was expected."""
    fault = _deepest(faults)
    path = _path(fault)
    field = ".".join(path)
    if not path:
        return Told("The body must be a JSON object, sent as Content-Type: application/json.",
                    "With curl: -H 'Content-Type: application/json' -d '{\"prompt\": \"Hello\"}'", field)
    if fault["type"] == "extra_forbidden":
        return _unknown(path, meant(path[-1], _names(body, fault["loc"][:-1])))
    if fault["type"] == "literal_error" and ".content." in field and (media := MEDIA.get(str(fault["input"]))):
        return Told(f"{field.removesuffix('.type')}: {media} are not understood by this server, which reads texts only.",
                    'Leave that part out; a text is {"type": "text", "text": "…"}.', field)
    return Told(_wrong(field, [one for one in faults if _path(one) == path], fault), InvalidRequest.advice, field)


def _unknown(path: Sequence[str], guess: str | None) -> Told:
    field = ".".join(path)
    probably = f"; {'.'.join((*path[:-1], guess))} was probably meant" if guess else ""
    return Told(f"Unknown field {field!r}{probably}.",
                f"{'Rename' if guess else 'Remove'} it: a field that is not known is refused, never ignored.", field)


def _wrong(field: str, same: Sequence[Fault], fault: Fault) -> str:
    """``same``: one for each kind of value that would have done."""
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "missing":
        return f"{field} is missing."
    if kind in BOUNDS:
        name, words = BOUNDS[kind]
        return f"{field} must have {words.format(context[name])}." if (name, context[name]) != ("min_length", 1) else f"{field} is empty."
    wanted = list(dict.fromkeys(filter(None, map(_wanted, same))))
    return f"{field} must be {' or '.join(wanted)}, not {_given(fault['input'])}." if wanted else f"{field}: {fault['msg']}."


def _wanted(fault: Fault) -> str | None:
    if fault["type"] == "literal_error":
        return fault["ctx"]["expected"].replace("False", "false").replace("True", "true")
    return WHAT.get(fault["type"])


def _given(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str | int | float) and len(shown := repr(value)) <= QUOTED:
        return shown
    return next((words for kind, words in KINDS if isinstance(value, kind)), "that")


# ---------------------------------------------------------------------------------------------- where
def _deepest(faults: Sequence[Fault]) -> Fault:
    """Of the first field that is wrong: of its alternatives, the one that came furthest is what was meant."""
    def far(fault: Fault) -> tuple:
        return len(fault["loc"]), [part for part in fault["loc"] if isinstance(part, int)]
    return max((fault for fault in faults if fault["loc"][:2] == faults[0]["loc"][:2]), key=far)


def _path(fault: Fault) -> list[str]:
    """The field and all that is above it; [] for the body itself."""
    *above, last = fault["loc"]
    named = fault["type"] in ("extra_forbidden", "missing")             # whatever it is called, it is one
    parts = [part for part in above if not _is_branch(part)] + [last] * (named or not _is_branch(last))
    return [str(part) for part in parts[parts[:1] in (["body"], ["query"], ["path"]):]]


def _is_branch(part: Any) -> bool:
    """Pydantic's name for one alternative of a union, which is no field."""
    return isinstance(part, str) and (part[:1].isupper() or "[" in part or part in ("str", "int", "float", "bool", "none"))


def _names(body: Any, above: Sequence[Any]) -> set[str]:
    """The fields that the object at ``above`` has."""
    model = _object(body)
    for part in above:
        if model is not None and (field := _fields(model).get(part)) is not None:
            model = _object(field.annotation)
    return set(_fields(model)) if model is not None else set()


def _fields(model: type[BaseModel]) -> dict[Any, Any]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _object(annotation: Any) -> type[BaseModel] | None:
    """The object among what may stand there: none of ours allows two."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_object, get_args(annotation))), None)
