"""A memory cgroup for processes of a test: several of them on one budget, as in a container with a limit.

Needs the right to make one: root with a writable controller, or with the right to mount one. `memory_cgroup` skips the
test where neither is given, and says so.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """`command` starts a program inside; `used` are the bytes its processes hold."""

    folder: Path
    usage_file: str

    def command(self, program: list[str]) -> list[str]:
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *program]

    def used(self) -> int:
        return int((self.folder / self.usage_file).read_text())


@contextmanager
def memory_cgroup(nbytes: int) -> Iterator[MemoryCgroup]:
    """A group limited to `nbytes`; it is gone afterwards, as its processes must be."""
    with _hierarchy() as (root, is_v2):
        folder = root / f"xllm-test-{secrets.token_hex(4)}"
        try:
            folder.mkdir()
            (folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(nbytes))
        except OSError as error:
            pytest.skip(f"no memory cgroup can be made here ({error})")
        try:
            yield MemoryCgroup(folder, "memory.current" if is_v2 else "memory.usage_in_bytes")
        finally:
            deadline = time.monotonic() + 5
            while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
                time.sleep(0.05)
            folder.rmdir()


@contextmanager
def _hierarchy() -> Iterator[tuple[Path, bool]]:
    """(a writable place in the memory controller's tree, whether it is version 2)"""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        root = Path(re.sub(r"\\040", " ", point))
        if kind == "cgroup2" and "memory" in _read(root / "cgroup.subtree_control") and os.access(root, os.W_OK):
            yield root, True
            return
        if kind == "cgroup" and {"memory", "rw"} <= set(options.split(",")):
            yield root, False
            return
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "cgroup", "-o", "memory", "none", folder]
        done = subprocess.run(mount, capture_output=True, text=True, timeout=10, check=False)
        if done.returncode:
            pytest.skip(f"the memory controller is read-only and cannot be mounted here: {done.stderr.strip()}")
        try:
            yield Path(folder), False
        finally:
            subprocess.run(["umount", folder], timeout=10, check=True)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
