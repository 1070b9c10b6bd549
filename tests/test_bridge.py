"""A draft of another tokenizer: byte-level BPE drafts for sentencepiece-like BPE, and the other way round."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from backends.base import DraftJob, DraftSpec, ModelInfo, Sampling, Vocab
from backends.engine.bridge import Pieces, RetokenizingDrafter, unfinished
from backends.engine.local import LocalModel
from backends.engine.loop import Engine
from backends.engine.text import TextCodec
from tests.toys import ToyDecoder, ask, drain

STORY = ("The river ran past the old mill, and the miller's daughter watched the water wheel turn. 水车在转动，河水流过旧磨坊。 "
         "Grüße vom Fluss! 🙂🦙 The wheel turned, the water ran, and the miller counted: 1, 2, 3, 10, 200.\n\n"
         "“Watch the water,” said the miller; the daughter watched. 女儿看着水。 The old mill stood by the river.\n") * 2
TRAIN = STORY + " an unwatched wheel never turns water into flour whatever the weather over the counted river stones" * 3


@cache
def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator([TRAIN], trainers.BpeTrainer(vocab_size=420, show_progress=False, special_tokens=["<|end|>"],
                                                          initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return made


@cache
def sentence_like() -> Tokenizer:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    normal = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.normalizer = normal
    special = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words = TRAIN.replace("水", "").replace("🦙", "")        # these are to fall back to bytes
    made.train_from_iterator(words.split("\n"), trainers.BpeTrainer(vocab_size=420, show_progress=False, special_tokens=special))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])
    return made


def codec(name: str) -> TextCodec:
    tokenizer, end = (byte_level(), "<|end|>") if name == "bytes" else (sentence_like(), "</s>")
    special = [tokenizer.token_to_id(token) for token in ("<|end|>", "</s>", "<unk>") if tokenizer.token_to_id(token) is not None]
    return TextCodec(tokenizer, eos_ids=[tokenizer.token_to_id(end)], special_ids=special)


def knowing(text: TextCodec, story: str = STORY, wrong: bool = False):
    """Logits of a model that knows the story by heart: whatever its tokens so far, the longest token that goes on with it."""
    pieces, whole = Pieces(text, text.vocab.size), story.encode()
    sizes = [(id, pieces.of(id)) for id in range(text.vocab.size) if pieces.of(id) and id not in text.special_ids]

    def logits(ids):
        said = b"".join(pieces.of(id) for id in ids)
        at = whole.find(said.lstrip(b" ")) + len(said.lstrip(b" "))
        row = np.full(text.vocab.size, -9.0, np.float32)
        for id, data in sizes:
            if whole[at:at + len(data)] == data:
                row[id] = len(data)
        return -row if wrong else row
    return logits


def model(name: str, text: TextCodec, logits) -> LocalModel:
    decoder = ToyDecoder(logits, eos=text.vocab.eos_ids)
    decoder.vocab = Vocab(text.vocab.size, text.vocab.eos_ids, name)
    info = ModelInfo(name, "toy", "toy", context=4096, capabilities=("batch", "prefix", "draft"), vocab_fingerprint=name)
    return LocalModel(info, decoder, text)


def by_heart(text: TextCodec, prompt: int):
    """Logits of a target that says the story in its tokenizer's own tokens."""
    ids = text.encode(STORY, special=False)

    def logits(kv):
        row = np.zeros(text.vocab.size, np.float32)
        row[ids[len(kv)] if len(kv) < len(ids) else next(iter(text.eos_ids))] = 20
        return row
    return ids, ids[:prompt], logits


@pytest.mark.parametrize(("mine", "theirs"), [("bytes", "sentence"), ("sentence", "bytes")])
@pytest.mark.parametrize("length", [1, 4, None])
def test_a_draft_that_knows_the_text_is_nearly_always_right(mine, theirs, length):
    text = codec(theirs)
    ids, prompt, logits = by_heart(text, 25)
    target, draft = model("target", text, logits), model("draft", codec(mine), knowing(codec(mine)))
    engine = Engine()
    engine.attach(target), engine.attach(draft)
    got = ask(engine, target, tuple(prompt), Sampling(max_tokens=300, ignore_eos=True), draft=DraftSpec("draft", length))
    while not got.done:
        engine.step()
    assert got.check().ids() == (ids + [next(iter(text.eos_ids))] * 400)[25:325]
    report = got.last.usage.speculation
    told = min(len(ids) - 25, 300)
    if length is not None:
        assert report.sources[0][0] == "text" and report.acceptance > .8
        assert report.tokens_per_pass > {1: 1.6, 4: 2.8}[length] * told / 300
    drain(engine)
    assert not draft.decoder.open_slots and not target.decoder.open_slots


