"""Both languages are whole: same keys, same places to fill in, nothing left in the other language, every key used."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from backends.base import GainzError, LocalOptions, OutOfMemory, Sampling
from gainz_ui.i18n import explain, language, option_label, said, texts, tr
from gainz_ui.services import doctor
from gainz_ui.services.bench import energy
from gainz_ui.settings import Settings

ROOM = Path(__file__).parent.parent / "gainz_ui"
CJK = re.compile(r"[\u3000-\u303f\u4e00-\u9fff]")
SAME_IN_BOTH = {"other_language", "option_top_k", "option_top_p", "option_min_p", "path_example", "section_gpu"}
BUILT = re.compile(r"^(error|advice|option|help|preset|role|stage|finish|path|engine|banner|section|chip|tab|fact|side|verdict|pair|axis|plot|workload|prompt|export|part|bench_use|said)_|^bench_[ab]$|_done$")


def places(text: str) -> list[str]:
    return sorted(re.findall(r"\{(\w+)\}", text))


def test_same_keys_and_same_places():
    english, chinese = texts("en"), texts("zh")
    assert set(english) == set(chinese)
    assert {key for key in english if places(english[key]) != places(chinese[key])} == set()


def test_chinese_is_chinese_and_english_is_english():
    assert {key for key, text in texts("zh").items() if not CJK.search(text)} <= SAME_IN_BOTH
    assert {key for key, text in texts("en").items() if CJK.search(text)} == {"other_language"}
    assert not any(re.search(r"[\u4e00-\u9fff][,;?!]|[,;?!][\u4e00-\u9fff]", text) for text in texts("zh").values()), (
        "half-width signs"
    )


def test_every_key_that_is_asked_for_is_there_and_every_key_there_is_asked_for():
    source = "\n".join(path.read_text(encoding="utf-8") for path in ROOM.rglob("*.py"))
    asked = set(re.findall(r"(?<![.\w])(?:T|tr|say)\((?:\w+, )?\"(\w+)\"", source))
    assert asked - set(texts("en")) - {"en", "zh"} - {key for key in asked if key.endswith("_")} == set()
    quoted = set(re.findall(r"[\"'](\w+)[\"']", source))
    assert {key for key in texts("en") if key not in quoted and not BUILT.search(key)} == set()


@pytest.mark.parametrize("code", sorted(set(GainzError.registry) | {"error"}))
def test_every_error_has_a_title_in_chinese(code):
    assert CJK.search(tr("zh", f"error_{code}"))


def test_an_error_is_explained_in_both_languages():
    error = OutOfMemory("It does not fit.", needed=5)
    assert explain("en", error) == ("Not enough memory", "It does not fit. (needed = 5)", OutOfMemory.advice)
    title, what, remedy = explain("zh", error)
    assert title == "内存不足" and "needed = 5" in what and CJK.search(remedy)
    assert explain("zh", OutOfMemory("x", remedy="At most 2048 tokens fit."))[2] == "At most 2048 tokens fit."
    told = explain("zh", OutOfMemory("a.b does not fit the free memory.", remedy="At most 2,048 tokens of context would fit.", needed=5))
    assert told[1:] == ("a.b 超出可用内存。 (needed = 5)", "上下文最多可容纳 2,048 个词元。")


@pytest.mark.parametrize("english, chinese", [
    ("free", "空闲"), ("No model is loaded.", "没有已加载的模型。"), ("a is loaded.", "a 已加载。"), ("21 GB free of 25 GB", "可用 21 GB，共 25 GB"),
    ("75 GB free at /a b, not writable", "/a b 处可用 75 GB，不可写"), ("available: plain torch, float32 math, 2 threads", "可用：纯 torch, float32 运算, 2 线程"),
    ("cpu avx2, 2 threads, huge pages", "cpu avx2, 2 线程, 大页内存"), ("What nobody has written down.", "What nobody has written down."),
    ("none: no NVIDIA driver (x); models run on the CPU", "无：没有 NVIDIA 驱动（x）；模型在 CPU 上运行"), ("a.b (c) [d] does not fit the free memory.", "a.b (c) [d] 超出可用内存。"),
    ("draft of a-b.c, 4 bits", "a-b.c 的草稿模型，4 位"), ("the RAPL counters may be read by root only (/sys/x)", "RAPL 计数器仅 root 可读（/sys/x）")])
def test_sentences_of_the_program_are_said_in_chinese(english, chinese):
    assert said("zh", english) == chinese and said("en", english) == english


def test_why_energy_cannot_be_measured_is_said_in_chinese(tmp_path):
    assert CJK.search(said("zh", energy.find("cpu", tmp_path).reason))


def test_the_doctor_speaks_chinese(tmp_path):
    """Of every finding of this machine: what is left in English is a name, a version or a path."""
    for check in doctor.examine(Settings(models=tmp_path, outputs=tmp_path), deep=False).checks:
        for text in (check.value, check.remedy):
            assert not re.search(r"\b(free|available|cores|not|none|of)\b", said("zh", text).replace(str(tmp_path), "")), text


@pytest.mark.parametrize("name", [item.name for cls in (Sampling, LocalOptions) for item in fields(cls) if item.name not in
                                  {"n", "logprobs", "prompt_logprobs"}])
def test_every_option_on_the_page_has_a_label_in_both(name):
    assert option_label("zh", name, "") and option_label("en", name, "")


@pytest.mark.parametrize(
    ("cookie", "header", "expected"),
    [
        ("zh", "en-US", "zh"),
        ("en", "zh-CN,zh;q=0.9", "en"),
        (None, "zh-TW,zh;q=0.9", "zh"),
        (None, "de,en", "en"),
        ("fr", "de", "en"),
        (None, "", "en"),
    ],
)
def test_the_choice_wins_over_the_browser(cookie, header, expected):
    request = SimpleNamespace(cookies={"gainz_lang": cookie} if cookie else {}, headers={"accept-language": header})
    assert language(request) == expected


def test_no_request_is_english():
    assert language(None) == "en"
