"""Texts and chats to token ids and back: one model's tokenizer, chat template and end ids.

Knows the files of a tokenizer folder. Does not know of sampling, stop strings or the loop. ``tokenizer.json`` is read
directly; transformers is imported only for folders that hold nothing but a sentencepiece or tiktoken file.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from backends.base import Message, Vocab, read_json
from backends.characters import check_characters
from backends.engine.detokenize import Detokenizer, detokenizers
from backends.engine.foreign_tokenizer import ForeignTokenizer
from backends.engine.template import ChatTemplate
from backends.errors import BrokenFile, LoadError, NoChatTemplate

MOST_IDS = 1 << 24               # a list by id is made of them
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextCodec:
    """``add_bos`` None: as the tokenizer's own post-processor does; ``special_ids`` None: the added tokens so marked."""

    def __init__(self, tokenizer: Tokenizer | ForeignTokenizer, *, template: str | Mapping[str, str] | None = None,
                 bos_id: int | None = None, eos_ids: Iterable[int] = (), special_ids: Collection[int] | None = None,
                 vocab_size: int | None = None, add_bos: bool | None = None, variables: Mapping[str, Any] = {},
                 tokens: Sequence[str] | None = None) -> None:
        """``vocab_size``: real ids, 0 … size - 1 (None: the tokenizer's); ``variables``: the template's bos_token …;
        ``tokens``: the vocabulary by id, for a caller who has it: asking the tokenizer takes as long as reading a layer."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.bos_id = bos_id
        self.add_bos = add_bos
        self.eos_ids = frozenset(eos_ids)
        self.template = ChatTemplate(template, variables) if template else None
        self.names = dict(variables)
        if special_ids is None:
            special_ids = [id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
        self.special_ids = frozenset(special_ids)
        self._size, self._tokens = vocab_size, tokens
        self._stream = detokenizers(tokenizer, self.special_ids)

    @cached_property
    def vocab(self) -> Vocab:
        known = self._tokens if self._tokens is not None else by_id(self._tokenizer.get_vocab(with_added_tokens=True))
        size = self._size if self._size is not None else len(known)
        return Vocab(size, frozenset(id for id in self.eos_ids if 0 <= id < size), fingerprint(known[:size]))

    @property
    def tokenizer(self) -> Tokenizer:
        """The library's own object, for whoever writes this tokenizer into another folder."""
        return self._tokenizer

    # --------------------------------------------------------------------------------------- to ids
    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a raw text; with ``special`` as the model wants a text to begin, but never with two BOS."""
        if self.add_bos is None:
            ids = self._ids(text, special)
        else:
            ids = self._ids(text, False)
            if special and self.add_bos and self.bos_id is not None:
                ids.insert(0, self.bos_id)
        if special and self.bos_id is not None:
            while ids[:2] == [self.bos_id, self.bos_id]:
                del ids[0]
        return ids

    def chat_text(self, messages: Sequence[Message], *, continue_last: bool = False, **variables: Any) -> str:
        """The prompt that the template makes. Raises NoChatTemplate, InvalidRequest."""
        if self.template is None:
            raise NoChatTemplate("This model has no chat template, so it cannot tell who speaks.")
        return self.template.render([_fields(message) for message in messages], continue_last=continue_last, **variables)

    def chat(self, messages: Sequence[Message], *, continue_last: bool = False, **variables: Any) -> list[int]:
        """Ids of a chat. The template writes BOS itself where the model wants it: nothing is added to its text."""
        return self._ids(self.chat_text(messages, continue_last=continue_last, **variables), False)

    def _ids(self, text: str, special: bool) -> list[int]:
        return self._tokenizer.encode(check_characters("prompt", text), add_special_tokens=special).ids

    # --------------------------------------------------------------------------------------- to text
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens skipped: the same as their stream, joined."""
        stream = self.stream()
        return "".join([stream.push(id) for id in ids]) + stream.flush()

    def token_text(self, id: int) -> str:
        """One token for people: its text, its name where it is special, U+FFFD where it is a part of a character."""
        if id in self.special_ids:
            return self._tokenizer.id_to_token(id) or ""
        stream = self._stream(True)
        return stream.push(id) + stream.flush()

    def token_bytes(self, id: int) -> bytes:
        """What one token adds to a text; nothing where it is special."""
        return self._stream(True).piece(id)

    def stream(self, continued: bool = False) -> Detokenizer:
        """A detokenizer for one answer; ``continued``: the answer goes on from a text, so a leading space belongs to it."""
        return self._stream(continued)

    # --------------------------------------------------------------------------------------- from disk
    @staticmethod
    def from_folder(path: str | Path) -> TextCodec:
        """Raises BrokenFile for damaged files, LoadError where there is no tokenizer.

        Whether a text begins with BOS says tokenizer.json; ``add_bos_token`` beside it is ignored, as in transformers.
        """
        folder = Path(path)
        config = read_json(folder / "tokenizer_config.json")
        tokenizer = _read_tokenizer(folder)
        names = _special_names(config, read_json(folder / "special_tokens_map.json"))
        ids = {name: tokenizer.token_to_id(text) for name, text in names.items()}
        eos = _end_ids(folder) | ({ids["eos_token"]} if ids.get("eos_token") is not None else set())
        bos = ids.get("bos_token")
        if bos is None and "bos_token" not in config:
            bos = read_json(folder / "config.json").get("bos_token_id")
        return TextCodec(tokenizer, template=_read_template(folder, config), bos_id=bos if isinstance(bos, int) else None,
                         eos_ids=eos, variables=names)


