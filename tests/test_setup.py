"""Set-up, command line and the files made from code: what a newcomer meets before the first page."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from backends.base import BadSetting, PortTaken
from backends.errors import GainzError
from gainz_ui import cli, server
from gainz_ui.services import troubleshooting
from gainz_ui.settings import Settings

ROOT = Path(__file__).parents[1]


def run(*arguments, **more):
    """As a person does, in a process of its own."""
    return subprocess.run([sys.executable, "app.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, **more)


def call(*arguments):
    """The same in this process, which is much sooner; for what starts nothing."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = cli.main(arguments)
        except SystemExit as ended:
            code = ended.code
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


# ---------------------------------------------------------------------------------------------- made files
def test_troubleshooting_is_made_from_the_errors():
    assert (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8") == troubleshooting.text(), \
        "run: python app.py doctor --troubleshooting > docs/troubleshooting.md"
    for kind in GainzError.registry.values():
        assert f"## {kind.code}" in troubleshooting.text()


def test_every_code_that_the_api_itself_answers_with_is_explained():
    from pydantic_core import core_schema
    told = {code for code, *_ in troubleshooting.WIRE} | set(GainzError.registry) | set(get_args(core_schema.ErrorType))    # faults.py translates these
    for file in (ROOT / "gainz_ui" / "api").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for text in (item.value for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str)):
                if re.fullmatch(r"[a-z]+_(refused|required|json|error|large|allowed|found|request)", text):
                    assert text in told, f"{file.name}: {text}"


def test_the_errors_name_only_tabs_and_addresses_that_there_are():
    from gainz_ui import i18n, shell
    from gainz_ui.api import native
    texts = troubleshooting.text() + " ".join(text for language in i18n.LANGUAGES for text in i18n.texts(language).values())
    tabs = {i18n.texts("en")[tab.title] for tab in shell.scan()}
    named = set(re.findall(r"\b([A-Z]\w+) tab\b", texts)) - {"The", "This", "Another"}
    assert named <= tabs, named - tabs
    routes = {route.path for route in native.router(None, None).routes}
    addresses = {match for match in re.findall(r"(?<![\w/.~…-])(/[a-z][\w/]*)", troubleshooting.text())}
    assert addresses <= routes, addresses - routes


def test_torch_is_pinned_and_the_rest_has_bounds():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert "torch==2.13.0" in lines
    assert all(re.search(r"==|~=|<", line) for line in lines), lines
    assert not any("://" in line for line in lines)


