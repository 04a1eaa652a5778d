"""What a rank sees of its device's memory: the observation that every step's result carries.

Owns the execution peak and how it becomes room (DESIGN.md §7), one observer for each kind of device:

    HostMemoryObserver                    the process's anonymous memory and its high-water mark in /proc, once the C
                                          library has given back what it keeps of earlier steps
    DeviceMemoryObserver, statistics      the allocator's own numbers: what it only caches can be had back
    DeviceMemoryObserver, none            the largest fall of free memory in a step, never lowered

Loading weights is no step. Knows no budget: what is done with the numbers is the cache's business.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from typing import Protocol

from xllm_cli.core import Observation
from xllm_cli.vmm.driver import Driver, DriverInfo, VmmError
from xllm_cli.worker.kv_store import KvStore

_FIELDS = re.compile(rb"^(VmHWM|RssAnon|RssFile|RssShmem):\s+(\d+) kB", re.MULTILINE)
_RESET_PEAK = b"5"  # proc(5): writing 5 to clear_refs resets VmHWM to the current resident size
MOST_FAILED_READINGS = 100  # by then something else would have failed, too
KEPT_BYTES = 32 << 20  # what the C library may keep of earlier steps before a step begins
EXHAUSTED_SHARE = 4  # a failed allocation raises the room to a quarter of the device at most, however much it asked for


class MemoryObserver(Protocol):
    """A source of observations."""

    def begin_step(self) -> None:
        """Start watching the peak. Call it after the step's page changes: pages that leave would count as a peak."""
        ...

    def observe(self) -> Observation:
        """What was seen since begin_step, and what is free now."""
        ...

    def relieve(self) -> int:
        """Pages are short: give the device back what an allocator holds beyond a step's need; how many bytes."""
        ...

    def exhausted(self, nbytes: int) -> None:
        """The running step was refused `nbytes` more: a later one is to find them."""
        ...

    def close(self) -> None:
        """Close what is kept open; doing it twice changes nothing."""
        ...


class AllocatorStatistics(Protocol):
    """What the allocator of a device says of itself, in bytes of this process and device.

    reserved  = taken from the device, whether in use or cached      (torch: memory_reserved)
    allocated = in use by tensors, at most `reserved`                (torch: memory_allocated)
    """

    def allocated(self) -> int:
        """In use by tensors now."""
        ...

    def reserved(self) -> int:
        """Taken from the device now."""
        ...

    def peak_allocated(self) -> int:
        """The most in use at once since reset_peak()."""
        ...

    def reset_peak(self) -> None:
        """Let the peak begin anew at what is in use now."""
        ...

    def empty_cache(self) -> None:
        """Give the device back what is reserved and not in use, as far as it can be given."""
        ...


