"""Scanning a package, claims, and what stands in the way of a load."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from backends.base import (
    Backend, BrokenFile, Claim, ConfigConflict, InvalidRequest, LocalOptions, MissingRequirement, ModelDir, ModelInfo, NotSupported,
    RegistryError, UnknownFormat, UnsafeFile)
from backends.registry import Registry, load_decoder, load_model
from backends.sizes import check_config

FAKES = Path(__file__).parent / "fakes"
sys.path.insert(0, str(FAKES))


def backend(name: str, score: int | None = 1, requires=(), order: int = 100) -> Backend:
    claims = lambda model: None if score is None else Claim(score, f"{name} likes it")  # noqa: E731
    return Backend(name, name.title(), requires, LocalOptions, claims, lambda *_: None, order=order)


def registry(*backends: Backend) -> Registry:
    return Registry.of({f"{number}.py": one for number, one in enumerate(backends)})


@pytest.fixture
def package(tmp_path, monkeypatch, request):
    """write(file=text …) → name of an importable package with those files"""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"shelf_{abs(hash(request.node.name))}"
    (tmp_path / name).mkdir()

    def write(**files: str) -> str:
        for stem, text in {"__init__": "", **files}.items():
            (tmp_path / name / f"{stem}.py").write_text(text)
        return name
    return write


MAKE = """
from backends.base import Backend, LocalOptions
BACKEND = Backend({name!r}, "T", {requires!r}, LocalOptions, lambda m: None, lambda *a: None, order={order})
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "weights.bin").write_bytes(b"")
    return ModelDir.of(tmp_path / "m")


def test_scan_finds_the_files_that_define_one_and_imports_no_other(package):
    name = package(b=MAKE.format(name="b", requires=(), order=2), a=MAKE.format(name="a", requires=(), order=2),
                   first=MAKE.format(name="z", requires=(), order=1), heavy="raise SystemExit('imported')")
    assert [one.name for one in Registry.scan(name).backends] == ["z", "a", "b"]


def test_two_files_with_one_name_are_both_named(package):
    name = package(one=MAKE.format(name="same", requires=(), order=1), two=MAKE.format(name="same", requires=(), order=1))
    with pytest.raises(RegistryError, match=r"one\.py.*two\.py"):
        Registry.scan(name)


def test_a_file_that_needs_what_is_missing_is_shown_and_not_absent(package):
    (one,) = Registry.scan(package(odd="import no_such_library\nBACKEND = None")).backends
    assert one.name == "odd" and one.missing() == ("no_such_library",)
    with pytest.raises(MissingRequirement, match="no_such_library"):
        Registry.of({"odd": one}).pick(None, "odd")


def test_a_file_that_is_broken_is_named(package):
    with pytest.raises(RegistryError, match=r"bad\.py"):
        Registry.scan(package(bad="BACKEND = 5"))


def test_the_highest_claim_wins_and_none_is_an_error_that_shows_the_files(model):
    found, claim = registry(backend("low", 1), backend("none", None), backend("high", 2)).claim(model)
    assert found.name == "high" and claim.score == 2
    with pytest.raises(UnknownFormat, match=r"weights\.bin"):
        registry(backend("none", None)).claim(model)


def test_a_tie_names_both(model):
    with pytest.raises(RegistryError, match="one and two"):
        registry(backend("one", 5), backend("two", 5), backend("low", 1)).claim(model)


def test_a_backends_own_refusal_is_not_overruled(model):
    def refuse(_):
        raise ConfigConflict("bits are 4 and 8")
    strict = Backend("strict", "S", (), LocalOptions, refuse, lambda *_: None)
    with pytest.raises(ConfigConflict):
        registry(backend("careless", 1), strict).claim(model)


def test_unknown_backend_lists_the_known_ones():
    with pytest.raises(InvalidRequest, match="one, two"):
        registry(backend("two"), backend("one")).get("three")


def test_a_missing_requirement_is_named(model):
    with pytest.raises(MissingRequirement, match="no_such_library"):
        registry(backend("needy", 1, requires=("no_such_library",))).pick(model)


def test_the_real_backends_scan_without_a_heavy_library():
    script = ("import sys; from backends.registry import Registry; found = Registry.scan().backends\n"
              "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
              "assert len({one.name for one in found}) == len(found)")
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1])


def test_load_in_this_process_takes_the_backends_options(monkeypatch, model):
    seen = []

    def load(where, options, progress, cancel):
        seen.append((where.name, options.streams, cancel.is_set()))
        return type("Text", (), {"info": ModelInfo("m", "t", "t"), "close": lambda self: seen.append("closed")})()

    one = Backend("t", "T", (), LocalOptions, lambda _: Claim(1, ""), load)
    monkeypatch.setattr(Registry, "scan", classmethod(lambda cls: Registry((one,))))
    load_model(model.path, streams=3)
    assert seen == [("m", 3, False)]
    with pytest.raises(InvalidRequest, match="streams"):
        load_model(model.path, stream=3)
    with pytest.raises(NotSupported):
        load_decoder(model.path)
    assert seen[-1] == "closed"


@pytest.mark.parametrize("change", [{"num_hidden_layers": 10**9}, {"num_hidden_layers": -1}, {"num_hidden_layers": "3"}, {"hidden_size": 3.5},
                                    {"max_position_embeddings": 10**12}, {"vocab_size": True}, {"num_attention_heads": 0},
                                    {"rms_norm_eps": "x"}, {"rms_norm_eps": 0}, {"rms_norm_eps": float("nan")}, {"rope_theta": 0},
                                    {"rope_theta": "1e4"}, {"eos_token_id": 512}, {"eos_token_id": [1, -1]}, {"eos_token_id": "</s>"}])
def test_a_config_of_impossible_sizes_is_refused_by_its_key(tmp_path, change):
    """One number in a file of somebody else's must not become a loop without an end."""
    folder = tmp_path / "model"
    shutil.copytree(Path(__file__).parent / "fixtures" / "llama-fp16", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(BrokenFile, match=next(iter(change))):
        Registry.scan().claim(ModelDir.of(folder))


@pytest.mark.parametrize("rule, key", [
    ({"rope_type": "default", "rope_theta": -1.0}, "rope_theta"), ({"rope_type": "linear", "factor": 0}, "factor"),
    ({"full_attention": {"rope_type": "default", "rope_theta": 0}}, "rope_theta")])
def test_a_rule_of_rotation_is_refused_by_its_key(rule, key):
    for name in ("rope_parameters", "rope_scaling"):
        with pytest.raises(BrokenFile, match=f"config.json: {key}"):
            check_config({name: rule})


def test_a_config_of_ordinary_numbers_is_none_of_that():
    check_config({"rms_norm_eps": 1e-5, "layer_norm_eps": None, "rope_theta": 5e5, "vocab_size": 9, "eos_token_id": [8, 0]})
    check_config({"eos_token_id": 50256})                       # no vocab_size: the family's default, which is not known here


def test_a_folder_of_pickles_is_refused_with_what_to_do(tmp_path):                  # CK-13, before anything is loaded
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UnsafeFile, match="pickles.*Convert it to safetensors"):
        Registry.scan().claim(ModelDir.of(tmp_path))
