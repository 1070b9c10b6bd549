"""Tokenizer folders and chat templates: the same ids and the same prompt as transformers makes, BOS and end ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from backends.base import Message
from backends.engine.text import TextCodec
from backends.errors import BrokenFile, InvalidRequest, LoadError, NoChatTemplate
from tests.test_detokenize import byte_tokenizer, fallback_tokenizer

FIXTURE = Path(__file__).parent / "fixtures" / "llama-fp16"
CHATML = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
          "Be kind.<|im_end|>\n' }}{% endif %}"
          "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
LLAMA2 = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
          "{% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}"
          "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}")
FANCY = """{%- set ns = namespace(count=0) -%}
{% for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{ m.content }}{% endgeneration %}
    {%- else %}
<{{ m.role }}>{{ m.content }}</{{ m.role }}>
    {%- endif %}
    {% set ns.count = ns.count + 1 %}
    {%- if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}
    {% if ns.count > 9 %}{% break %}{% endif %}
{% endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{{ dict(a=1) }} {{ strftime_now('%Y') }} {% if thinking is defined %}{{ thinking }}{% endif %}
{% if add_generation_prompt %}<assistant>{% endif %}"""
CHAT = (Message("user", " Hi <&> 世界 "), Message("assistant", "Hello"), Message("user", "More"))
TOOLS = [{"type": "function", "function": {"name": "add", "description": "<adds> é", "parameters": {}}}]


@pytest.fixture
def folder(tmp_path):
    """The fixture's tokenizer files in a folder that the test may change."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(FIXTURE / name, tmp_path / name)

    def change(name: str, **values):
        file = tmp_path / name
        data = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({key: value for key, value in {**data, **values}.items() if value is not ...}))
        return tmp_path
    return change


def theirs(path):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(str(path), local_files_only=True)


@pytest.mark.parametrize("text", ["", "a", "Hello world", "  two\n\nspaces\t", "世界 \U0001f999", "<s>text</s> more", "é\r\n"])
def test_ids_and_text_equal_transformers(text):
    codec, reference = TextCodec.from_folder(FIXTURE), theirs(FIXTURE)
    ids = codec.encode(text)
    assert ids == reference(text)["input_ids"]
    assert codec.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(("template", "more"), [
    *((template, more) for template in (CHATML, LLAMA2, FANCY) for more in ({}, {"thinking": True})),
    (FANCY, {"tools": TOOLS, "thinking": True})])
def test_chat_equals_transformers(folder, template, more):
    path = folder("tokenizer_config.json", chat_template=template)
    codec, reference = TextCodec.from_folder(path), theirs(path)
    said = [{"role": m.role, "content": m.content} for m in CHAT]
    text = reference.apply_chat_template(said, tokenize=False, add_generation_prompt=True, **more)
    assert codec.chat_text(CHAT, **more) == text
    ids = reference.apply_chat_template(said, add_generation_prompt=True, return_dict=False, **more)
    assert codec.chat(CHAT, **more) == ids


@pytest.mark.parametrize("template", [CHATML, LLAMA2])
@pytest.mark.parametrize("last", ["Once upon", "Once upon "])
def test_continuing_the_last_turn_equals_transformers(folder, template, last):
    path = folder("tokenizer_config.json", chat_template=template)
    chat = (Message("user", "A tale"), Message("assistant", last))
    said = [{"role": m.role, "content": m.content} for m in chat]
    expected = theirs(path).apply_chat_template(said, tokenize=False, continue_final_message=True)
    assert TextCodec.from_folder(path).chat_text(chat, continue_last=True) == expected


def test_named_templates_and_files(folder):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools | length }} tool"}]
    codec = TextCodec.from_folder(folder("tokenizer_config.json", chat_template=named))
    assert (codec.chat_text(CHAT), codec.chat_text(CHAT, tools=TOOLS)) == ("plain", f"with {len(TOOLS)} tool")
    path = folder("tokenizer_config.json", chat_template="old")
    (path / "chat_template.jinja").write_text("from the file")
    assert TextCodec.from_folder(path).chat_text(CHAT) == "from the file" == theirs(path).apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False)


def test_a_reasoning_turn_is_seen_under_the_name_the_template_reads(folder):
    codec = TextCodec.from_folder(folder("tokenizer_config.json", chat_template="{{ messages[0].reasoning_content }}"))
    assert codec.chat_text((Message("assistant", "", extra=(("reasoning", "hm"),)),)) == "hm"


def test_no_template_says_how_to_set_one():  # TK-08
    with pytest.raises(NoChatTemplate) as caught:
        TextCodec.from_folder(FIXTURE).chat(CHAT)
    assert "chat_template.jinja" in caught.value.remedy


@pytest.mark.parametrize("template, words", [
    ("{{ raise_exception('System role not supported') }}", "System role not supported"),
    ("{{ messages[0].content + none }}", "NoneType"),
    ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ("{{ messages.append(1) }}", "append"),
    ("{% set n = namespace(__x=1) %}", "__x")])
def test_a_template_that_refuses_or_reaches_out_is_a_request_error(template, words):
    codec = TextCodec(byte_tokenizer(), template=template)
    with pytest.raises(InvalidRequest, match=words):
        codec.chat_text(CHAT)


