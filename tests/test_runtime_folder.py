"""The shared folder: private, where it may be, and gone when its server is, however that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_server import ROOT

from xllm_cli.server.runtime_folder import RuntimeFolder, sweep


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return folder


def test_it_is_private_and_elsewhere_if_the_parent_is_not(parent: Path, tmp_path: Path) -> None:
    for mode, where in ((0o700, parent), (0o755, tmp_path)):
        parent.chmod(mode)
        folder = RuntimeFolder()
        folder.write("secret", "x")
        assert (folder.path.parent, folder.path.stat().st_mode & 0o777) == (where, 0o700)
        assert (folder.path / "secret").stat().st_mode & 0o777 == 0o600
        folder.remove()
        assert not folder.path.exists()


def test_folders_of_killed_servers_are_swept_and_no_others(parent: Path) -> None:
    program = (
        "import time; from xllm_cli.server.runtime_folder import RuntimeFolder; f = RuntimeFolder();"
        "print(f.path, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        ours = RuntimeFolder()
        assert theirs.exists() and sweep(parent) == []
        other.send_signal(signal.SIGKILL)
        other.wait(10)
    assert theirs.exists() and sweep(parent) == [theirs]
    assert list(parent.iterdir()) == [ours.path]


def test_what_is_not_a_runtime_folder_stays(parent: Path) -> None:
    (parent / "xllm-file").write_text("x")
    (parent / "xllm-empty").mkdir()
    (parent / "xllm-link").symlink_to(parent / "xllm-empty")
    (parent / "xllm-empty" / "lock").symlink_to("/etc/passwd")
    assert sweep(parent) == [] and len(os.listdir(parent)) == 3
