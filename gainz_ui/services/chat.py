"""A chat as a value: its turns, what of it still fits the context, presets, export. Knows no page and no engine.

The page keeps a chat in the browser and hands it in with every step, so everything here is made from plain JSON and
checked when it enters.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from backends.base import ContextTooLong, InvalidRequest, Message, Sampling

Overflow = Literal["drop", "refuse"]
ROLES = ("user", "assistant")
FORMAT = "gainz-chat-1"
Count = Callable[[tuple[Message, ...]], int]


@dataclass(frozen=True)
class Turn:
    """One message. ``stats``: what the page shows of an answer, plain JSON; empty for questions."""

    role: str
    content: str
    stats: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidRequest(f"A turn's role is user or assistant, not {self.role!r}.", field="role")
        if not isinstance(self.content, str):
            raise InvalidRequest("A turn's content must be text.", field="content")


def fresh_id() -> str:
    return secrets.token_urlsafe(12)


@dataclass(frozen=True)
class Chat:
    """``start`` turns at the beginning no longer fit the context and are not sent."""

    id: str = field(default_factory=fresh_id)
    system: str = ""
    turns: tuple[Turn, ...] = ()
    start: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start <= len(self.turns):
            raise InvalidRequest("A chat cannot leave out more turns than it has.", field="start")

    @classmethod
    def of(cls, data: Mapping[str, Any] | None) -> Chat:
        """From the browser's JSON; nothing stored yet gives an empty chat, anything malformed is an InvalidRequest."""
        if not data:
            return cls()
        try:
            turns = tuple(Turn(t["role"], t["content"], t.get("stats") or {}) for t in data["turns"])
            return cls(str(data["id"]), str(data.get("system", "")), turns, int(data.get("start", 0)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRequest("The stored chat cannot be read.", field="chat", reason=error) from error

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def title(self) -> str:
        """The first question, in one short line."""
        first = next((t.content for t in self.turns if t.role == "user"), "")
        line = " ".join(first.split())
        return line if len(line) <= 48 else line[:47].rstrip() + "…"

    def say(self, role: str, content: str, stats: Mapping[str, Any] | None = None) -> Chat:
        return replace(self, turns=(*self.turns, Turn(role, content, stats or {})))

    def cut(self, length: int) -> Chat:
        """The first ``length`` turns."""
        return replace(self, turns=self.turns[:length], start=min(self.start, length))

    def until_question(self) -> Chat:
        """Up to the last question, its answer taken away: what is asked again."""
        last = max((i for i, t in enumerate(self.turns) if t.role == "user"), default=-1)
        return self.cut(last + 1)

    def edit(self, index: int, content: str) -> Chat:
        """A changed question ends the chat there, to be answered anew; a changed answer leaves the rest as it is."""
        if not 0 <= index < len(self.turns):
            raise InvalidRequest("There is no such turn.", field="index", index=index)
        turn = self.turns[index]
        if turn.role == "user":
            return self.cut(index).say("user", content)
        changed = replace(turn, content=content, stats={**turn.stats, "edited": True})
        return replace(self, turns=(*self.turns[:index], changed, *self.turns[index + 1:]))

    def sent(self, start: int | None = None) -> tuple[Message, ...]:
        """What the model gets: the system prompt and the turns from ``start`` on."""
        head = (Message("system", self.system),) if self.system.strip() else ()
        return head + tuple(Message(t.role, t.content) for t in self.turns[self.start if start is None else start:])


def answer_room(sampling: Sampling, context: int) -> int:
    """Tokens to keep free for the answer: what was asked for, else an eighth of the context."""
    return sampling.max_tokens if sampling.max_tokens is not None else max(1, context // 8)


def fit(chat: Chat, count: Count, context: int, room: int, overflow: Overflow) -> tuple[Chat, int]:
    """The chat with as many of the oldest turns left out as it takes, and its prompt's tokens.

    Where turns have to go, an eighth of the context is freed as well if it can be: dropping at every turn would change the
    beginning of the prompt each time, and with it lose the cached prefix. ContextTooLong where ``overflow`` is "refuse",
    or where the last question alone is too long.
    """
    prompt = count(chat.sent())
    if prompt + room <= context:
        return chat, prompt
    if overflow == "refuse":
        raise _too_long(
            prompt, room, context, "Start a new chat, let the oldest turns be dropped, or allow a shorter answer."
        )
    best: tuple[Chat, int] | None = None
    for start in (i for i, t in enumerate(chat.turns) if t.role == "user" and i > chat.start):
        shorter = replace(chat, start=start)
        prompt = count(shorter.sent())
        if prompt + room <= context:
            best = best or (shorter, prompt)
            if prompt + room + context // 8 <= context:
                return shorter, prompt
    if best is None:
        raise _too_long(
            prompt, room, context, "Shorten it, allow a shorter answer, or load the model with a larger context."
        )
    return best


def _too_long(prompt: int, room: int, context: int, remedy: str) -> ContextTooLong:
    return ContextTooLong("The chat and its answer do not fit the context.", field="max_tokens", remedy=remedy,
                          prompt_tokens=prompt, answer_tokens=room, context=context)


# ---------------------------------------------------------------------------------------------- presets
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "balanced": {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "max_tokens": 1024},
    "precise": {"temperature": 0.0, "max_tokens": 1024},
    "creative": {"temperature": 1.1, "top_p": 0.98, "min_p": 0.05, "max_tokens": 1024},
}


def preset_name(text: str) -> str:
    """A name that a person gave, trimmed; InvalidRequest for none, one too long, or one that is built in."""
    name = " ".join(text.split())
    if not 0 < len(name) <= 40:
        raise InvalidRequest("A preset's name has 1 to 40 characters.", field="preset")
    if name in PRESETS:
        raise InvalidRequest(f"{name!r} is built in; choose another name.", field="preset")
    return name


# ---------------------------------------------------------------------------------------------- export
def to_markdown(chat: Chat, names: Mapping[str, str]) -> str:
    """For people. ``names``: headings by role, system included."""
    parts = [f"# {chat.title or 'Gainz'}"]
    if chat.system.strip():
        parts.append(f"**{names['system']}**\n\n{chat.system}")
    for turn in chat.turns:
        parts.append(f"**{names[turn.role]}**\n\n{turn.content}")
        if turn.stats:
            parts.append(f"<sub>{_stats_line(turn.stats)}</sub>")
    return "\n\n".join(parts) + "\n"


def _stats_line(stats: Mapping[str, Any]) -> str:
    speed, ttft = stats.get("tokens_per_second"), stats.get("ttft_seconds")
    bits = [
        str(stats.get("model", "")),
        f"{stats['completion_tokens']} tokens" if stats.get("completion_tokens") is not None else "",
        f"{speed:.1f} tok/s" if speed else "",
        f"TTFT {ttft * 1000:.0f} ms" if ttft else "",
        str(stats.get("finish") or ""),
    ]
    return " · ".join(bit for bit in bits if bit)


def to_export(chat: Chat) -> str:
    """For programs: versioned JSON with every turn's figures, read back by `from_export`."""
    return json.dumps({"format": FORMAT, **chat.to_json()}, ensure_ascii=False, indent=1)


def from_export(text: str) -> Chat:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise InvalidRequest("This is no JSON.", field="chat", reason=error) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InvalidRequest(f"This is no chat exported by Gainz ({FORMAT}).", field="chat")
    return Chat.of(data)


def archive(chats: Sequence[Mapping[str, Any]], chat: Chat, keep: int = 30) -> list[Mapping[str, Any]]:
    """Earlier chats, newest first, with ``chat`` put in front if anything was said in it."""
    rest = [c for c in chats if c.get("id") != chat.id]
    return ([chat.to_json(), *rest] if chat.turns else rest)[:keep]
