"""Streaming text: no half characters, no lost ones, and the joined stream is the text of the whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from backends.engine.detokenize import WindowDetokenizer, byte_alphabet
from backends.engine.text import TextCodec

LLAMA = "\U0001f999"


def byte_tokenizer() -> Tokenizer:
    """Ids 0 … 255 are the bytes themselves, 256 is a special token."""
    letters = {value: char for char, value in byte_alphabet().items()}
    tokenizer = Tokenizer(models.BPE(vocab={letters[i]: i for i in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def fallback_tokenizer() -> Tokenizer:
    """As Llama 2's: words with a leading mark, bytes as <0x00> … <0xFF> at ids 3 … 258."""
    words = ["▁the", "▁llama", "▁eats", "\n", "▁grass", "he", "▁"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    vocab |= {word: 259 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    vocab = {"<unk>": 0, "▁two": 1, "▁words": 2, "\n": 3, "▁more": 4, "▁here": 5}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def stream(codec: TextCodec, ids) -> list[str]:
    detokenizer = codec.stream()
    return [detokenizer.push(id) for id in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("tokenizer, offset", [(byte_tokenizer(), 0), (fallback_tokenizer(), 3)])
def test_split_characters_wait_for_their_last_byte(tokenizer, offset):  # TK-01
    codec = TextCodec(tokenizer)
    ids = [offset + byte for byte in [*LLAMA.encode(), *"世".encode()]]
    assert stream(codec, ids) == ["", "", "", LLAMA, "", "", "世", ""]


def test_a_space_inside_a_character_neither_flushes_early_nor_raises():  # TK-03
    tokenizer = fallback_tokenizer()
    codec = TextCodec(tokenizer)
    ids = [3 + 0xE4, 3 + 0xB8, 260, 3 + 0x96]
    parts = stream(codec, ids)
    assert parts[:2] == ["", ""]
    assert "".join(parts) == tokenizer.decode(ids) == "\ufffd\ufffd llama\ufffd"
    byte = TextCodec(byte_tokenizer())
    ids = [0xE4, 0xB8, 0x20, 0x78, 0x96]
    assert "".join(stream(byte, ids)) == byte_tokenizer().decode(ids) == "\ufffd x\ufffd"


@pytest.mark.parametrize("tokenizer, ids, text", [
    (fallback_tokenizer(), [259, 260, 262, 261, 263], "the llama\n eats grass"),
    (metaspace_tokenizer(), [1, 2, 3, 4, 5], "two words\n more here")])
def test_sentencepiece_keeps_inner_spaces_and_has_none_at_the_start(tokenizer, ids, text):  # TK-05
    codec = TextCodec(tokenizer)
    assert "".join(stream(codec, ids)) == tokenizer.decode(ids) == codec.decode(ids) == text
    goes_on = codec.stream(continued=True)
    assert "".join([goes_on.push(id) for id in ids]) + goes_on.flush() == " " + text


@pytest.mark.parametrize("tokenizer, offset", [(byte_tokenizer(), 0), (fallback_tokenizer(), 3)])
def test_a_character_cut_in_the_middle_is_left_out_and_a_broken_one_is_not(tokenizer, offset):
    codec = TextCodec(tokenizer)
    for data, cut in ((b"a" + LLAMA.encode()[:3], "a"), (b"a\x96b", "a\ufffdb"), (b"a\x96", "a\ufffd"), (b"a\xe4", "a")):
        ids = [offset + byte for byte in data]
        detokenizer = codec.stream()
        text = "".join(detokenizer.push(id) for id in ids)
        assert text + detokenizer.flush(cut=True) == cut
        assert codec.decode(ids).startswith(text)                                  # the whole shows what the cut leaves out
        assert b"".join(codec.token_bytes(id) for id in ids) == data               # and the bytes of its tokens are all there


def test_a_decoder_without_a_table_leaves_a_cut_character_out_too():
    codec = TextCodec(byte_tokenizer())
    window = WindowDetokenizer(lambda ids: codec.tokenizer.decode(ids, skip_special_tokens=False), ())
    text = "".join(window.push(byte) for byte in b"a" + LLAMA.encode()[:3])
    assert text + window.flush(cut=True) == "a"


def test_special_tokens_never_show():
    assert stream(TextCodec(byte_tokenizer()), [65, 256, 66]) == ["A", "", "B", ""]
    assert stream(TextCodec(fallback_tokenizer()), [1, 259, 2]) == ["", "the", "", ""]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 256), max_size=40))
def test_any_bytes_come_out_as_the_tokenizers_own_decoder_says(ids):
    tokenizer = byte_tokenizer()
    assert "".join(stream(TextCodec(tokenizer), ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=30))
def test_any_text_survives_the_byte_fallback(text):
    tokenizer = fallback_tokenizer()
    ids = [3 + byte for byte in text.encode("utf-8", "replace")]
    parts = stream(TextCodec(tokenizer), ids)
    assert "".join(parts) == tokenizer.decode(ids)
    assert not any("\ufffd" in part for part in parts) or "\ufffd" in text


def test_what_is_held_back_is_never_more_than_three_bytes():
    codec = TextCodec(byte_tokenizer())
    rng = random.Random(1)
    text = "".join(rng.choice(["a", "é", "世", LLAMA]) for _ in range(200))
    detokenizer, out = codec.stream(), ""
    for count, byte in enumerate(text.encode(), 1):
        out += detokenizer.push(byte)
        assert len(out.encode()) > count - 4
    assert out == text


def test_a_word_piece_decoder_streams_to_the_same_text():
    vocab = {"[UNK]": 0, "the": 1, "llama": 2, "##s": 3, "eat": 4, ".": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    codec = TextCodec(tokenizer)
    ids = [1, 2, 3, 4, 5, 1, 2]
    assert "".join(stream(codec, ids)) == tokenizer.decode(ids) == "the llamas eat. the llama"


def test_a_flood_of_broken_bytes_stays_linear():
    codec = TextCodec(byte_tokenizer())
    detokenizer = codec.stream()
    text = "".join(detokenizer.push(0x96) for _ in range(5000)) + detokenizer.flush()
    assert text == "\ufffd" * 5000