# ---------------------------------------------------------------------------------------------- make
def make(tmp_path: Path, *arguments: str, **environment: str):
    for name in ("Makefile", "requirements.txt", "requirements-dev.txt"):
        if not (tmp_path / name).exists():     # a newer copy would be a changed file
            shutil.copy(ROOT / name, tmp_path)
    return subprocess.run(["make", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                          env={**os.environ, **environment})


@pytest.fixture
def fake_python(tmp_path: Path):
    """A python that logs what it is asked, makes fake virtual environments, and fails where told."""
    path = tmp_path / "fakepython"
    path.write_text(f"""#!/bin/sh
echo "$@" >> {tmp_path}/log
case "$*" in
  *"-m venv "*) mkdir -p .venv/bin; cp "$0" .venv/bin/python;;
  *"$FAIL_ON"*) [ -n "$FAIL_ON" ] && exit 1;;
esac
exit 0
""")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make on this machine")
def test_make_installs_once_and_goes_on_after_a_failure(tmp_path, fake_python):
    failed = make(tmp_path, "venv", f"PYTHON={fake_python}", FAIL_ON="-r requirements.txt")
    assert failed.returncode and "could not be installed" in failed.stderr and "Online?" in failed.stderr
    again = make(tmp_path, "venv", f"PYTHON={fake_python}")
    assert again.returncode == 0, again.stderr
    log = (tmp_path / "log").read_text()
    assert log.count("-m venv .venv") == 1 and log.count("install --quiet -r requirements.txt") == 2
    before = log.count("\n")
    assert make(tmp_path, "venv", f"PYTHON={fake_python}").returncode == 0
    after = (tmp_path / "log").read_text()
    assert "install" not in "\n".join(after.splitlines()[before:])     # a second make installs nothing


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make on this machine")
def test_an_old_python_is_one_clear_line(tmp_path):
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    answer = make(tmp_path, "venv", f"PYTHON={old}")
    assert answer.returncode and "Python 3.11 or newer" in answer.stderr and "PYTHON=" in answer.stderr


def test_app_says_so_itself_on_an_old_python(monkeypatch, capsys):
    code = compile((ROOT / "app.py").read_text(), "app.py", "exec")
    monkeypatch.setattr(sys, "version_info", (3, 9, 1, "final", 0))
    with pytest.raises(SystemExit) as ended:
        exec(code, {"__name__": "app"})
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "3.11 or newer" in line and "3.9" in line


# ---------------------------------------------------------------------------------------------- the command line
def test_every_command_has_help_and_is_real():
    found = cli.scan()
    assert {"serve", "doctor", "models", "pull", "import", "verify", "remove"} <= set(found) and list(found)[0] == "serve"
    for name in found:
        answer = call(name, "--help")
        assert answer.returncode == 0 and found[name].HELP.split()[0] in answer.stdout
    whole = run("--help")
    assert whole.returncode == 0 and all(name in whole.stdout for name in found)


def test_options_without_a_command_mean_serve():
    found = cli.scan()
    assert cli.with_command([], found) == ["serve"]
    assert cli.with_command(["--port", "8000"], found) == ["serve", "--port", "8000"]
    assert cli.with_command(["doctor", "--json"], found) == ["doctor", "--json"]
    assert cli.with_command(["--help"], found) == ["--help"]


@pytest.mark.parametrize("arguments", [["bench"], ["--nonsense"], ["serve", "--port", "x"], ["serve", "--port", "70000"],
                                       ["models", "--port", "1"], ["pull"], ["serve", "--config", "/nowhere.toml"]])
def test_a_wrong_argument_is_exit_code_2(arguments):
    answer = call(*arguments)
    assert answer.returncode == 2 and answer.stdout == "" and answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_misspelt_environment_variable_is_named():
    answer = run("models", env={**os.environ, "GAINZ_PROT": "1"})
    assert answer.returncode == 2 and "GAINZ_PROT" in answer.stderr and len(answer.stderr.splitlines()) == 1


def test_what_cannot_be_done_is_exit_code_1_and_one_line(tmp_path):
    for arguments in (["verify", "absent"], ["remove", "absent"], ["remove", "../x"], ["import", str(tmp_path / "absent")]):
        answer = call(*arguments, "--models", str(tmp_path))
        assert answer.returncode == 1 and answer.stdout == ""
        (line,) = answer.stderr.splitlines()
        assert line.startswith("Error: ")


def test_import_models_verify_remove_from_the_command_line(tmp_path):
    models = ("--models", str(tmp_path / "models"))
    fixture = ROOT / "tests" / "fixtures" / "llama-fp16"
    assert call("import", str(fixture), "--name", "tiny", *models).stdout == "tiny\n"
    listed = run("models", "--json", *models)
    (entry,) = json.loads(listed.stdout)
    size = sum(file.stat().st_size for file in (tmp_path / "models" / "tiny").iterdir() if file.name != "manifest.json")
    assert list(entry)[:5] == ["name", "format", "bits", "revision", "bytes"] and listed.returncode == 0
    assert (entry["name"], entry["format"], entry["bits"]) == ("tiny", "safetensors float16", 16) and 0 <= entry["bytes"] - size < 5000
    assert call("verify", "tiny", *models).returncode == 0
    weights = tmp_path / "models" / "tiny" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    bad = call("verify", "tiny", *models)
    assert bad.returncode == 1 and "checksum" in bad.stdout and "fetch it again" in bad.stderr
    asked = call("remove", "tiny", *models)                    # nobody to ask, and nothing said
    assert asked.returncode == 2 and "--yes" in asked.stderr and weights.exists()
    assert call("remove", "tiny", "--yes", *models).returncode == 0
    assert not (tmp_path / "models" / "tiny").exists()


# ---------------------------------------------------------------------------------------------- the port and the network
def test_a_taken_port_is_one_line_with_another_number(tmp_path):
    with server.bind("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        answer = run("serve", "--port", str(port), "--no-starter", "--models", str(tmp_path))
        assert answer.returncode == 1 and f"Port {port} is in use" in answer.stderr and "--port" in answer.stderr
        assert "Traceback" not in answer.stderr
        with pytest.raises(PortTaken):
            server.bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no such host", "192.0.2.1"])
def test_an_address_that_is_not_ours(host):
    with pytest.raises(BadSetting):
        server.bind(host, 0)


def test_gr_04_the_network_needs_a_key_or_plain_words(tmp_path):
    answer = run("serve", "--host", "0.0.0.0", "--port", "0", "--models", str(tmp_path))
    assert answer.returncode == 2 and "--insecure-no-key" in answer.stderr and "GAINZ_API_KEY" in answer.stderr
    assert Settings().host == "127.0.0.1" and Settings().api_key == ""


def test_the_key_is_not_shown():
    assert "hunter2" not in repr(Settings(api_key="hunter2"))


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadSetting, match="cannot be made"):
        server.furnish(Settings(models=tmp_path / "file" / "models", outputs=tmp_path, logs=tmp_path))


def test_a_mistyped_folder_is_said_not_made(tmp_path):
    answer = run("serve", "--port", "0", "--models", str(tmp_path / "nope" / "models"))
    assert answer.returncode == 2 and "There is no folder" in answer.stderr and not (tmp_path / "nope").exists()
