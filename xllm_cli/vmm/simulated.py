"""A simulated accelerator's tensors: a caching allocator whose segments count as memory of a SimulatedDriver.

    device    | pages of the pool | segments (reserved) | SDK buffers | peers | free |
    segments  | in use (allocated) | cached |

Owns arithmetic only: no tensor lives here. Tests and experiments script execution with it; the product never does.
"""

from __future__ import annotations

import torch

from xllm_cli._vmm import SimulatedDriver

__all__ = ["SEGMENT_BYTES", "SimulatedAllocator", "SimulatedDriver"]

SEGMENT_BYTES = 2 << 20  # what is taken from the device at a time


class SimulatedAllocator:
    """Allocates, frees, caches; has the statistics of worker.memory.AllocatorStatistics.

    Whether anybody may see them is the observer's business: an allocator without statistics is one not shown to it.
    """

    def __init__(self, driver: SimulatedDriver, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._driver = driver
        self._segment = segment_bytes
        self._allocated = self._reserved = self._peak = 0
        self.num_failures = 0
        self.num_emptied = 0

    def allocate(self, nbytes: int) -> None:
        """Put `nbytes` in use; torch.OutOfMemoryError, as of a real device, if they cannot be had."""
        missing = self._segments(max(0, self._allocated + nbytes - self._reserved))
        if missing and not self._driver.take(missing):
            self.num_failures += 1
            raise torch.OutOfMemoryError(
                f"simulated device out of memory. Tried to allocate {nbytes / 2**20:.2f} MiB. "
                f"{self._driver.info().free} bytes are free, {self._reserved - self._allocated} cached"
            )
        self._reserved += missing
        self._allocated += nbytes
        self._peak = max(self._peak, self._allocated)

    def free(self, nbytes: int) -> None:
        """Out of use; cached from now on."""
        assert nbytes <= self._allocated
        self._allocated -= nbytes

    def allocated(self) -> int:
        """See AllocatorStatistics."""
        return self._allocated

    def reserved(self) -> int:
        """See AllocatorStatistics."""
        return self._reserved

    def peak_allocated(self) -> int:
        """See AllocatorStatistics."""
        return self._peak

    def reset_peak(self) -> None:
        """See AllocatorStatistics."""
        self._peak = self._allocated

    def empty_cache(self) -> None:
        """See AllocatorStatistics: whole segments."""
        kept = self._segments(self._allocated)
        self._driver.give(self._reserved - kept)
        self._reserved = kept
        self.num_emptied += 1

    def _segments(self, nbytes: int) -> int:
        return -(-nbytes // self._segment) * self._segment
