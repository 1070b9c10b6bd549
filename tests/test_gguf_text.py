"""Tokenizers from GGUF files against their sources: the `tokenizers` library and sentencepiece itself (CK-23)."""

from __future__ import annotations

import io

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from backends.base import Message
from backends.engine.gguf_split import SPLITS
from backends.engine.gguf_text import text_of
from backends.errors import BrokenFile, NoChatTemplate, UnknownFormat
from backends.gguf_file import read
from tests.gguf_maker import byte_vocabulary, write

STRINGS = [
    "Hello world", "two  spaces", "   three leading", "trailing   ", "a\tb\t\tc", "line\nline\n\n\nline", "\r\n\r\n",
    " \n \n ", "1234567 12 3.14",
    "emoji 🦙🦙 👩‍👩‍👧 end", "世界，你好。", "日本語 テキスト", "naïve café", "cafe\u0301 e\u0301", "def f(x):\n    return x**2  # ok",
    "don't WE'LL they're I'M",
    "<s>special</s> as <|im_end|> text", "a<|im_end|>\nb", "مرحبا بالعالم", "Привет, мир!", "x" * 50, "!?…—“”", "µ ½ Ⅷ ²",
    "", " ", "\n", "\u00a0nbsp\u2003em",
    "https://example.org/a?b=c&d=%20", "{\"k\": [1, 2]}", "l'été d'Ivan"]
CORPUS = (STRINGS + ["the quick brown fox jumps over the lazy dog and runs away from the other dogs again",
                     "12 123 1234 2024 1999 00 000 hello hello world worlds spaces special text returns"]) * 5
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
# As written in the tokenizer.json of Llama 3 and of Qwen 2.
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" \
         r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SOURCES = {                 # pre: (normalizer, pre-tokenizer, ignore_merges) of the source's tokenizer.json
    "smollm": (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]), False),
    "gpt-2": (None, GPT2, False),
    "llama-bpe": (None, pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]), True),
    "qwen2": (normalizers.NFC(), pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), BYTES]), False),
    "falcon": (None, pre_tokenizers.Sequence([pre_tokenizers.Punctuation("contiguous"), GPT2, pre_tokenizers.Digits(),
                                              pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")]), False),
    "deepseek-coder": (None, pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(p), "isolated") for p in (
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")), pre_tokenizers.Digits(individual_digits=True), BYTES]),
                       False)}
SPECIAL = ["<s>", "</s>", "<|im_end|>"]


def trained(pre: str) -> Tokenizer:
    normalizer, cut, whole = SOURCES[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer, tokenizer.decoder = cut, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def bpe_metadata(tokenizer: Tokenizer, pre: str, **more) -> dict:
    import json
    inner = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(inner["vocab"], key=inner["vocab"].get)
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if t in SPECIAL else 1 for t in tokens],
            "tokenizer.ggml.merges": [" ".join(m) for m in inner["merges"]],
            "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1} | more


def codec(tmp_path, metadata, architecture="llama"):
    return text_of(read(write(tmp_path / "m.gguf", architecture, metadata, {})))[0]


@pytest.mark.parametrize("pre", SOURCES)
def test_byte_level_ids_equal_the_sources(tmp_path, pre):
    source = trained(pre)
    text = codec(tmp_path, bpe_metadata(source, pre))
    for string in STRINGS:
        assert text.encode(string, special=False) == source.encode(string, add_special_tokens=False).ids, string


def test_the_sources_do_differ(tmp_path):
    """The strings tell the rules apart, or the test above would prove little."""
    cuts = {pre: tuple(tuple(piece for piece, _ in cut.pre_tokenize_str(s)) for s in STRINGS)
            for pre, (_, cut, _) in SOURCES.items()}
    assert len(set(cuts.values())) == len(SOURCES)


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_every_rule_compiles_and_loses_nothing(tmp_path, pre):
    text = codec(tmp_path, byte_vocabulary() | {"tokenizer.ggml.pre": pre})
    for string in STRINGS:
        if not SPLITS[pre].nfc and "<" not in string:
            assert text.decode(text.encode(string, special=False)) == string


# ---------------------------------------------------------------------------------------------- sentencepiece
def sentencepiece_model(kind: str, **more):
    spm = pytest.importorskip("sentencepiece")
    made = io.BytesIO()
    spm.SentencePieceTrainer.train(sentence_iterator=iter([s for s in CORPUS if s.strip() and "\n" not in s]),
                                   model_writer=made, vocab_size=420,
                                   model_type=kind, byte_fallback=True, bos_id=1, eos_id=2, unk_id=0, pad_id=-1,
                                   hard_vocab_limit=False,
                                   normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
                                   character_coverage=0.98, **more)
    return spm.SentencePieceProcessor(model_proto=made.getvalue())


def spm_metadata(processor, model: str, **more) -> dict:
    """As llama.cpp's converter writes a sentencepiece model."""
    kinds, tokens = [], []
    for id in range(processor.vocab_size()):
        piece = processor.id_to_piece(id)
        flags = ((2, processor.is_unknown(id)), (3, processor.is_control(id)), (6, processor.is_byte(id)),
                 (5, processor.is_unused(id)))
        kind = next((kind for kind, holds in flags if holds), 1)
        if piece in ("<|im_end|>", "  ".replace(" ", "▁"), "▁▁▁▁", "\n\n"):
            kind, piece = 4, piece.replace("▁", " ")
        kinds.append(kind)
        tokens.append(piece)
    return {"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.scores": [float(processor.get_score(id)) for id in range(len(tokens))],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0} | more


PLAIN = [string for string in STRINGS if "<s>" not in string
         and string]       # sentencepiece knows no control tokens in a text


def test_sentencepiece_ids_equal_sentencepieces(tmp_path):
    source = sentencepiece_model("bpe")
    text = codec(tmp_path, spm_metadata(source, "llama"))
    for string in PLAIN:
        assert text.encode(string, special=False) == source.encode(string), string
        assert text.encode(string) == [1, *source.encode(string)], string
        assert text.decode(source.encode(string)) == source.decode(source.encode(string)), string


def test_gemma_ids_equal_sentencepieces(tmp_path):
    """No space in front, and the user's own symbols (runs of spaces, which the file stores as spaces) are matched whole."""
    source = sentencepiece_model("bpe", add_dummy_prefix=False, user_defined_symbols=["▁▁", "▁▁▁▁", "<|im_end|>"])
    text = codec(tmp_path, spm_metadata(source, "llama", **{"tokenizer.ggml.add_space_prefix": False}), "gemma2")
    for string in PLAIN:
        assert text.encode(string, special=False) == source.encode(string), string
        ids = source.encode(string)
        assert text.decode(ids).replace("<|im_end|>", "") == source.decode(ids).replace("<|im_end|>", ""), string


def test_unigram_ids_equal_sentencepieces(tmp_path):
    source = sentencepiece_model("unigram")
    text = codec(tmp_path, spm_metadata(source, "t5"))
    for string in PLAIN:
        assert text.encode(string, special=False) == source.encode(string), string


def test_control_tokens_in_a_text_are_themselves(tmp_path):
    text = codec(tmp_path, spm_metadata(sentencepiece_model("bpe"), "llama"))
    assert text.encode("</s>", special=False) == [2] and text.encode("<s>") == [1]
    assert text.decode([1, 2]) == ""


# ------------------------------------------------------------------------------------------ what surrounds the vocabulary
def test_bos_is_written_where_the_file_or_its_kind_says_so(tmp_path):
    source = trained("gpt-2")
    hello = source.encode("hello").ids
    for pre, more, wanted in (("gpt-2", {}, hello), ("gpt-2", {"tokenizer.ggml.add_bos_token": True}, [0, *hello]),
                              ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, hello)):
        assert codec(tmp_path, bpe_metadata(source, pre, **more)).encode("hello") == wanted
    text = codec(tmp_path, bpe_metadata(source, "llama-bpe"))
    assert text.encode("hello")[0] == 0 and text.encode("<s>hello")[:2] != [0, 0]


def test_eos_is_appended_where_the_file_says_so(tmp_path):
    source = trained("gpt-2")
    text = codec(tmp_path, bpe_metadata(source, "gpt-2", **{"tokenizer.ggml.add_bos_token": True,
                                                            "tokenizer.ggml.add_eos_token": True}))
    assert text.encode("hello") == [0, *source.encode("hello").ids, 1] and text.encode("hello",
        special=False) == source.encode("hello").ids


def test_end_ids_are_the_stated_and_the_named_ones(tmp_path):
    source = trained("gpt-2")
    more = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 6, "tokenizer.ggml.eom_token_id": 7}
    text = codec(tmp_path, bpe_metadata(source, "gpt-2", **more))
    assert text.vocab.eos_ids == {5, 6, 7, 1, 2}     # 1 and 2, </s> and <|im_end|>, by name


