"""The tokenizer and chat template that a GGUF file carries, as a `TextCodec`.

Knows the three kinds of vocabulary that causal models come with (byte-level BPE, sentencepiece BPE, unigram) and builds
each with the `tokenizers` library alone, in the shape its source has. Refuses to know weights.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from backends.engine import gguf_split
from backends.engine.text import TextCodec
from backends.errors import BrokenFile, UnknownFormat
from backends.gguf_file import GgufFile
from backends.gguf_strings import Strings

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6         # tokenizer.ggml.token_type
SPACE = "▁"
# Ends of a turn or a text, by name: a file states one or two ids, where models have more.
END_NAMES = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>",
    "<EOT>",
    "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<｜end▁of▁sentence｜>"))


@dataclass
class Vocabulary:
    """Tokens by id with their kinds (an array) and scores, as the file has them; ``notes`` are for people."""

    file: GgufFile
    tokens: list[str]
    kinds: np.ndarray
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ids = dict(zip(self.tokens, range(len(self.tokens))))

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}", default)

    def ids(self) -> dict[str, int]:
        """BrokenFile where two ids share a token."""
        if len(self._ids) != len(self.tokens):
            twice = next(token for id, token in enumerate(self.tokens) if self._ids[token] != id)
            raise BrokenFile(f"{self.file.path.name}: the token {twice!r} is in the vocabulary twice.", token=twice)
        return self._ids

    def respell(self, tokens: list[str], kinds: list[int]) -> None:
        self.tokens, self.kinds = tokens, np.array(kinds)
        self._ids = dict(zip(tokens, range(len(tokens))))

    def ends(self) -> list[int]:
        """Ids of the tokens whose name says that they end something."""
        if len(self._ids) == len(self.tokens):
            return [self._ids[name] for name in END_NAMES if name in self._ids]
        return [id for id, token in enumerate(self.tokens) if token in END_NAMES]

    def of_kind(self, *kinds: int) -> list[int]:
        return np.flatnonzero(np.isin(self.kinds, kinds)).tolist()

    def special(self, name: str, default: int | None = None) -> int | None:
        """The id of bos, eos, eot …, or None; BrokenFile where it is no id."""
        id = self.get(f"{name}_token_id")
        if id is None:
            return default if default is not None and default < len(self.tokens) else None
        if not isinstance(id, int) or not 0 <= id < len(self.tokens):
            if id in (-1, 0xFFFFFFFF):      # how some converters write "none"
                return None
            raise BrokenFile(f"{self.file.path.name}: the {name} token is {id}, beyond the vocabulary.",
                             key=f"{name}_token_id", id=id)
        return id

    def scores(self) -> list[float]:
        scores = self.get("scores")
        if scores is None or isinstance(scores, (int, float, str, Strings)) or len(scores) != len(self.tokens):
            raise BrokenFile(f"{self.file.path.name}: the tokenizer needs one score a token.", key="tokenizer.ggml.scores")
        return list(scores)


def check(file: GgufFile) -> None:
    """UnknownFormat where this kind of tokenizer or its rule is not known. Takes no time; the rest shows when it is built."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in KINDS:
        raise UnknownFormat(f"{file.path.name} has a tokenizer of the kind {kind!r}, which is not read.", kind=kind,
                            known=", ".join(KINDS))
    if kind == "gpt2":
        gguf_split.split_of(file.metadata.get("tokenizer.ggml.pre"))


def text_of(file: GgufFile) -> tuple[TextCodec, tuple[str, ...]]:
    """The codec, and notes. UnknownFormat (kind or rule not known), BrokenFile (contradictions in the file)."""
    vocabulary = _vocabulary(file)
    check(file)
    kind = vocabulary.get("model")
    build, bos_default, bos = KINDS[kind]
    try:
        with _uncollected():
            tokenizer = build(vocabulary)
    except (BrokenFile, UnknownFormat):
        raise
    except Exception as error:  # the library raises bare Exception for whatever contradicts itself in the vocabulary
        raise BrokenFile(f"{file.path.name}: its tokenizer cannot be built.", reason=error) from error
    _add_tokens(tokenizer, vocabulary)
    bos_id, eos_id = vocabulary.special("bos", bos), vocabulary.special("eos", 2 if kind == "llama" else None)
    codec = TextCodec(
        tokenizer, template=_template(file), bos_id=bos_id, eos_ids=_end_ids(vocabulary, eos_id),
        vocab_size=_real_size(vocabulary),
        special_ids=vocabulary.of_kind(CONTROL, UNKNOWN),
        add_bos=_edges(tokenizer, vocabulary, bos_default(vocabulary), bos_id, eos_id),
        variables=_variables(vocabulary, bos_id, eos_id), tokens=vocabulary.tokens)
    return codec, tuple(vocabulary.notes)


