"""GGUF headers: what a good file says, and that each kind of damage is one typed error, quickly and without memory."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
import time

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from backends.errors import BrokenFile, LoadError, UnknownFormat, UnsupportedTensor
from backends.gguf_file import TYPES, read, read_model
from backends.gguf_strings import Strings, string_starts
from tests.gguf_maker import entry, pair, random_blocks, raw_file, text, write

ARCH = pair("general.architecture", 8, text("llama"))


def small(tmp_path, name="model.gguf"):
    return write(tmp_path / name, "llama", {"block_count": 2, "rope.freq_base": 5e5,
                                            "tokenizer.ggml.tokens": ["a", "ü", "▁b"],
                                            "tokenizer.ggml.scores": [0.5, 1.0, -2.0], "general.name": "small",
                                            "tokenizer.ggml.add_bos_token": True},
                 {"a.weight": np.arange(64, dtype=np.float32).reshape(2, 32),
                  "b.weight": (random_blocks("Q4_K", 3, 512), "Q4_K")})


def test_reads_what_the_gguf_package_wrote(tmp_path):
    file = read(small(tmp_path))
    assert (file.version, file.alignment, file.architecture, file.metadata["general.name"]) == (3, 32, "llama", "small")
    assert file.get("block_count") == 2 and file.get("rope.freq_base") == 5e5 and file.get("absent", 7) == 7
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, Strings) and list(tokens) == ["a", "ü", "▁b"] == [tokens[0], tokens[1], tokens[-1]]
    assert list(file.metadata["tokenizer.ggml.scores"]) == [0.5, 1.0, -2.0]


def test_directory_equals_that_of_the_gguf_package(tmp_path):
    path = small(tmp_path)
    theirs = [(t.name, tuple(int(n) for n in reversed(t.shape)), t.tensor_type.name, int(t.data_offset), int(t.n_bytes))
              for t in gguf.GGUFReader(path).tensors]
    ours = [(t.name, t.shape, t.type, t.offset, t.bytes) for t in read(path).tensors.values()]
    assert ours == theirs


def test_type_table_equals_that_of_ggml():
    assert {number: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGML_QUANT_SIZES
            for number in [int(kind)]} == TYPES


def test_type_and_bits_of_the_file_are_those_of_its_weights(tmp_path):
    file = read(small(tmp_path))
    assert file.weight_type() == "Q4_K" and file.parameters() == 64 + 3 * 512
    assert file.bits() == pytest.approx((64 * 32 + 3 * 512 * 4.5) / (64 + 3 * 512))


STRINGS = [["a", "ü", "▁b"], ["one"], ["a", "", "b"], ["", ""], ["\0"], ["a\0", "\0b", "c"], ["x" * 127, "y" * 128, "z"],
           ["x" * 194, "\0" * 6, "q"], ["w", "\0" + "q" * 255], ["w" * 256, "v"], ["\0" * 7, "a"], ["a" + "\0" * 7 + "b"],
           ["ü" * 63, "ü" * 64]]


@pytest.mark.parametrize("strings", STRINGS, ids=repr)
def test_strings_are_what_was_written(tmp_path, strings):
    path = write(tmp_path / "s.gguf", "llama", {"tokenizer.ggml.tokens": strings}, {"a.weight": np.ones((1, 32), np.float32)})
    found = read(path).metadata["tokenizer.ggml.tokens"]
    assert list(found) == strings == [found[i] for i in range(len(strings))]


def test_a_header_is_kept_only_for_an_unchanged_file(tmp_path):
    path = small(tmp_path)
    os.utime(path, (1e9, 1e9))                                     # long untouched: what was read may serve again
    first = read(path)
    assert read(path) is first
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"small", b"SMALL"))              # as many bytes, changed just now
    assert read(path).metadata["general.name"] == "SMALL"
    path.write_bytes(raw.replace(b"small", b"sMALL"))              # again within the same tick of the clock, perhaps
    assert read(path).metadata["general.name"] == "sMALL"


DATA = bytes(4096)
LARGE = 2**62
DAMAGED = {
    "empty key": ([pair("", 4, struct.pack("<I", 1))], [], {}),
    "key twice": ([ARCH, ARCH], [], {}),
    "array of 2^62 numbers": ([pair("x", 9, struct.pack("<IQ", 4, LARGE))], [], {}),
    "array of 2^62 strings": ([pair("x", 9, struct.pack("<IQ", 8, LARGE))], [], {}),
    "array of 2^64 - 1 bytes": ([pair("x", 9, struct.pack("<IQ", 0, 2**64 - 1))], [], {}),
    "string of 2^62 bytes": ([text("x") + struct.pack("<IQ", 8, LARGE)], [], {}),
    "key of 2^62 bytes": ([struct.pack("<Q", LARGE)], [], {}),
    "string in an array beyond the file": ([pair("x", 9, struct.pack("<IQQ", 8, 3, LARGE))], [], {}),
    "array of arrays": ([pair("x", 9, struct.pack("<IQ", 9, 1))], [], {}),
    "unknown value type": ([pair("x", 13, b"")], [], {}),
    "key that is not UTF-8": ([text(b"\xff\xfe") + struct.pack("<II", 4, 1)], [], {}),
    "2^62 keys": ([ARCH], [], {"counts": (0, LARGE)}),
    "2^62 tensors": ([ARCH], [], {"counts": (LARGE, 1)}),
    "9 dimensions": ([ARCH], [entry("t", [1] * 9, 0, 0)], {}),
    "no dimensions": ([ARCH], [entry("t", [], 0, 0)], {}),
    "2^32 - 1 dimensions": ([ARCH], [text("t") + struct.pack("<I", 2**32 - 1)], {}),
    "empty tensor": ([ARCH], [entry("t", [32, 0], 0, 0)], {}),
    "tensor twice": ([ARCH], [entry("t", [8], 0, 0), entry("t", [8], 0, 32)], {}),
    "tensor without a name": ([ARCH], [entry("", [8], 0, 0)], {}),
    "shape beyond the file": ([ARCH], [entry("t", [2**40, 2**20], 0, 0)], {}),
    "offset beyond the file": ([ARCH], [entry("t", [8], 0, 1 << 40)], {}),
    "offset that is not aligned": ([ARCH], [entry("t", [8], 0, 4)], {}),
    "tensors that overlap": ([ARCH], [entry("t", [64], 0, 0), entry("u", [8], 0, 32)], {}),
    "row of half a block": ([ARCH], [entry("t", [48, 2], 2, 0)], {}),
    "alignment 0": ([ARCH, pair("general.alignment", 4, struct.pack("<I", 0))], [], {}),
    "alignment 3": ([ARCH, pair("general.alignment", 4, struct.pack("<I", 3))], [], {}),
    "alignment 2^31": ([ARCH, pair("general.alignment", 4, struct.pack("<I", 2**31))], [], {}),
    "alignment that is a text": ([ARCH, pair("general.alignment", 8, text("32"))], [], {}),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_one_error_at_once(tmp_path, damage):
    pairs, entries, more = DAMAGED[damage]
    path = raw_file(tmp_path / "m.gguf", pairs, entries, DATA, **more)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(BrokenFile) as caught:
        read(path)
    assert time.perf_counter() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000     # kB
    assert "m.gguf" in str(caught.value)


def test_unknown_tensor_type_is_named_with_its_tensor(tmp_path):
    path = raw_file(tmp_path / "m.gguf", [ARCH], [entry("blk.0.attn_q.weight", [32, 2], 4, 0)], DATA)
    with pytest.raises(UnsupportedTensor, match="blk.0.attn_q.weight.*unknown type 4"):
        read(path)


@pytest.mark.parametrize("version,magic,words", [(1, b"GGUF", "version 1"), (4, b"GGUF", "version 4"),
                                                 (3 << 24, b"GGUF", "big-endian"),
                                                 (3, b"GGJT", "not a GGUF file")])
def test_other_containers_are_refused_by_name(tmp_path, version, magic, words):
    with pytest.raises(UnknownFormat, match=words):
        read(raw_file(tmp_path / "m.gguf", [ARCH], [], DATA, version=version, magic=magic))


def test_version_2_is_read(tmp_path):
    assert read(raw_file(tmp_path / "m.gguf", [ARCH], [], version=2)).version == 2


@pytest.mark.parametrize("length", [0, 3, 8, 23])
def test_shorter_than_a_header(tmp_path, length):
    path = tmp_path / "m.gguf"
    path.write_bytes((b"GGUF" + struct.pack("<IQQ", 3, 0, 0))[:length])
    with pytest.raises(BrokenFile):
        read(path)


def test_cut_at_every_place_is_a_load_error(tmp_path):
    whole = small(tmp_path).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 700, 7), *(len(whole) * part // 100 for part in (10, 50, 90, 99)), len(whole) - 33]:
        path.write_bytes(whole[:length])
        with pytest.raises(LoadError):
            read(path)


def test_cut_large_file_costs_neither_time_nor_memory(tmp_path):
    """CK-24 at size: 64 MB whole, cut at 10, 50 and 99 %, each in a process of its own."""
    path = tmp_path / "large.gguf"
    write(path, "llama", {"tokenizer.ggml.tokens": [f"token{i}" for i in range(20_000)]},
          {"t": np.zeros((4096, 4096), np.float32)})
    size = path.stat().st_size
    code = ("import resource,sys,time\nfrom backends.errors import BrokenFile\nfrom backends.gguf_file import read_model\n"
            "before=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; start=time.perf_counter()\n"
            "try: read_model(sys.argv[1])\n"
            "except BrokenFile: print(time.perf_counter()-start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss-before)")
    for part in (99, 50, 10):
        with open(path, "r+b") as file:
            file.truncate(size * part // 100)
        seconds, kilobytes = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True,
                                            check=True).stdout.split()
        assert float(seconds) < 1 and float(kilobytes) < 50_000


def test_flipped_bytes_never_give_another_exception(tmp_path):
    """Whatever a byte becomes, the answer is a file or a LoadError."""
    whole = bytearray(small(tmp_path).read_bytes())
    path, rng = tmp_path / "flipped.gguf", np.random.default_rng(1)
    broken = 0
    for at in rng.integers(0, 700, 300):
        copy = bytearray(whole)
        copy[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(copy)
        try:
            read(path)
        except LoadError:
            broken += 1
    assert broken > 50


def test_a_missing_file_is_a_broken_file(tmp_path):
    with pytest.raises(BrokenFile):
        read(tmp_path / "absent.gguf")


# ---------------------------------------------------------------------------------------------- split files
def split(tmp_path, number, count, tensors, total=2):
    more = {"split.no": number, "split.count": count, "split.tensors.count": total}
    return write(tmp_path / f"m-{number + 1:05}-of-{count:05}.gguf", "llama", more, tensors)


def test_parts_are_one_model(tmp_path):
    first = split(tmp_path, 0, 2, {"a": np.zeros((2, 32), np.float32)})
    second = split(tmp_path, 1, 2, {"b": np.ones((1, 32), np.float32)})
    file = read_model(first)
    assert file.parts == (first, second) and file.tensors["a"].path == first and file.tensors["b"].path == second


def test_a_missing_part_is_named(tmp_path):
    first = split(tmp_path, 0, 2, {"a": np.zeros((2, 32), np.float32)})
    with pytest.raises(BrokenFile, match="m-00002-of-00002.gguf"):
        read_model(first)


def test_a_later_part_alone_is_refused(tmp_path):
    split(tmp_path, 0, 2, {"a": np.zeros((2, 32), np.float32)})
    with pytest.raises(UnknownFormat, match="not the first part"):
        read_model(split(tmp_path, 1, 2, {"b": np.ones((1, 32), np.float32)}))


def test_parts_of_another_model_are_refused(tmp_path):
    first = split(tmp_path, 0, 2, {"a": np.zeros((2, 32), np.float32)})
    split(tmp_path, 1, 2, {"a": np.ones((1, 32), np.float32)})
    with pytest.raises(BrokenFile):
        read_model(first)


def test_too_few_tensors_in_the_parts(tmp_path):
    first = split(tmp_path, 0, 2, {"a": np.zeros((2, 32), np.float32)}, total=3)
    split(tmp_path, 1, 2, {"b": np.ones((1, 32), np.float32)})
    with pytest.raises(BrokenFile, match="2 tensors of 3"):
        read_model(first)


TEXTS = st.one_of(st.text(max_size=9), st.sampled_from(["", "\n", "a\nb", "\0", "a\0" * 9, "ü" * 127, "x" * 255, "x" * 256, "Ġ" * 128,
                                                       "y" * 70_000]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.lists(TEXTS, max_size=40), second=st.lists(TEXTS, max_size=40))
def test_arrays_of_any_strings_come_back(tmp_path, first, second):
    """Whichever of the quick ways a string fits, or none; what follows the array is found."""
    array = lambda texts: struct.pack("<IQ", 8, len(texts)) + b"".join(map(text, texts))                      # noqa: E731
    pairs = [ARCH, pair("a", 9, array(first)), pair("b", 9, array(second)), pair("general.name", 8, text("after"))]
    found = read(raw_file(tmp_path / "m.gguf", pairs, [])).metadata
    assert list(found["a"]) == first and list(found["b"]) == second and found["general.name"] == "after"
    assert [found["a"][i] for i in range(len(first))] == first


def test_lengths_that_lie_are_not_believed():
    """Bytes that look like the length of a string, inside one."""
    texts = [b"ab" + bytes([5]) + bytes(7) + b"12345", b"c", bytes(9), b"", b"d"]
    raw = b"".join(len(word).to_bytes(8, "little") + word for word in texts)
    starts = [0]
    for word in texts:
        starts.append(starts[-1] + 8 + len(word))
    found = string_starts(raw, len(texts)).tolist()
    assert found == starts[1:1 + len(found)]
