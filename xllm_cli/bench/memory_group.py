"""A memory cgroup: several processes on one budget, as in a container with a limit.

Needs the right to make one: a writable memory controller, which root has outside of most containers.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from xllm_cli.errors import XllmError

END_SECONDS = 30.0


class NoMemoryGroup(XllmError):
    """No memory cgroup can be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A cgroup without a limit of its own until one is set."""

    folder: Path
    is_v2: bool

    def command(self, program: list[str]) -> list[str]:
        """The command that starts `program` inside."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *program]

    def limit(self, nbytes: int) -> None:
        """The most bytes its processes may hold from now on. OSError if they hold more and cannot give it back."""
        (self.folder / ("memory.max" if self.is_v2 else "memory.limit_in_bytes")).write_text(str(nbytes))

    def used(self) -> int:
        """The bytes its processes hold, page cache included."""
        return int((self.folder / ("memory.current" if self.is_v2 else "memory.usage_in_bytes")).read_text())


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A new group; at the end its processes must be gone, and then it is. Raises NoMemoryGroup."""
    root, is_v2 = _place()
    folder = root / f"xllm-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
    except OSError as error:
        raise NoMemoryGroup(f"no memory cgroup can be made here: {error}") from error
    try:
        yield MemoryGroup(folder, is_v2)
    finally:
        deadline = time.monotonic() + END_SECONDS
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        folder.rmdir()


def _place() -> tuple[Path, bool]:
    """(a writable place in the memory controller's tree, whether it is version 2)"""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        root = Path(point.replace("\\040", " "))
        if kind == "cgroup2" and "memory" in _read(root / "cgroup.subtree_control") and os.access(root, os.W_OK):
            return root, True
        if kind == "cgroup" and {"memory", "rw"} <= set(options.split(",")) and os.access(root, os.W_OK):
            return _own_group(root), False
    raise NoMemoryGroup("no memory cgroup can be made here: the memory controller is missing or read-only. Run as root")


def _own_group(root: Path) -> Path:
    """This process's group in a version 1 tree: what is made below it stays under every limit set for us."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") and (root / path.lstrip("/")).is_dir():
            return root / path.lstrip("/")
    return root


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