@contextmanager
def _uncollected() -> Iterator[None]:
    """A hundred thousand fresh tuples, gone in a moment, are no reason to look through all that lives in the process."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _vocabulary(file: GgufFile) -> Vocabulary:
    tokens, kinds = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, Strings) or not len(tokens):
        raise BrokenFile(f"{file.path.name} holds no vocabulary.", key="tokenizer.ggml.tokens")
    if kinds is not None and (isinstance(kinds, (int, float, str, Strings)) or len(kinds) != len(tokens)):
        raise BrokenFile(f"{file.path.name}: the vocabulary has {len(tokens)} tokens and another number of types.",
                         key="tokenizer.ggml.token_type")
    texts = list(tokens)
    if "" in texts:
        texts = [token or f"[EMPTY_{id}]" for id, token in enumerate(texts)]
    found = Vocabulary(file, texts, np.full(len(texts), NORMAL) if kinds is None else np.array(kinds))
    for id in found.ends():
        if found.kinds[id] in (NORMAL, USER):                       # old converters forgot to mark them
            found.kinds[id] = CONTROL
    return found


# ---------------------------------------------------------------------------------------------- kinds
def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    name = vocabulary.get("pre")
    if name in (None, "default"):
        vocabulary.notes.append("The file does not say how its tokenizer cuts text: the common rule is used, and ids may "
                                "differ from the source's.")
    split = gguf_split.split_of(name)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.ids(), merges=_merges(vocabulary), ignore_merges=split.whole))
    if normalizer := gguf_split.normalizer(split):
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = gguf_split.pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    stored = vocabulary.get("merges")
    if not isinstance(stored, Strings):
        raise BrokenFile(f"{vocabulary.file.path.name}: the tokenizer has no merges.", key="tokenizer.ggml.merges")
    merges = list(stored)
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if set(map(len, pairs)) <= {2} and "" not in map(itemgetter(0), pairs):
        return pairs
    pairs = []                              # a token may hold a space itself
    for merge in merges:
        cut = merge.find(" ", 1)            # the first part may begin with a space, never be empty
        if cut < 0:
            raise BrokenFile(f"{vocabulary.file.path.name}: {merge!r} is no merge of two tokens.", merge=merge)
        pairs.append((merge[:cut], merge[cut + 1:]))
    return pairs


def _sentencepiece(vocabulary: Vocabulary, gemma: bool = False) -> Tokenizer:
    gemma = gemma or vocabulary.file.architecture.startswith("gemma")
    if gemma:       # runs of spaces are stored as spaces, but merged as the marks they are
        tokens = [SPACE * len(token) if token.strip(" ") == "" else token for token in vocabulary.tokens]
        kinds = [NORMAL if token.strip(SPACE) == "" else kind for token, kind in zip(tokens, vocabulary.kinds.tolist())]
        vocabulary.respell(tokens, kinds)
    ids = vocabulary.ids()
    # Gemma's merges follow the order of its tokens, Llama's their scores.
    ranks = None if not gemma else [-float(id) for id in range(len(ids))]
    stored = vocabulary.get("merges")
    merges = _merges(vocabulary) if stored else derived_merges(vocabulary.tokens, ids, ranks or vocabulary.scores())
    unknown = vocabulary.special("unknown", 0)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, fuse_unk=True, byte_fallback=BYTE in vocabulary.kinds,
                                     unk_token=None if unknown is None else vocabulary.tokens[unknown]))
    prefix = bool(vocabulary.get("add_space_prefix", not gemma))
    steps = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = _spaced(prefix)
    return tokenizer


def _spaced(prefix: bool) -> decoders.Decoder:
    """Marks to spaces, bytes to characters, and the space that was put in front taken off."""
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    return decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends])


def derived_merges(tokens: list[str], ids: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that a scored vocabulary implies: every way to cut a token into two tokens, best score first."""
    found = []
    for token, score in zip(tokens, scores):
        if len(token) == 2:
            cuts = [token] if token[0] in ids and token[1] in ids else ()
            found += [(-score, -1, ids[t[0]], ids[t[1]], t[0], t[1]) for t in cuts]
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-score, -cut, ids[left], ids[right], left, right))
    found.sort()
    return [(item[4], item[5]) for item in found]


