"""The engine's process. Knows how to start, watch and end it, not what it says."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

# Variables that are for this process alone.
PRIVATE = ("XLLM_API_KEY", "XLLM_FLAG_API_KEY", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class EngineProcess:
    """The running engine. It shares our process group and dies with us: the death pipe's write end is only here."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        """Start it, from the main thread: it asks the kernel for a signal when the thread that started it ends."""
        read_end, write_end = os.pipe()
        self._death_pipe: int | None = write_end
        try:
            self._process = subprocess.Popen(
                [*command, "--runtime_dir", str(folder), "--death_fd", str(read_end)],
                pass_fds=(read_end,),
                stdin=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name not in PRIVATE},
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

    def let_go(self) -> None:
        """Close the death pipe: it ends by itself now, without being waited for."""
        if self._death_pipe is not None:
            os.close(self._death_pipe)
            self._death_pipe = None

    def end(self, patience: float) -> None:
        """Let it go, wait `patience` seconds for it to end, then kill it. Returns when it is gone."""
        self.let_go()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
