"""What the README, the Makefile and the examples say is true: flags exist, commands run, files are there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from scripted_server import Server, serving, write_model

from xllm_cli.argv import canonical
from xllm_cli.bench.serve import group as bench
from xllm_cli.cli import xllm

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TEXTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "Makefile",
    *sorted(path for path in (ROOT / "examples").iterdir() if path.is_file()),
]
OF_OTHER_PROGRAMS = {
    "extra-index-url",
    "disable-pip-version-check",
    "quiet",
    "editable",
    "no-build-isolation",
    "no-deps",
}
OF_OTHER_PROGRAMS |= {"no-loadscope-reorder", "wheel-dir", "dist", "check", "fix", "strict", "no-compile"}
OF_OTHER_PROGRAMS |= {"policy", "health-check-interval-secs", "cb-failure-threshold"}  # of routers


def blocks(language: str) -> list[str]:
    """The fenced blocks of the README in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def shell_lines() -> list[str]:
    """Every command of the README, continued lines joined and comments gone."""
    joined = "\n".join(blocks("sh")).replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in joined.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("readme")
    with serving(folder, write_model(folder / "smollm2-135m-instruct")) as running:
        yield running.wait_ready()


def options(command: click.Command) -> Iterator[str]:
    """The long names of a command's options and of those below it, without their dashes."""
    for parameter in command.params:
        yield from (name[2:] for name in parameter.opts if name.startswith("--"))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from options(below)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_flag_is_known(path: Path) -> None:
    known = OF_OTHER_PROGRAMS | set(options(xllm)) | set(options(bench))
    mentioned = set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", path.read_text(encoding="utf-8")))
    assert not [name for name in mentioned - known if canonical([f"--{name}=1"]).errors]


@pytest.mark.parametrize("language", ["sh", "bash"])
def test_shell_blocks_are_clean(language: str) -> None:
    if shutil.which("shellcheck") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("shellcheck is not installed")
    for block in blocks(language):
        command = ["shellcheck", "--shell=bash", "-"]
        checked = subprocess.run(command, input=block, capture_output=True, text=True, timeout=60, check=False)
        assert checked.returncode == 0, block + checked.stdout


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
    named = {line.split()[1] for line in shell_lines() if line.startswith("make ")}
    assert named and named <= targets
    assert set(re.findall(r"`make (\w+)", README)) <= targets


@pytest.mark.parametrize("line", [line for line in shell_lines() if "xllm serve" in line])
def test_serve_commands_are_valid(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = line.split("xllm ")[1].split()
    asked = [] if any(word.startswith(("--help", "--print_config")) for word in arguments) else ["--print_config"]
    assert xllm.main(arguments + asked, prog_name="xllm", standalone_mode=False) == 0
    assert capsys.readouterr().out


def test_the_flags_of_make_serve_are_valid() -> None:
    flags = re.findall(r"--(?:enable|vmm)_\w+=\w+", MAKEFILE)
    assert "--vmm_elastic=true" in flags
    assert not canonical(flags).errors


@pytest.mark.server
@pytest.mark.parametrize("line", [line for line in shell_lines() if line.startswith("curl")])
def test_curl_commands_are_answered(line: str, server: Server) -> None:
    command = line.replace("http://127.0.0.1:8010", server.url).replace("curl ", "curl -sS --fail-with-body ", 1)
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout


@pytest.mark.server
def test_python_blocks_run(server: Server) -> None:
    (program,) = blocks("python")
    program = program.replace("http://127.0.0.1:8010", server.url)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "sea" in result.stdout  # the scripted engine says the prompt again


def test_named_files_exist() -> None:
    prose = re.sub(r"^```.*?^```", "", README.split("<!-- flags:begin -->")[0], flags=re.MULTILINE | re.DOTALL)
    names = re.findall(r"`((?:[\w.]+/)*[\w.]+(?:\.py|\.h|\.txt|/|/run))`", prose)
    places = [ROOT, ROOT / "xllm_cli"]
    made = {".venv/", "build/", "dist/"}
    missing = [name for name in names if name not in made and not any((place / name).exists() for place in places)]
    assert len(names) > 15
    assert not missing
