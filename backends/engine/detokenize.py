"""Token ids to text, piece by piece, without ever emitting half a character.

Knows how each kind of tokenizer maps a token to bytes, and when bytes have become text. A stream's pieces joined are by
construction the text of the whole: `TextCodec.decode` is the same stream read to its end. Bytes that never become a
character come out as U+FFFD: for byte-level vocabularies one for each maximal invalid part, for byte-fallback ones one for
each byte, as their own decoders do. Bytes of a character that only was not finished when an answer was cut are left out: its
ids have them. Does not know of stop strings or of end tokens (`stops.py`, the loop).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any, Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
WINDOW = 8     # tokens of context that a decoder without a byte table gets in front of the new ones
LONGEST = 32   # tokens that may lack their last byte before they are given up as invalid


class Detokenizer(Protocol):
    """One answer's tokens turned into text. ``push`` returns what the token made certain; ``flush`` the rest, where ``cut``
    leaves out the beginning of a character; ``piece`` the bytes of one token of a text, whatever stands around it."""

    def push(self, token: int) -> str: ...
    def flush(self, cut: bool = False) -> str: ...
    def piece(self, token: int) -> bytes: ...


class Pieces(Protocol):
    """What a token is made of: its text where it is whole characters, else its bytes."""

    def __call__(self, token: int) -> str | bytes: ...


# ------------------------------------------------------------------------------------------- bytes to text
class Utf8Stream:
    """Bytes to characters as soon as these are complete. At most three bytes ever wait."""

    def __init__(self, per_byte: bool) -> None:
        self._per_byte = per_byte
        self._pending = b""

    def push(self, piece: str | bytes) -> str:
        if isinstance(piece, str):
            return self.flush() + piece if self._pending else piece
        return self._decode(self._pending + piece, final=False)

    def flush(self, cut: bool = False) -> str:
        """What waits can only be the beginning of a character."""
        return self._decode(b"" if cut else self._pending, final=True)

    def _decode(self, data: bytes, final: bool) -> str:
        out = []
        while data:
            try:
                out.append(data.decode())
                data = b""
            except UnicodeDecodeError as error:
                out.append(data[:error.start].decode())
                if not final and error.end == len(data) and error.reason == "unexpected end of data":
                    data = data[error.start:]
                    break
                out.append(REPLACEMENT * (error.end - error.start if self._per_byte else 1))
                data = data[error.end:]
        self._pending = data
        return "".join(out)


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings. O(length of the token) a push."""

    def __init__(self, pieces: Pieces, hidden: Collection[int], per_byte: bool, strip: int, strip_token: bool) -> None:
        self._pieces, self._hidden = pieces, hidden
        self._utf8 = Utf8Stream(per_byte)
        self._strip, self._strip_token = strip, strip_token   # leading spaces to drop: of the text, or all of a token

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        piece = self._pieces(token)
        if self._strip_token:
            self._strip_token = False
            return self._utf8.push(piece.replace(" ", "") if isinstance(piece, str) else piece)
        text = self._utf8.push(piece)
        return self._stripped(text) if self._strip and text else text

    def flush(self, cut: bool = False) -> str:
        text = self._utf8.flush(cut)
        return self._stripped(text) if self._strip and text else text

    def piece(self, token: int) -> bytes:
        found = b"" if token in self._hidden else self._pieces(token)
        return found.encode() if isinstance(found, str) else found

    def _stripped(self, text: str) -> str:
        count = 0
        while count < self._strip and count < len(text) and text[count] == " ":
            count += 1
        self._strip = 0 if count < len(text) else self._strip - count
        return text[count:]