def test_an_end_token_that_nobody_marked_is_never_text(tmp_path):
    metadata = bpe_metadata(trained("gpt-2"), "gpt-2")
    metadata["tokenizer.ggml.token_type"] = [1] * len(metadata["tokenizer.ggml.tokens"])
    text = codec(tmp_path, metadata)
    assert text.encode("a<|im_end|>", special=False)[-1] == 2 and text.decode([2]) == ""


def test_padding_of_the_head_is_not_vocabulary(tmp_path):
    assert codec(tmp_path, byte_vocabulary(320)).vocab.size == 259


def test_template_and_its_variables(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    text = codec(tmp_path, bpe_metadata(trained("gpt-2"), "gpt-2", **{"tokenizer.chat_template": template}))
    assert text.chat_text([Message("user", "hi")]) == "<s>user:hi</s>"
    assert text.chat([Message("user", "hi")]).count(0) == 1


def test_no_template_says_so(tmp_path):
    with pytest.raises(NoChatTemplate):
        codec(tmp_path, byte_vocabulary()).chat([Message("user", "hi")])


# ---------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("change,error,words", [
    ({"tokenizer.ggml.pre": "future-bpe"}, UnknownFormat, "future-bpe"),
    ({"tokenizer.ggml.model": "rwkv"}, UnknownFormat, "rwkv"),
    ({"tokenizer.ggml.merges": ["Ġ zzz"]}, BrokenFile, "cannot be built"),
    ({"tokenizer.ggml.merges": ["Ġ"]}, BrokenFile, "no merge"),
    ({"tokenizer.ggml.token_type": [1, 1]}, BrokenFile, "types"), ({"tokenizer.ggml.eos_token_id": 10_000}, BrokenFile,
                                                                   "beyond"),
    ({"tokenizer.ggml.tokens": ["a"] * 320}, BrokenFile, "twice"), ({"tokenizer.ggml.model": "t5"}, BrokenFile, "score"),
    ({"tokenizer.ggml.tokens": "none"}, BrokenFile, "no vocabulary")])
def test_what_cannot_be_is_refused(tmp_path, change, error, words):
    with pytest.raises(error, match=words):
        codec(tmp_path, byte_vocabulary() | change)


def test_a_missing_rule_is_a_note(tmp_path):
    metadata = bpe_metadata(trained("gpt-2"), "gpt-2")
    del metadata["tokenizer.ggml.pre"]
    _, notes = text_of(read(write(tmp_path / "m.gguf", "llama", metadata, {})))
    assert len(notes) == 1 and "how its tokenizer cuts text" in notes[0]
