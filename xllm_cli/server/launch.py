"""The engine's process and the folder it shares with us. Knows how to start, watch and end it, not what it says."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

MAX_SOCKET_PATH = 107  # sun_path, less its final zero


def make_runtime_folder() -> Path:
    """A new folder that only this user can enter, under XDG_RUNTIME_DIR where that is sound, else the temporary one."""
    return Path(tempfile.mkdtemp(prefix="xllm-", dir=_private_parent()))


def _private_parent() -> str | None:
    parent = os.environ.get("XDG_RUNTIME_DIR", "")
    try:
        status = os.stat(parent)
    except OSError:
        return None
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
    fits = len(os.path.join(parent, "xllm-12345678", "from_engine")) <= MAX_SOCKET_PATH
    return parent if private and fits else None


def write_private(path: Path, text: str) -> None:
    """Create a file that only this user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


class EngineProcess:
    """The running engine. It shares our process group and dies with us: the death pipe's write end is only here."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        """Start it, from the main thread: it asks the kernel for a signal when the thread that started it ends."""
        read_end, self._death_pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, "--runtime_dir", str(folder), "--death_fd", str(read_end)],
                pass_fds=(read_end,),
                stdin=subprocess.DEVNULL,
            )
        finally:
            os.close(read_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Its exit status; negative for a signal."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        descriptor = os.pidfd_open(self._process.pid)
        try:
            loop.add_reader(descriptor, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return self._process.wait()

    def end(self, patience: float) -> None:
        """Close the death pipe, wait `patience` seconds for it to end, then kill it. Returns when it is gone."""
        os.close(self._death_pipe)
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


def remove_folder(folder: Path) -> None:
    """Remove the runtime folder, whatever is left in it."""
    shutil.rmtree(folder, ignore_errors=True)
