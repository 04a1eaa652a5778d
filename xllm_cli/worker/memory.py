"""What a rank sees of its device's memory: the observation that every step's result carries.

The host has no allocator statistics, so execution room is a conservative high-water mark (DESIGN.md §7): the largest
anonymous memory this process needed inside a step, less what it holds now. Loading weights is no step.
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
        """Start watching the peak. Call it after the step's page changes: pages that leave would count as a peak."""
        ...

    def observe(self) -> Observation:
        """What was seen since begin_step, and what is free now."""
        ...

    def close(self) -> None:
        """Close what is kept open; doing it twice changes nothing."""
        ...


class HostMemoryObserver:
    """Reads /proc through kept descriptors: tens of microseconds a step, nothing on the allocation path."""

    def __init__(self, driver: Driver, store: KvStore) -> None:
        self._driver = driver
        self._store = store
        self._status: int | None = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        self._reset = _open_reset()
        self._peak_anon = 0

    def begin_step(self) -> None:
        """Reset the kernel's high-water mark where it allows that."""
        if self._reset is not None:
            os.pwrite(self._reset, _RESET_PEAK, 0)

    def observe(self) -> Observation:
        """Pages of the pool are shared memory and file pages are clean, so both are taken off the resident peak."""
        assert self._status is not None, "the observer is closed"
        anon, peak = self._anonymous(os.pread(self._status, 8192, 0))
        self._peak_anon = max(self._peak_anon, peak)
        info = self._driver.info()
        return Observation(
            total=info.total,
            free=info.free,
            anon=anon,
            execution_room=max(0, self._peak_anon - anon),
            owned=self._store.owned_bytes,
            free_handles=self._store.free_handle_bytes,
            allocated=self._driver.memfd_bytes(),
        )

    def _anonymous(self, status: bytes) -> tuple[int, int]:
        """(anonymous bytes now, their peak since begin_step)."""
        fields = {name: int(kib) << 10 for name, kib in _FIELDS.findall(status)}
        anon = fields[b"RssAnon"]
        if self._reset is None:
            return anon, anon
        return anon, max(anon, fields[b"VmHWM"] - fields[b"RssShmem"] - fields[b"RssFile"])

    def close(self) -> None:
        """See MemoryObserver."""
        for descriptor in (self._status, self._reset):
            if descriptor is not None:
                os.close(descriptor)
        self._status = self._reset = None


def _open_reset() -> int | None:
    """A descriptor that resets the mark, and has just done so: what came before, loading, is nobody's step. None where
    /proc is read-only or the kernel knows no reset: the peak is then what is seen between steps."""
    try:
        descriptor = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        os.pwrite(descriptor, _RESET_PEAK, 0)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
