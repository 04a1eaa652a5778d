"""What torch_npu's allocator says of itself: the native statistics behind an npu's execution room.

Pages of the pool come from the driver, not from this allocator, so they are in none of these numbers. With
expandable_segments the allocator reserves addresses of its own and gives whole pages back: nothing here differs.
"""

from __future__ import annotations

from typing import Any

import torch


class NpuStatistics:
    """See worker.memory.AllocatorStatistics. torch_npu is imported and the device set before."""

    def __init__(self, index: int) -> None:
        self._npu: Any = torch.npu  # type: ignore[attr-defined]  # put there by torch_npu
        self._index = index

    def allocated(self) -> int:
        """See AllocatorStatistics."""
        return int(self._npu.memory_allocated(self._index))

    def reserved(self) -> int:
        """See AllocatorStatistics."""
        return int(self._npu.memory_reserved(self._index))

    def peak_allocated(self) -> int:
        """See AllocatorStatistics."""
        return int(self._npu.max_memory_allocated(self._index))

    def reset_peak(self) -> None:
        """See AllocatorStatistics."""
        self._npu.reset_peak_memory_stats(self._index)

    def empty_cache(self) -> None:
        """See AllocatorStatistics. Waits for the device: blocks of running work cannot be given."""
        self._npu.empty_cache()