def by_id(vocabulary: Mapping[str, int]) -> list[str]:
    """The tokens in the order of their ids; an id without one has the empty text. BrokenFile for ids that no model has."""
    highest = max(vocabulary.values(), default=-1)
    if highest > MOST_IDS:
        raise BrokenFile(f"The tokenizer has a token with the id {highest}.", id=highest, limit=MOST_IDS)
    tokens = [""] * (highest + 1)
    for token, id in vocabulary.items():
        tokens[id] = token
    return tokens


def fingerprint(tokens: Sequence[str]) -> str:
    """A hash over the tokens by id: equal where two models mean the same by every id."""
    lengths = array("I", map(len, tokens)).tobytes()               # so that no text can end in its neighbour's
    return hashlib.blake2b(lengths + "".join(tokens).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _fields(message: Message) -> dict[str, Any]:
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": message.content, **named, **dict(message.extra)}


def _read_tokenizer(folder: Path) -> Tokenizer | ForeignTokenizer:
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for whatever is wrong in the file
            raise BrokenFile("tokenizer.json cannot be read.", file=file.name, reason=error) from error
    return _convert_tokenizer(folder)


def _convert_tokenizer(folder: Path) -> Tokenizer | ForeignTokenizer:
    """Any other tokenizer, made by transformers without network or foreign code; the fast form where it has one."""
    from transformers import AutoTokenizer
    try:
        made = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        raise LoadError("The folder holds no tokenizer that can be read.", reason=str(error).splitlines()[0],
                        remedy="Put the model's tokenizer.json beside its weights.") from error
    backend = getattr(made, "backend_tokenizer", None)
    return backend if isinstance(backend, Tokenizer) else ForeignTokenizer(made)


def _special_names(config: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token … as texts; each may be written as a text or as an object with ``content``."""
    names: dict[str, str] = {}
    for key in SPECIAL_NAMES:
        value = config.get(key, older.get(key))
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            names[key] = text
    return names


def _end_ids(folder: Path) -> set[int]:
    """End ids of config.json (its text part too) and generation_config.json, each a number or a list of numbers."""
    config = read_json(folder / "config.json")
    text_config = config.get("text_config")
    found: set[int] = set()
    inner = text_config if isinstance(text_config, dict) else {}
    for source in (config, inner, read_json(folder / "generation_config.json")):
        value = source.get("eos_token_id")
        found.update(id for id in (value if isinstance(value, list) else [value]) if isinstance(id, int))
    return found


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | Mapping[str, str] | None:
    """chat_template.jinja and additional_chat_templates/*.jinja, else tokenizer_config.json, else chat_template.json."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    named = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    if named:
        return named
    value = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(value, list):
        whole = [item for item in value if isinstance(item, dict) and {"name", "template"} <= set(item)]
        return {item["name"]: item["template"] for item in whole}
    return value if isinstance(value, (str, dict)) else None