class WindowDetokenizer:
    """For any other decoder: decodes a short window of tokens with and without the new ones and emits the difference."""

    def __init__(self, decode: Callable[[list[int]], str], hidden: Collection[int]) -> None:
        self._decode, self._hidden = decode, hidden
        self._context: list[int] = []
        self._fresh: list[int] = []

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._fresh.append(token)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._fresh) < LONGEST:
            return ""
        return self._commit(text)

    def flush(self, cut: bool = False) -> str:
        text = self._commit(self._new_text()) if self._fresh else ""
        return text.rstrip(REPLACEMENT) if cut else text

    def piece(self, token: int) -> bytes:
        return b"" if token in self._hidden else self._decode([token]).encode()

    def _new_text(self) -> str:
        before = self._decode(self._context) if self._context else ""
        whole = self._decode(self._context + self._fresh)
        return whole[len(before):] if whole.startswith(before) else self._decode(self._fresh)

    def _commit(self, text: str) -> str:
        self._context = (self._context + self._fresh)[-WINDOW:]
        self._fresh = []
        return text


# ------------------------------------------------------------------------------------------- tables
def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes with: printable ones stand for themselves, the rest from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _whole(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


class _Table:
    """Pieces made on first use and kept: a vocabulary of 256,000 costs nothing until it is spoken."""

    def __init__(self, tokenizer: Tokenizer, convert: Callable[[str], str | bytes]) -> None:
        self._tokenizer, self._convert = tokenizer, convert
        self._known: dict[int, str | bytes] = {}

    def __call__(self, token: int) -> str | bytes:
        piece = self._known.get(token)
        if piece is None:
            text = self._tokenizer.id_to_token(token)
            piece = self._known[token] = "" if text is None else self._convert(text)
        return piece


def _byte_level(text: str) -> str | bytes:
    try:
        return _whole(bytes(_ALPHABET[char] for char in text))
    except KeyError:      # an added token is not written in the alphabet
        return text


_ALPHABET = byte_alphabet()


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return [step for part in decoder["decoders"] for step in _steps(part)] if decoder["type"] == "Sequence" else [decoder]


def _fallback(replacements: list[tuple[str, str]], bytes_too: bool) -> Callable[[str], str | bytes]:
    def convert(text: str) -> str | bytes:
        for old, new in replacements:
            text = text.replace(old, new)
        if bytes_too and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return _whole(bytes([int(text[3:5], 16)]))
            except ValueError:
                return text
        return text
    return convert


def _understood(steps: list[dict[str, Any]]) -> tuple[list[tuple[str, str]], int] | None:
    """Replacements and leading spaces to strip of a sentencepiece-like decoder; None if a step is of another kind."""
    replacements, strip, fused = [], 0, False
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"] and not fused:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Strip" and fused and step["content"] == " " and not step["stop"]:
            strip += step["start"]
        elif kind == "Fuse":
            fused = True
        elif kind != "ByteFallback":
            return None
    return (replacements, strip) if fused else None


def detokenizers(tokenizer: Tokenizer, hidden: Collection[int]) -> Callable[[bool], Detokenizer]:
    """A maker of detokenizers for this tokenizer; ``hidden`` ids (special tokens) never show.

    Its argument says whether the text goes on from a prompt: then a leading space is part of it, where the tokenizer's
    own decoder would take the answer for the start of a text and drop it.
    """
    state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b"null"
    steps = _steps(json.loads(state))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        table = _Table(tokenizer, _byte_level)
        return lambda continued: ByteDetokenizer(table, hidden, False, 0, False)
    if kinds == ["Metaspace"]:
        table = _Table(tokenizer, _fallback([(steps[0]["replacement"], " ")], False))
        strips = steps[0].get("prepend_scheme", "always") != "never"
        return lambda continued: ByteDetokenizer(table, hidden, True, 0, strips and not continued)
    plan = _understood(steps)
    if plan is not None:
        replacements, strip = plan
        table = _Table(tokenizer, _fallback(replacements, "ByteFallback" in kinds))
        return lambda continued: ByteDetokenizer(table, hidden, True, 0 if continued else strip, False)
    return lambda continued: WindowDetokenizer(lambda ids: tokenizer.decode(ids, skip_special_tokens=False), hidden)
