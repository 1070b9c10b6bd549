"""Server-sent events: the standard's own rules, at every cut of the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from backends.base import RemoteFailed
from backends import sse
from backends.sse import Reader, Sent


def read(*pieces: bytes) -> list[Sent]:
    reader = Reader()
    return [sent for piece in pieces for sent in reader.push(piece)] + list(reader.flush())


@pytest.mark.parametrize("raw, data", [
    (b"data: a\n\ndata: b\n\n", ["a", "b"]), (b"data:a\n\n", ["a"]), (b"data:  a\n\n", [" a"]), (b"data: a\r\n\r\ndata: b\r\r", ["a", "b"]),
    (b"data: a\ndata: b\n\n", ["a\nb"]), (b": keep-alive\n\ndata: a\n\n", ["a"]), (b":\n:\n\n\n", []), (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
    (b"id: 7\nretry: 5\ndata: a\n\n", ["a"]), (b"data: a", ["a"]), (b"data: a\n", ["a"]), (b"data\n\n", [""]), (b"nonsense\n\n", []),
    (b"", []), (b"data: \xe2\x82\xac\xf0\x9f\x8e\x89\n\n", ["€🎉"]), (b"data: a\x85b\x0bc\n\n", ["a\ufffdb\x0bc"])])
def test_reads_what_the_standard_says(raw, data):
    for cuts in ([raw], [raw[i:i + 1] for i in range(len(raw))], [raw[i:i + 2] for i in range(0, len(raw), 2)]):
        assert [sent.data for sent in read(*cuts)] == data


def test_errors_have_a_kind():
    assert read(b"event: error\ndata: x\n\n", b"error: {}\n\n", b"data: y\n\n") == [Sent("error", "x"), Sent("error", "{}"), Sent("", "y")]


@given(st.lists(st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=("Cs",)), min_size=1), max_size=6), st.randoms())
def test_any_cut_gives_the_same(texts, chance):
    raw = b"".join(b"data: " + text.encode() + b"\r\n\r\n" for text in texts)
    places = sorted(chance.choices(range(len(raw) + 1), k=5))
    pieces = [raw[a:b] for a, b in zip([0, *places], [*places, len(raw)])]
    assert [sent.data for sent in read(*pieces)] == texts


def test_what_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr(sse, "LONGEST", 100)
    with pytest.raises(RemoteFailed, match="without an end"):
        read(b"data: " + b"x" * 200)
    with pytest.raises(RemoteFailed, match="without an end"):
        read(*[b"data: 0123456789\n"] * 20)
