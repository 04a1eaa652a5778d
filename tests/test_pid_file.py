"""The pid file: ours while we live, replaced when its writer is dead, never taken from the living."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_server import ROOT

from xllm_cli.errors import BindError, ConfigError
from xllm_cli.server.pid_file import PidFile

LIVE = (
    "import sys; from xllm_cli.server.pid_file import PidFile; f = PidFile(sys.argv[1]); print(1, flush=True); input()"
)


def test_it_holds_our_id_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    file = PidFile(str(path))
    assert path.read_text() == f"{os.getpid()}\n"
    file.remove()
    file.remove()
    assert not path.exists()
    PidFile("").remove()


def test_a_living_servers_file_is_left_and_a_dead_ones_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    other = subprocess.Popen(
        [sys.executable, "-c", LIVE, str(path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(BindError, match=rf"process {other.pid} is running"):
            PidFile(str(path))
        other.kill()
        other.wait(10)
    assert path.read_text() == f"{other.pid}\n"
    PidFile(str(path)).remove()
    assert not path.exists()


def test_the_file_of_another_program_that_lives_is_left(tmp_path: Path) -> None:
    (tmp_path / "pid").write_text(f"{os.getppid()}")
    with pytest.raises(BindError, match="alive"):
        PidFile(str(tmp_path / "pid"))
    os.utime(tmp_path / "pid", (1, 1))  # written before that process began: its number is used again
    PidFile(str(tmp_path / "pid")).remove()


def test_what_is_no_pid_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("dear diary")
    with pytest.raises(ConfigError, match="holds no process id"):
        PidFile(str(tmp_path / "notes"))
    assert (tmp_path / "notes").read_text() == "dear diary"
    with pytest.raises(ConfigError, match="No such file"):
        PidFile(str(tmp_path / "no" / "folder"))


def test_a_file_that_others_replaced_is_theirs(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    file = PidFile(str(path))
    path.unlink()
    path.write_text("1")
    file.remove()
    assert path.read_text() == "1"