class _Readings:
    """The driver's info(), or the one before if it fails: that memory could not be looked at is no reason to end."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._last = driver.info()
        self._failures = 0

    def read(self) -> DriverInfo:
        """VmmError only when it has failed `MOST_FAILED_READINGS` times in a row."""
        try:
            self._last = self._driver.info()
            self._failures = 0
        except VmmError:
            self._failures += 1
            if self._failures >= MOST_FAILED_READINGS:
                raise
        return self._last


class DeviceMemoryObserver:
    """Memory of a device whose tensors come from an allocator of its own, beside the page pool.

    With `statistics` the room is what the largest step so far would have to take from the device now; memory that
    tensors leave is KV's again, after relieve(). Without, whatever left the device in a step may be needed again.
    """

    def __init__(self, driver: Driver, store: KvStore, statistics: AllocatorStatistics | None = None) -> None:
        self._driver = driver
        self._readings = _Readings(driver)
        self._store = store
        self._statistics = statistics
        self._peak = 0  # the most that a step needed beyond what it began with
        self._unreturned = 0  # what the allocator kept although its cache was emptied: parts of it are in use
        self.begin_step()

    def begin_step(self) -> None:
        """See MemoryObserver."""
        self._free_before = self._readings.read().free
        self._owned_before = self._store.owned_bytes
        self._allocated_before = 0
        if self._statistics is not None:
            self._statistics.reset_peak()
            self._allocated_before = self._statistics.allocated()

    def observe(self) -> Observation:
        """See MemoryObserver."""
        info, owned = self._readings.read(), self._store.owned_bytes
        self._peak = max(self._peak, self._needed(info.free, owned))
        allocated, reserved = self._held()
        return Observation(
            total=info.total,
            free=info.free,
            free_before=self._free_before,
            execution_room=self._room(allocated, reserved),
            execution_peak=self._peak,
            owned=owned,
            free_handles=self._store.free_handle_bytes,
            allocated=self._driver.memfd_bytes(),
            tensors=allocated,
            reserved=reserved,
        )

    def _needed(self, free: int, owned: int) -> int:
        """Bytes this step needed at its peak, pages of the pool aside, beyond what was held when it began."""
        if self._statistics is not None:
            return self._statistics.peak_allocated() - self._allocated_before
        return self._free_before + self._owned_before - free - owned

    def _held(self) -> tuple[int, int]:
        """(bytes of tensors, bytes the allocator took from the device for them)"""
        return (0, 0) if self._statistics is None else (self._statistics.allocated(), self._statistics.reserved())

    def _room(self, allocated: int, reserved: int) -> int:
        return max(0, allocated + self._peak - reserved)

    def relieve(self) -> int:
        """See MemoryObserver. Nothing is emptied for less than a page, nor twice for what did not come the first time:
        emptying waits for the device."""
        if self._statistics is None:
            return 0
        allocated, before = self._held()
        surplus = before - allocated - self._peak
        self._unreturned = min(self._unreturned, max(0, surplus))
        if surplus - self._unreturned < self._readings.read().page_bytes:
            return 0
        self._statistics.empty_cache()
        allocated, after = self._held()
        self._unreturned = max(0, after - allocated - self._peak)
        return before - after

    def exhausted(self, nbytes: int) -> None:
        """See MemoryObserver."""
        info, owned = self._readings.read(), self._store.owned_bytes
        wanted = max(0, self._needed(info.free, owned)) + nbytes
        self._peak = max(self._peak, min(wanted, info.total // EXHAUSTED_SHARE))

    def close(self) -> None:
        """See MemoryObserver: nothing is kept open."""


class HostMemoryObserver:
    """Reads /proc through kept descriptors: tens of microseconds a step, nothing on the allocation path.

    The host has no allocator statistics, so the room is a conservative high-water mark: the most that a step needed
    above what was held when the C library last gave back its holes, less what is held above that now. A prompt leaves
    6 to 48 MiB in holes that the next cannot use: a process that kept them would grow by hundreds of MiB.
    """

    def __init__(self, driver: Driver, store: KvStore) -> None:
        self._driver = driver
        self._readings = _Readings(driver)
        self._store = store
        self._status: int | None = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        self._reset = _open_reset()
        self._give_back = _find_trim()
        self._base: int | None = None  # anonymous memory when holes were last given back
        self._needed = 0  # the most that a step had above that
        self._peak = 0  # the most above what the step before had left
        self._anon = 0
        self._free = self._readings.read().free

    def begin_step(self) -> None:
        """Give back what earlier steps left in holes if that is much; reset the kernel's high-water mark where it
        allows that."""
        if self._base is None or self._anon > self._base + KEPT_BYTES:
            self._trim()
        if self._reset is not None:
            os.pwrite(self._reset, _RESET_PEAK, 0)

    def observe(self) -> Observation:
        """Pages of the pool are shared memory and file pages are clean, so both are taken off the resident peak.

        `free_before` is what the last observation saw: a second reading would cost more than it tells.
        """
        anon, peak = self._read()
        base = self._note(anon, peak)
        info = self._readings.read()
        free_before, self._free = self._free, info.free
        return Observation(
            total=info.total,
            free=info.free,
            free_before=free_before,
            anon=anon,
            execution_room=max(0, base + self._needed - anon),
            execution_peak=self._peak,
            owned=self._store.owned_bytes,
            free_handles=self._store.free_handle_bytes,
            allocated=self._driver.memfd_bytes(),
        )

    def _note(self, anon: int, peak: int) -> int:
        """Remember a step's numbers; returns the base."""
        base = anon if self._base is None else min(self._base, anon)
        self._peak = max(self._peak, peak - (self._anon or anon))
        self._needed = max(self._needed, peak - base)
        self._base, self._anon = base, anon
        return base

    def _trim(self) -> None:
        self._give_back(0)
        self._base = self._anon = self._read()[0]

    def _read(self) -> tuple[int, int]:
        """(anonymous bytes now, their peak since begin_step)"""
        assert self._status is not None, "the observer is closed"
        return self._anonymous(os.pread(self._status, 8192, 0))

    def _anonymous(self, status: bytes) -> tuple[int, int]:
        """(anonymous bytes now, their peak since begin_step)."""
        fields = {name: int(kib) << 10 for name, kib in _FIELDS.findall(status)}
        anon = fields[b"RssAnon"]
        if self._reset is None:
            return anon, anon
        return anon, max(anon, fields[b"VmHWM"] - fields[b"RssShmem"] - fields[b"RssFile"])

    def relieve(self) -> int:
        """See MemoryObserver. Not for less than a page."""
        before = self._anon
        if self._base is not None and before < self._base + self._readings.read().page_bytes:
            return 0
        self._trim()
        return max(0, before - self._anon)

    def exhausted(self, nbytes: int) -> None:
        """See MemoryObserver."""
        anon, peak = self._read()
        most = anon + self._readings.read().total // EXHAUSTED_SHARE
        self._note(anon, max(peak, min(peak + nbytes, most)))

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


def _find_trim() -> Callable[[int], object]:
    """glibc's malloc_trim(3), which also gives back pages in the middle of its heaps; elsewhere nothing."""
    found: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
    return found