@pytest.mark.parametrize(("mine", "theirs"), [("bytes", "sentence"), ("sentence", "bytes")])
def test_a_draft_that_is_wrong_changes_nothing(mine, theirs):
    text = codec(theirs)
    ids, prompt, logits = by_heart(text, 25)
    target, draft = model("target", text, logits), model("draft", codec(mine), knowing(codec(mine), wrong=True))
    engine = Engine()
    engine.attach(target), engine.attach(draft)
    got = ask(engine, target, tuple(prompt), Sampling(max_tokens=100, ignore_eos=True), draft=DraftSpec("lookup+draft", 3))
    drain(engine)
    assert got.check().ids() == ids[25:125]


def drafter(mine: str, theirs: str) -> RetokenizingDrafter:
    text = codec(mine)
    made = model("draft", text, knowing(text))
    return RetokenizingDrafter(made.decoder, text, codec(theirs), codec(theirs).vocab.size)


def propose(made: RetokenizingDrafter, tokens, k=4, **more):
    return made.propose([DraftJob(list(tokens), k, Sampling(), 0, 1, **more)])[0]


@pytest.mark.parametrize("mine", ["sentence", "bytes"])
def test_nothing_is_proposed_in_the_middle_of_a_character(mine):
    text = codec("bytes")
    start = STORY.index("🦙")
    before = text.encode(STORY[:start], special=False)
    letters = [text.encode(STORY[:start + 1], special=False)[len(before):]]
    made = drafter(mine, "bytes")
    llama = [text.tokenizer.token_to_id(char) for char in byte_chars("🦙")]
    for cut in (1, 2, 3):
        assert propose(made, before + llama[:cut]) == []
    assert propose(made, before + llama) and letters


def byte_chars(sign: str) -> list[str]:
    from backends.engine.detokenize import byte_alphabet
    chars = {value: char for char, value in byte_alphabet().items()}
    return [chars[byte] for byte in sign.encode()]


def test_a_word_cut_in_two_is_healed():
    """The target stopped inside "watched": the draft would never have begun a token there, and goes on all the same."""
    made, text = drafter("bytes", "sentence"), codec("sentence")
    at = STORY.index("daughter watched the") + len("daughter wat")
    ids = text.encode(STORY[:at], special=False)
    draft = propose(made, ids, 6)
    assert b"".join(text.token_bytes(id) for id in draft).startswith(b"ched the")


def test_it_follows_a_text_that_turned_elsewhere():
    """After a rejection only what differs is read again."""
    made, text = drafter("bytes", "sentence"), codec("sentence")
    ids = text.encode(STORY[:150], special=False)
    assert propose(made, ids)
    calls, rows = made.places.decoder.calls, made.places.decoder.rows
    held = list(made.places._known[1].held)
    assert propose(made, ids + text.encode(STORY, special=False)[len(ids):len(ids) + 2])
    assert made.places.decoder.calls - calls <= 12
    assert made.places._known[1].held[:30] == held[:30] and rows
    made.forget(1)
    assert not made.places.decoder.open_slots


def test_ids_of_a_long_text_are_made_once():
    made, text = drafter("sentence", "bytes"), codec("bytes")
    ids = text.encode(STORY * 12, special=False)
    propose(made, ids)
    reading = made._readings[1]
    assert len(reading.data) - reading.base <= 480 and reading.ids
    assert b"".join(made.mine.of(id) for id in made._ids(reading)).strip() == bytes(reading.data).strip()


@pytest.mark.parametrize(("data", "count"), [(b"", 0), (b"a", 0), ("é".encode(), 0), ("é".encode()[:1], 1), ("世".encode()[:2], 2),
                                             ("🦙".encode()[:3], 3), ("🦙".encode(), 0), (b"\x80\x80", 0)])
def test_unfinished_characters(data, count):
    assert unfinished(data) == count


def test_special_tokens_are_written_by_their_names():
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    text = codec("bytes")
    pieces = Pieces(text, text.vocab.size)
    assert pieces.of(tokenizer.token_to_id("<|end|>")) == b"<|end|>"
