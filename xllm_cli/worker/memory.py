"""What a rank sees of its device's memory: the observation that every step's result carries.

The host has no allocator statistics, so execution room is a conservative high-water mark (DESIGN.md §7): the largest
anonymous memory this process ever needed inside a step, less what it holds now.
"""

from __future__ import annotations

import os
import re
from typing import Protocol

from xllm_cli.core import Observation
from xllm_cli.vmm.driver import Driver
from xllm_cli.worker.kv_store import KvStore

_FIELDS = re.compile(rb"^(VmHWM|RssAnon|RssFile|RssShmem):\s+(\d+) kB", re.MULTILINE)
_RESET_PEAK = b"5"  # proc(5): writing 5 to clear_refs resets VmHWM to the current resident size


class MemoryObserver(Protocol):
    """A source of observations."""

    def begin_step(self) -> None:
        """Start watching the peak."""
        ...

    def observe(self) -> Observation:
        """What was seen since begin_step, and what is free now."""
        ...


class HostMemoryObserver:
    """Reads /proc through kept descriptors: tens of microseconds a step, nothing on the allocation path."""

    def __init__(self, driver: Driver, store: KvStore) -> None:
        self._driver = driver
        self._store = store
        self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        self._reset = _open_reset()
        self._peak_anon = 0

    def begin_step(self) -> None:
        """Reset the kernel's high-water mark where it allows that."""
        if self._reset is not None:
            os.pwrite(self._reset, _RESET_PEAK, 0)

    def observe(self) -> Observation:
        """Pages of the pool are shared memory and file pages are clean, so both are taken off the resident peak."""
        anon, peak = self._anonymous()
        self._peak_anon = max(self._peak_anon, peak)
        info = self._driver.info()
        return Observation(
            total=info.total,
            free=info.free,
            anon=anon,
            execution_room=max(0, self._peak_anon - anon),
            owned=self._store.owned_bytes,
            free_handles=self._store.free_handle_bytes,
        )

    def _anonymous(self) -> tuple[int, int]:
        """(anonymous bytes now, their peak since begin_step)."""
        fields = {name: int(kib) << 10 for name, kib in _FIELDS.findall(os.pread(self._status, 8192, 0))}
        anon = fields[b"RssAnon"]
        if self._reset is None:
            return anon, anon
        return anon, max(anon, fields[b"VmHWM"] - fields[b"RssShmem"] - fields[b"RssFile"])

    def close(self) -> None:
        """Close the kept descriptors."""
        os.close(self._status)
        if self._reset is not None:
            os.close(self._reset)


def _open_reset() -> int | None:
    try:
        return os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:  # a read-only /proc: the peak is then what is seen between steps
        return None
