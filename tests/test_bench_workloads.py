"""The bundled workloads are whole in both languages; own prompts are read line by line or refused by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.base import InvalidRequest
from gainz_ui.services.bench.workloads import COUNT, KINDS, bundled, from_file, from_name


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_prompts_enough_for_an_interval(kind, language):
    for size in ("short", "long"):
        made = bundled(kind, language, size, 64)
        assert len(made.prompts) == COUNT == len(set(made.prompts))
        assert all(turns[-1].role == "user" and turns[-1].content.strip() for turns in made.prompts)
        assert any("一" <= sign <= "鿿" for sign in made.prompts[0][0].content) == (language == "zh")


def test_long_is_longer_and_depth_is_deep():
    short, long = bundled("code", "en", "short"), bundled("code", "en", "long")
    assert all(len(b[0].content) > len(a[0].content) + 1000 for a, b in zip(short.prompts, long.prompts))
    assert all(12_000 < len(turns[0].content) < 20_000 for turns in bundled("depth").prompts)


def test_a_ladder_has_every_length_equally_often():
    lengths = [len(turns[0].content) for turns in bundled("ladder").prompts]
    assert all(later > 1.5 * earlier for start in (0, 5, 10) for earlier, later in zip(lengths[start:], lengths[start + 1:start + 5]))


def test_names():
    assert from_name("code") == bundled("code") and from_name("code-zh-long-512") == bundled("code", "zh", "long", 512)
    assert from_name("second").prompts[0][1].role == "assistant"
    for wrong in ("", "poems", "code-fr", "code-zh-en", "code-1", "prose--"):
        with pytest.raises(InvalidRequest):
            from_name(wrong)


def test_own_prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes('\ufeffplain words\r\n\r\n{"prompt": "one"}\r\n"two"\n{"messages": [{"role": "system", "content": "s"}, '
                     '{"role": "user", "content": "你好"}]}'.encode())
    made = from_file(path, 32)
    assert [turns[-1].content for turns in made.prompts] == ["plain words", "one", "two", "你好"] and made.tokens == 32


@pytest.mark.parametrize("line", ['{"prompt": 3}', '{"text": "a"}', '{"prompt"', '{"messages": [{"role": "user"}]}',
                                  '{"messages": "hello"}'])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "mine.jsonl"
    path.write_text("fine\n" + line + "\n")
    with pytest.raises(InvalidRequest, match="Line 2"):
        from_file(path, 32)


def test_a_file_that_is_not_there_is_named_with_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest, match=r"There is no file .*mine\.txt") as error:
        from_file(Path("mine.txt"), 32)
    assert str(tmp_path / "mine.txt") in error.value.cause and "UTF-8" not in str(error.value)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        from_file(tmp_path, 32)


def test_no_prompts_no_file_no_text(tmp_path):
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("empty", "binary", "missing"):
        with pytest.raises(InvalidRequest):
            from_file(tmp_path / name, 32)
