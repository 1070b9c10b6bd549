"""Answers that are JSON of a given schema: which tokens of one vocabulary may stand at the next place.

Knows the library that turns a schema into masks (llguidance; imported when first asked for) and one model's tokens as bytes.
Refuses to know logits, drafts and batches: the mask belongs to a place of a text, so it is the same whatever else is computed.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from backends.base import Vocab
from backends.engine.text import TextCodec
from backends.errors import InvalidRequest, NotSupported, StepFailed

LIBRARY, FIELD = "llguidance", "response_format"
SPACES = r"[ \n\r\t]{1,24}"      # between two parts of a JSON text; without a bound a small model can indent for ever


class Constraint:
    """One answer's place in the grammar. Follows the tokens that were accepted, never those that were only drafted."""

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher, self._size = matcher, size
        self._bits = np.zeros((size + 31) // 32, np.int32)

    def twin(self) -> Constraint:
        """Another answer's place, where this one stands now."""
        return Constraint(self._matcher.deep_copy(), self._size)

    def allowed(self) -> np.ndarray:
        """bool [vocabulary]: what may come next; the end tokens where the text may end. StepFailed at a limit of the library."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        return np.unpackbits(self._bits.view(np.uint8), count=self._size, bitorder="little").view(bool)

    def accept(self, token: int) -> None:
        """Go on by a token that was allowed."""
        self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """Nothing but the end may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def possible(self, draft: Sequence[int]) -> int:
        """How many leading tokens of a draft the grammar takes: the rest would be computed for nothing."""
        return self._matcher.validate_tokens(list(draft)) if len(draft) else 0

    def _check(self) -> None:
        if self._matcher.is_error():
            raise StepFailed("The answer's schema became too much to follow.", reason=self._matcher.get_error()[:300],
                             remedy="Use a simpler schema: fewer alternatives, shorter patterns.")


@dataclass(frozen=True)
class _Tokens:
    """One vocabulary in the shape that the library asks for."""

    codec: TextCodec
    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None

    def __call__(self, text: str | bytes) -> list[int]:
        return self.codec.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"), special=False)


class Grammars:
    """Constraints over one model's vocabulary. Building its table takes 0.1 to 0.5 s, once, when a schema first comes."""

    def __init__(self, codec: TextCodec, vocab: Vocab) -> None:
        self._codec, self._vocab = codec, vocab

    def constraint(self, schema: str) -> Constraint:
        """For one answer. NotSupported without the library; InvalidRequest names what of the schema cannot be followed."""
        library, table = self._library, self._table
        try:
            grammar = library.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": SPACES})
        except ValueError as error:
            raise InvalidRequest("The schema cannot be read.", field=FIELD, reason=str(error)[:300]) from error
        limits = library.LLParserLimits(verbose_errors=False)
        matcher = library.LLMatcher(table, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()                   # some schemas, as one that is nothing but itself, fail only at a first token
        if matcher.is_error():
            why = " ".join(matcher.get_error().split())[:300]
            raise InvalidRequest(f"The schema cannot be followed: {why}.", field=FIELD,
                                 remedy="Leave out or replace the keyword that the message names.")
        return Constraint(matcher, self._vocab.size)

    @cached_property
    def _library(self) -> Any:
        try:
            return importlib.import_module(LIBRARY)
        except ImportError as error:
            raise NotSupported(f"Answers by a schema need the package {LIBRARY}, which is not installed.", field=FIELD,
                               remedy=f"pip install {LIBRARY}, then start Gainz again.") from error

    @cached_property
    def _table(self) -> Any:
        vocab, codec = self._vocab, self._codec
        if not vocab.eos_ids:
            raise NotSupported("This model has no end token, so an answer by a schema could not end.", field=FIELD)
        pieces = [codec.token_bytes(token) for token in range(vocab.size)]
        special = sorted(token for token in range(vocab.size) if token in codec.special_ids or not pieces[token])
        ends = sorted(vocab.eos_ids)
        wrapped = self._library.TokenizerWrapper(_Tokens(codec, pieces, special, ends[0], codec.bos_id))
        return self._library.LLTokenizer(wrapped, n_vocab=vocab.size, eos_token=ends)