def test_broken_template_and_empty_chat():
    with pytest.raises(NoChatTemplate):
        TextCodec(byte_tokenizer(), template="{% if %}").chat_text(CHAT)
    with pytest.raises(InvalidRequest):
        TextCodec(byte_tokenizer(), template=CHATML).chat_text(())


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.mark.parametrize("add_bos", [None, True])
def test_exactly_one_bos(add_bos):  # TK-06
    codec = TextCodec(with_bos(fallback_tokenizer()), template=LLAMA2, bos_id=1, eos_ids=[2], add_bos=add_bos,
                      variables={"bos_token": "<s>", "eos_token": "</s>"})
    chat = codec.chat((Message("user", "the llama"),))
    assert chat[0] == 1 and chat.count(1) == 1
    raw = codec.encode("the llama")
    assert raw[0] == 1 and raw.count(1) == 1
    again = codec.encode("<s>the llama")
    assert again[0] == 1 and again.count(1) == 1
    assert 1 not in codec.encode("the llama", special=False)


@pytest.mark.parametrize("value", [True, False])
def test_tokenizer_json_decides_about_bos_as_in_transformers(folder, value):
    path = folder("tokenizer_config.json", add_bos_token=value)
    assert TextCodec.from_folder(path).encode("Hello") == theirs(path)("Hello")["input_ids"]


def test_end_ids_are_the_union_of_all_three_files(folder):  # TK-09
    path = folder("config.json", eos_token_id=5)
    folder("generation_config.json", eos_token_id=[5, 7])
    folder("tokenizer_config.json", eos_token="!")
    nine = Tokenizer.from_file(str(path / "tokenizer.json")).token_to_id("!")
    assert TextCodec.from_folder(path).vocab.eos_ids == {5, 7, nine}
    folder("config.json", eos_token_id=..., text_config={"eos_token_id": [6]})
    folder("generation_config.json", eos_token_id=None)
    folder("tokenizer_config.json", eos_token=None)
    assert TextCodec.from_folder(path).vocab.eos_ids == {6}


def test_fingerprint_is_that_of_the_meaning_of_ids():
    one, other = TextCodec(byte_tokenizer()), TextCodec(byte_tokenizer(), eos_ids=[256])
    assert one.vocab.fingerprint == other.vocab.fingerprint and one.vocab.size == 257
    changed = byte_tokenizer()
    changed.add_special_tokens(["<|more|>"])
    assert TextCodec(changed).vocab.fingerprint != one.vocab.fingerprint
    assert TextCodec(changed, vocab_size=257).vocab.fingerprint == one.vocab.fingerprint


def test_tokens_at_hand_give_the_fingerprint_of_the_tokenizer():
    asked, told = TextCodec(byte_tokenizer()), byte_tokenizer().get_vocab()
    tokens = sorted(told, key=told.get)
    assert TextCodec(byte_tokenizer(), tokens=tokens).vocab == asked.vocab
    moved = [tokens[1] + tokens[0], "", *tokens[2:]]               # the same letters, cut elsewhere
    assert TextCodec(byte_tokenizer(), tokens=moved).vocab.fingerprint != asked.vocab.fingerprint


def test_token_text_is_for_people():
    codec = TextCodec(byte_tokenizer())
    assert [codec.token_text(id) for id in (65, 0xE4, 256)] == ["A", "\ufffd", "<|end|>"]


def test_damaged_and_missing_files(tmp_path):
    with pytest.raises(LoadError, match="tokenizer"):
        TextCodec.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(BrokenFile):
        TextCodec.from_folder(tmp_path)


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(InvalidRequest):
        TextCodec(byte_tokenizer()).encode("a\ud800b")


def test_a_folder_with_only_a_sentencepiece_model(tmp_path):
    spm = pytest.importorskip("sentencepiece")
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(f"the quick brown fox number {i} jumps over lazy dogs and cats" for i in range(200)))
    spm.SentencePieceTrainer.train(input=str(lines), model_prefix=str(tmp_path / "tokenizer"), vocab_size=300,
                                   model_type="bpe", byte_fallback=True, minloglevel=2)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2, "bos_token_id": 1}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>",'
                                                    ' "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": true}')
    codec, text = TextCodec.from_folder(tmp_path), "the fox jumps over 7 dogs 世"
    reference = spm.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert codec.encode(text) == [1, *reference.encode(text)]
    assert codec.decode(codec.encode(text)) == text


def test_a_tokenizer_that_exists_only_in_python(tmp_path):
    words = ["<unk>", "Links", "t@@", "h@@", "e", "the", "l@@", "a@@", "m@@", "a", "llama"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: id for id, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e</w>\nl l\nll a\nlla m\nllam a</w>\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer", "unk_token": "<unk>"}')
    (tmp_path / "config.json").write_text('{"model_type": "ctrl", "eos_token_id": 1}')
    codec, reference = TextCodec.from_folder(tmp_path), theirs(tmp_path)
    ids = codec.encode("the llama the llama")
    assert ids == reference("the llama the llama")["input_ids"] == [5, 10, 5, 10]
    assert codec.decode(ids) == reference.decode(ids) == "the llama the llama"
    assert codec.vocab.size == 11 and codec.vocab.eos_ids == {1} and codec.token_text(5) == "the"
