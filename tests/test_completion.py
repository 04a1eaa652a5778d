"""Completion in real bash, zsh and fish: a TAB is pressed in a terminal, and what the shell then shows is read."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from xllm_cli.cli import main
from xllm_cli.commands.completion import SCRIPTS

ROOT = Path(__file__).parents[1]
START = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "bind 'set show-all-if-ambiguous on'"),
    "zsh": (["zsh", "-f", "-i"], "autoload -Uz compinit; compinit -u -D"),
}


class Terminal:
    """bash or zsh in a terminal, with the completion of `xllm` loaded."""

    def __init__(self, shell: str, folder: Path) -> None:
        command, first = START[shell]
        self._fd, follower = pty.openpty()
        self._process = subprocess.Popen(
            command, stdin=follower, stdout=follower, stderr=follower, env=environment(folder), cwd=folder,
            start_new_session=True,
        )  # fmt: skip
        os.close(follower)
        for line in (first, f'eval "$(xllm completion {shell})"'):
            self._type(f"{line}; echo lo''aded\r", "loaded")

    def complete(self, line: str, *expected: str) -> str:
        """What the terminal shows once all that is `expected` is there after the line and a TAB."""
        shown = self._type(f"{line}\t", *expected)
        self._type("\x15echo dr''opped\r", "dropped")  # the line, and all that is still to be shown for it
        return shown

    def _type(self, keys: str, *until: str) -> str:
        os.write(self._fd, keys.encode())
        shown, deadline = "", time.monotonic() + 60
        while missing := [text for text in until if text not in shown]:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self._fd], [], [], left)[0], f"{missing} not in {shown!r}"
            shown += re.sub(
                r"\x1b\[[0-9;?]*[A-Za-z]|[\r\x07\x08]", "", os.read(self._fd, 65536).decode("utf-8", "replace")
            )
        return shown

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._fd)


class Fish:
    """fish, asked for the candidates that it would show."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def complete(self, line: str, *expected: str) -> str:
        """The line as it would be with each candidate; all that is `expected` is among them."""
        program = "xllm completion fish | source; complete -C $argv[1]"
        ran = subprocess.run(
            ["fish", "--no-config", "-c", program, line], env=environment(self._folder), cwd=self._folder, text=True,
            capture_output=True, timeout=60, check=True,
        )  # fmt: skip
        before = line[: line.rfind(" ") + 1]
        lines = "\n".join(before + row.partition("\t")[0] for row in ran.stdout.splitlines())
        assert all(text.rstrip() in lines for text in expected), f"{expected} not in {lines!r}"
        return lines

    def close(self) -> None:
        """Nothing runs."""


def environment(folder: Path) -> dict[str, str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    fixed = {"PS1": "> ", "TERM": "dumb", "LANG": "C.UTF-8", "XDG_CONFIG_HOME": str(folder)}
    return {"PATH": path, "HOME": str(folder), "PYTHONPATH": str(ROOT), **fixed}


@pytest.fixture(params=sorted(SCRIPTS), scope="module")
def terminal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal | Fish]:
    if shutil.which(request.param) is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "bin").mkdir()
    (folder / "bin" / "xllm").write_text(f'#!/bin/sh\nexec {sys.executable} -m xllm_cli.cli "$@"\n')
    (folder / "bin" / "xllm").chmod(0o755)
    (folder / "models" / "llama").mkdir(parents=True)
    (folder / "notes.txt").write_text("no folder")
    opened = Fish(folder) if request.param == "fish" else Terminal(request.param, folder)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("xllm comp", "xllm completion "),
        ("xllm serve --enable_vmm_kv", "--enable_vmm_kvcache="),
        ("xllm serve --enable_vmm_kvcache=f", "--enable_vmm_kvcache=false"),
        ("xllm serve --enable_vmm_kvcache tr", "--enable_vmm_kvcache true"),
        ("xllm serve --port=1 --device=n", "--device=npu"),
        ("xllm serve --log_level wa", "--log_level warning"),
        ("xllm serve --model=mod", "--model=models/"),
        ("xllm serve --model models/l", "--model models/llama/"),
    ],
)
def test_what_tab_adds(terminal: Terminal | Fish, line: str, expected: str) -> None:
    terminal.complete(line, expected)


def test_what_tab_lists(terminal: Terminal | Fish) -> None:
    terminal.complete("xllm serve --log_level=", "debug", "info", "warning", "error")
    assert "notes.txt" not in terminal.complete("xllm serve --model=", "models/")


def answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    monkeypatch.setenv("_XLLM_COMPLETE", "fish_complete")
    monkeypatch.setenv("_XLLM_LINE", line)
    with pytest.raises(SystemExit):
        main([])
    return [row.partition("\t")[0] for row in capsys.readouterr().out.splitlines() if row]


def test_candidates(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "flags.json").touch()

    def ask(line: str) -> list[str]:
        return answers(capsys, monkeypatch, line)

    assert ask("xllm completion ") == ["bash", "zsh", "fish"]
    assert {"serve", "vmm"} <= set(ask("xllm bench "))
    assert "--quick" in ask("xllm bench vmm --")
    assert ask("xllm --enable-vmm-kv") == ["--enable-vmm-kvcache="]
    assert ask("A=1 /opt/bin/xllm serve --novmm_el") == ["--novmm_elastic"]
    assert ask("xllm serve ") == ask("xllm serve --config_json_file=x --model ") == ["a folder/"]
    assert ask("xllm serve --config_json_file=") == ["--config_json_file=a folder/", "--config_json_file=flags.json"]
    assert ask("xllm serve --model=/no/such/") == ask("xllm serve --port=") == ask("xllm zzz") == []
    assert ask("xllm serve --wrong=1 --enable_vmm_kvcache --log_level=D") == []


@pytest.mark.parametrize("shell", sorted(SCRIPTS))
def test_the_script_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", shell])
    assert ended.value.code == 0 and capsys.readouterr().out == SCRIPTS[shell]
