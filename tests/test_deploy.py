"""docs/deploy.md, docs/scaling.md and the Docker files name what there is: settings, variables, commands, options, files."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from backends.base import ModelDir
from backends.registry import Registry
from gainz_ui import cli
from gainz_ui.settings import Settings

ROOT = Path(__file__).parents[1]
DOCKER = sorted((ROOT / "docker").glob("Dockerfile.*"))
DOCS = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("deploy.md", "scaling.md")}


def test_the_settings_file_of_the_description_is_one(tmp_path):
    (block,) = re.findall(r"```toml\n(.*?)```", DOCS["deploy.md"], re.DOTALL)
    (tmp_path / "gainz.toml").write_text(block)
    made = Settings.resolve(file=tmp_path / "gainz.toml")
    assert made.remote_private is False and set(tomllib.loads(block)) <= set(Settings.__dataclass_fields__)


@pytest.mark.parametrize("path", DOCKER, ids=lambda path: path.name)
def test_a_docker_file_copies_what_is_there_and_sets_what_is_known(path):
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    copied = re.findall(r"^COPY (\S+) ", text, re.MULTILINE)
    assert copied and all((ROOT / source).exists() for source in copied)
    allowed = (ROOT / ".dockerignore").read_text().split()
    assert all(f"!{source}" in allowed for source in copied), "what is copied must not be left out of the context"
    variables = dict(re.findall(r"(GAINZ_\w+)=(\S+)", text))
    made = Settings.resolve(environment=variables)
    assert (made.host, made.port) == ("0.0.0.0", 7860) and str(made.remote_key_file).startswith("/data/")
    assert re.search(r"^USER gainz$", text, re.MULTILINE) and re.search(r"^STOPSIGNAL SIGTERM$", text, re.MULTILINE)
    for said in re.findall(r"^(?:CMD|ENTRYPOINT) (.*)$|^HEALTHCHECK .*?CMD (.*)$", text, re.MULTILINE):
        parts = json.loads(next(filter(None, said)))
        if "-c" in parts:
            compile(parts[-1], path.name, "exec")


def test_every_command_of_the_descriptions_exists_with_its_options():
    found = cli.scan()
    parser = cli.make_parser(found)
    subs = next(action for action in parser._actions if hasattr(action, "choices") and action.choices).choices
    told = [line.split("#")[0].strip() for text in DOCS.values() for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
            for line in block.splitlines() if line.startswith("python app.py ")]
    assert len(told) >= 12
    for line in told:
        _, _, command, *words = line.split()
        assert command in found, line
        known = {option for action in subs[command]._actions for option in action.option_strings}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_the_folder_made_by_hand_is_a_model(tmp_path):
    (block,) = re.findall(r"```json\n(.*?)```", DOCS["scaling.md"], re.DOTALL)
    (tmp_path / "llama-70b").mkdir()
    (tmp_path / "llama-70b" / "manifest.json").write_text(block)
    assert Registry.scan().claim(ModelDir.of(tmp_path / "llama-70b"))[0].name == "remote"


def test_links_lead_somewhere():
    for file in (*(ROOT / "docs" / name for name in DOCS), ROOT / "README.md", ROOT / "README.zh-CN.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", file.read_text(encoding="utf-8")):
            assert (file.parent / target).exists(), f"{file.name}: {target}"
