"""Server-sent events from bytes, as the HTML standard reads them: any cut of the bytes, three kinds of line ends, comments, a BOM.

Bytes become text only line by line, so a character that is split over two reads is whole again. Knows no JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backends.errors import RemoteFailed

LONGEST = 32 << 20                      # bytes of one event: whoever sends more is not talking to us


@dataclass(frozen=True)
class Sent:
    """One event. ``kind``: its ``event`` field, "error" for the ``error`` lines of older servers; "" = a message."""

    kind: str
    data: str


class Reader:
    """`push` bytes as they come, `flush` at their end: some servers leave out the last empty line."""

    def __init__(self) -> None:
        self._rest, self._started, self._after_cr = bytearray(), False, False
        self._data: list[str] = []
        self._kind, self._size = "", 0

    def push(self, piece: bytes) -> Iterator[Sent]:
        if self._after_cr and piece:        # the \n of a \r\n that was cut between the two
            piece, self._after_cr = piece.removeprefix(b"\n"), False
        self._rest += piece
        if len(self._rest) > LONGEST:
            raise RemoteFailed("The server sends a line without an end.", bytes=len(self._rest))
        for line in self._lines():
            if (made := self._line(line)) is not None:
                yield made

    def _lines(self) -> Iterator[bytes]:
        """Complete lines. Splitting is done once for all of them: a long answer is not copied line by line."""
        if b"\n" not in self._rest and b"\r" not in self._rest:
            return
        lines = self._rest.splitlines(keepends=True)        # bytes are split at \n, \r and \r\n only
        self._rest = bytearray() if lines[-1].endswith((b"\n", b"\r")) else bytearray(lines.pop())
        self._after_cr = bool(lines) and lines[-1].endswith(b"\r") and not self._rest
        for line in lines:
            yield bytes(line).rstrip(b"\r\n") if line.endswith((b"\n", b"\r")) else bytes(line)

    def _line(self, raw: bytes) -> Sent | None:
        text = raw.decode("utf-8", "replace")
        if not self._started:
            text, self._started = text.removeprefix("\ufeff"), True
        if not text:
            return self._event()
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if name in ("data", "error"):
            self._data.append(value)
            self._size += len(value)
            if self._size > LONGEST:
                raise RemoteFailed("The server sends an event without an end.", characters=self._size)
        if name in ("event", "error"):
            self._kind = value if name == "event" else "error"
        return None                         # a comment (no name before its colon), an id, a retry: nothing that concerns us

    def _event(self) -> Sent | None:
        made = Sent(self._kind, "\n".join(self._data)) if self._data else None
        self._data, self._kind, self._size = [], "", 0
        return made

    def flush(self) -> Iterator[Sent]:
        rest, self._rest = bytes(self._rest), bytearray()
        for line in (rest, b"") if rest else (b"",):
            if (made := self._line(line)) is not None:
                yield made