def _unigram(vocabulary: Vocabulary) -> Tokenizer:
    pieces = list(zip(vocabulary.tokens, vocabulary.scores()))
    tokenizer = Tokenizer(models.Unigram(pieces, vocabulary.special("unknown", 2), BYTE in vocabulary.kinds))
    charsmap = vocabulary.get("precompiled_charsmap")
    steps = [normalizers.Precompiled(bytes(value & 255 for value in charsmap))] if charsmap else []
    if vocabulary.get("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    prefix = bool(vocabulary.get("add_space_prefix", True))
    tokenizer.normalizer = normalizers.Sequence([*steps, *([normalizers.Prepend(SPACE)] if prefix else []),
                                                 normalizers.Replace(" ", SPACE)])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "never")
    tokenizer.decoder = _spaced(prefix)
    return tokenizer


# kind: how to build it, whether BOS goes first where the file is silent, the id of BOS where it is silent
KINDS: dict[str, tuple[Callable[[Vocabulary], Tokenizer], Callable[[Vocabulary], bool], int | None]] = {
    "gpt2": (_byte_level, lambda vocabulary: gguf_split.split_of(vocabulary.get("pre")).bos, None),
    "llama": (_sentencepiece, lambda vocabulary: True, 1),
    "gemma4": (partial(_sentencepiece, gemma=True), lambda vocabulary: True, None),
    "t5": (_unigram, lambda vocabulary: False, None)}


# ---------------------------------------------------------------------------------------------- what surrounds it
def _add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Control tokens and the user's own are matched whole in a text, before anything is cut."""
    add = [AddedToken(vocabulary.tokens[id], special=bool(vocabulary.kinds[id] == CONTROL), normalized=False)
           for id in vocabulary.of_kind(CONTROL, USER)]
    before = tokenizer.get_vocab_size(with_added_tokens=False)
    tokenizer.add_tokens(add)
    if tokenizer.get_vocab_size(with_added_tokens=True) != before:
        raise BrokenFile(f"{vocabulary.file.path.name}: an added token is not in the vocabulary.", tokens=before)


def _edges(tokenizer: Tokenizer, vocabulary: Vocabulary, bos_default: bool, bos: int | None, eos: int | None) -> bool | None:
    """Whether BOS goes before a text; None where the tokenizer does it itself, because EOS goes after it too."""
    add_bos = bool(vocabulary.get("add_bos_token", bos_default)) and bos is not None
    if not vocabulary.get("add_eos_token", False) or eos is None:
        return add_bos
    named = [(vocabulary.tokens[id], id) for id in dict.fromkeys([bos, eos] if add_bos else [eos])]
    quoted = [f"{token}" for token, _ in named]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*quoted[:1 if add_bos else 0], "$A", quoted[-1]], special_tokens=named)
    return None


def _end_ids(vocabulary: Vocabulary, eos: int | None) -> set[int]:
    stated = {eos, *(vocabulary.special(name) for name in ("eot", "eom"))} - {None}
    named = {id for id in vocabulary.ends() if vocabulary.kinds[id] == CONTROL}
    return stated | named


def _real_size(vocabulary: Vocabulary) -> int:
    """Ids up to the last that means something: converters fill a padded head with unused tokens."""
    size = len(vocabulary.kinds)
    while size > 1 and vocabulary.kinds[size - 1] == UNUSED:
        size -= 1
    return size


def _template(file: GgufFile) -> Mapping[str, str] | None:
    """Templates by name; the plain one is "default"."""
    prefix = "tokenizer.chat_template"
    found = {key[len(prefix) + 1:] or "default": value for key, value in file.metadata.items()
             if (key == prefix or key.startswith(prefix + ".")) and isinstance(value, str) and value}
    return found or None


def _variables(vocabulary: Vocabulary, bos: int | None, eos: int | None) -> dict[str, str]:
    ids: Iterable[tuple[str, int | None]] = (
        ("bos_token", bos), ("eos_token", eos), ("unk_token", vocabulary.special("unknown")),
        ("pad_token", vocabulary.special("padding")))
    return {name: vocabulary.tokens[id] for name, id in ids if id is not None}
