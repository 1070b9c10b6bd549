"""A tokenizer that exists only in Python (CTRL, XLM, BioGPT …), behind those methods of `tokenizers.Tokenizer` that we use.

Knows transformers' slow tokenizers. Its text is streamed through a window of tokens, since there is no table of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Encoding:
    ids: list[int]


@dataclass(frozen=True)
class Added:
    content: str
    special: bool


class ForeignTokenizer:
    """``made``: a transformers tokenizer without a fast backend."""

    decoder = None

    def __init__(self, made: Any) -> None:
        self._made = made

    def no_truncation(self) -> None:
        """Never truncates: nothing to switch off."""

    def no_padding(self) -> None:
        """Never pads: nothing to switch off."""

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        return Encoding(list(self._made.encode(text, add_special_tokens=add_special_tokens)))

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._made.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def id_to_token(self, id: int) -> str | None:
        return self._made.convert_ids_to_tokens(id)

    def token_to_id(self, token: str) -> int | None:
        return self._made.get_vocab().get(token)

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        return self._made.get_vocab()

    def get_added_tokens_decoder(self) -> dict[int, Added]:
        return {id: Added(self._made.convert_ids_to_tokens(id), True) for id in self._made.all_special_ids}
