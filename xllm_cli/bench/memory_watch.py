"""What the processes of a server hold, seen from outside through /proc. Needs no word from the server itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def memfd_bytes(pid: int) -> int:
    """Bytes really allocated in the memfds of the process and its descendants: pages of a pool."""
    total = 0
    for process in _family(pid):
        with suppress(OSError):  # it ended meanwhile
            for fd in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):
                    if "/memfd:" in os.readlink(fd):
                        total += os.stat(fd).st_blocks * 512
    return total


def held_bytes(pid: int) -> int:
    """The same, and anonymous memory."""
    return memfd_bytes(pid) + sum(_anonymous(process) for process in _family(pid))


def _anonymous(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def _family(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _family(int(child))
