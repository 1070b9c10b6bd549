"""What is asked in a benchmark: the bundled workloads in English and 中文, and a person's own prompts from a file.

Long texts in English are windows of the bundled evaluation text. Knows prompts; nothing of models or of tokens.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import backends
from backends.base import InvalidRequest, Message

KINDS = ("prose", "code", "edit", "summary", "second", "depth", "ladder")
LANGUAGES, SIZES, LENGTHS = ("en", "zh"), ("short", "long"), (64, 512)
PROMPTS = Path(__file__).parent / "data" / "prompts.json"
TEXT = Path(backends.__file__).parent / "data" / "evaluation.txt.gz"
ASKED = ("prose", "code", "second")            # questions of our own; the others are about a text
COUNT = 32                                     # prompts of a workload: a unit of the statistics each
PASSAGE, DEPTH = 1600, 16_000                  # characters of a passage; of a text of about 4,000 tokens
RUNGS = 5                                      # lengths of a ladder, each half of the one before
MOST_BYTES = 16 << 20                          # of a file of own prompts
READABLE = "Name a file that is there and that you may read."


@dataclass(frozen=True)
class Workload:
    """``prompts``: each the turns of a chat. ``tokens``: of every answer, exactly."""

    name: str
    prompts: tuple[tuple[Message, ...], ...]
    tokens: int


def bundled(kind: str, language: str = "en", size: str = "short", tokens: int = 64) -> Workload:
    """``size`` "long": the same questions after a passage of text. InvalidRequest names what there is."""
    _known("workload", kind, KINDS)
    _known("language", language, LANGUAGES)
    _known("size", size, SIZES)
    _check_tokens(tokens)
    turns = _MAKERS[kind](language)
    if size == "long" and kind in ASKED:
        lead = _data()["context"][language]
        turns = [(f"{lead}\n\n{passage}\n\n{first}", *rest) for passage, (first, *rest) in zip(_passages(language), turns)]
    return Workload("-".join((kind, language, size, str(tokens))), tuple(_chat(turn) for turn in turns), tokens)


def from_name(name: str) -> Workload:
    """"code", "code-zh", "code-zh-long", "code-zh-long-512": parts left out have their usual value."""
    kind, *rest = name.split("-")
    wrong = InvalidRequest(f"There is no workload {name!r}.", field="workload",
                           remedy=f"One of {', '.join(KINDS)}, with -en or -zh, -short or -long, and a number of tokens after it.")
    given: dict[str, Any] = {}
    for part in rest:
        key = ("language" if part in LANGUAGES else "size" if part in SIZES else "tokens" if part.isdecimal() else None)
        if key is None or key in given:
            raise wrong
        given[key] = int(part) if key == "tokens" else part
    if kind not in KINDS:
        raise wrong
    return bundled(kind, **given)


def from_file(path: Path, tokens: int) -> Workload:
    """One prompt a line: plain text, or JSON: a string, {"prompt": …} or {"messages": [{"role", "content"}, …]}. Empty lines are
    none. InvalidRequest names the line."""
    _check_tokens(tokens)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InvalidRequest(f"{path.name} is larger than {MOST_BYTES >> 20} MiB.", field="workload")
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError as error:
        raise InvalidRequest(f"There is no file {path.absolute()}.", field="workload", remedy=READABLE) from error
    except OSError as error:
        raise InvalidRequest(f"{path.absolute()} cannot be read.", field="workload", reason=error.strerror,
                             remedy=READABLE) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path.name} cannot be read as UTF-8 text.", field="workload", reason=error) from error
    prompts = tuple(_line(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip())
    if not prompts:
        raise InvalidRequest(f"There is no prompt in {path.name}.", field="workload", remedy="Write one prompt a line.")
    return Workload(path.name, prompts, tokens)


# ---------------------------------------------------------------------------------------------- pieces
def _line(number: int, line: str) -> tuple[Message, ...]:
    if line[0] not in '{"':
        return _chat((line,))
    try:
        said = json.loads(line)
        if isinstance(said, str):
            return _chat((said,))
        if "messages" in said:
            return tuple(Message(turn["role"], turn["content"]) for turn in said["messages"])
        return _chat((said["prompt"],))
    except (ValueError, KeyError, TypeError, InvalidRequest, RecursionError) as error:
        raise InvalidRequest(f'Line {number} is neither text nor {{"prompt": …}} nor {{"messages": […]}}.', field="workload",
                             line=number, reason=f"{type(error).__name__}: {error}") from error


def _chat(turns: Sequence[str]) -> tuple[Message, ...]:
    return tuple(Message("assistant" if index % 2 else "user", text) for index, text in enumerate(turns))


def _known(field: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise InvalidRequest(f"{field} must be one of {', '.join(known)}.", field=field, **{field: value})


def _check_tokens(tokens: int) -> None:
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 2 <= tokens <= 65_536:
        raise InvalidRequest("An answer that is timed has 2 to 65536 tokens.", field="tokens", tokens=tokens)


@cache
def _data() -> dict[str, Any]:
    return json.loads(PROMPTS.read_text(encoding="utf-8"))


@cache
def _text() -> str:
    return gzip.decompress(TEXT.read_bytes()).decode("utf-8")


def _windows(length: int) -> list[str]:
    """Pieces spread evenly over the text, which may overlap where they are long."""
    text = _text()
    return [text[(len(text) - length) * i // (COUNT - 1):][:length] for i in range(COUNT)]


def _passages(language: str) -> list[str]:
    """In 中文 there are fewer passages: from the second round on each is followed by another one."""
    if language == "en":
        return _windows(PASSAGE)
    known = _data()["passages_zh"]
    return [known[i % len(known)] + (known[(i + i // len(known)) % len(known)] if i >= len(known) else "") for i in range(COUNT)]


def _deep(language: str) -> list[str]:
    """About 4,000 tokens each; in 中文 the passages again and again, in ever another order."""
    if language == "en":
        return _windows(DEPTH)
    known = _passages(language)
    return ["".join(known[start:] + known[:start])[:DEPTH // 4] for start in range(COUNT)]


def _ladder(language: str) -> list[str]:
    """Texts of `RUNGS` lengths by turns, from short to deep: speed against the length of the context."""
    return [text[:len(text) >> (RUNGS - 1 - number % RUNGS)] for number, text in enumerate(_deep(language))]


def _asked(kind: str) -> Callable[[str], list[tuple[str, ...]]]:
    """Every question in every manner; all questions once before the first comes again."""
    def make(language: str) -> list[tuple[str, ...]]:
        made = [turn if isinstance(turn, list) else [turn] for turn in _data()[kind][language]]
        return [(*turn[:-1], turn[-1] + manner) for manner in _data()["manners"][kind][language] for turn in made]
    return make


def _about(lead: str, passages: Callable[[str], Sequence[str]]) -> Callable[[str], list[tuple[str, ...]]]:
    return lambda language: [(f"{_data()[lead][language]}\n\n{passage}",) for passage in passages(language)]


_MAKERS: dict[str, Callable[[str], list[tuple[str, ...]]]] = {
    **{kind: _asked(kind) for kind in ASKED},
    "edit": _about("edit", _passages), "summary": _about("summary", _passages), "depth": _about("depth", _deep),
    "ladder": _about("depth", _ladder)}
