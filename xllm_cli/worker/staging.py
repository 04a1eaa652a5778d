"""The manual loader: weights on their way from the checkpoint to a device's memory, packed in pinned memory.

    read, widen, pack ──► [ buffer 0 ··tensor|tensor|ten ] ──── on its way ───► device
                          [ buffer 1 sor|tensor|···      ] ◄─── being filled

While one buffer is copied, on a stream of its own, the other is filled with what comes next: the host holds no more
than the two. Knows no model and no file.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from xllm_cli.worker.npu_copies import AclCopies, CopyStream, PinnedMemory

BUFFER_BYTES = 64 << 20
ALIGNMENT = 512  # of what lies in a buffer: bytes that a device's copy engine likes to begin at


class Staging:
    """Puts tensors of the host into tensors of the device, sooner or later: all are there when finish() has returned.

    `fence` returns when the device does nothing any more that was begun elsewhere: memory that comes from an allocator
    may be in use by work before.
    """

    def __init__(self, copies: AclCopies, fence: Callable[[], None], buffer_bytes: int = BUFFER_BYTES) -> None:
        """MemoryShortage or DeviceError if there is no pinned memory or no stream; nothing is left then."""
        self._fence = fence
        self._buffers: list[_Buffer] = []
        self.nbytes = 0  # copied so far
        self.pinned_bytes = 2 * buffer_bytes
        try:
            for _ in range(2):
                self._buffers.append(_Buffer(copies, buffer_bytes))
        except BaseException:
            self.close()
            raise

    def put(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` [...] into `to` [...], contiguous, in its type. `source` may go when this has returned.
        DeviceError."""
        assert to.is_contiguous() and to.shape == source.shape, "weights are copied into memory taken for them"
        self._fence()
        there, here, done = to.view(-1), source.reshape(-1), 0
        while done < there.numel():
            buffer = self._buffers[0]
            count = min(buffer.room // there.itemsize, there.numel() - done)
            if count == 0:
                self._buffers.reverse()
                self._buffers[0].empty()
                continue
            buffer.send(there[done : done + count], here[done : done + count])
            done += count
        self.nbytes += there.nbytes

    def finish(self) -> None:
        """Return when all is where it was put. DeviceError if some did not come through."""
        for buffer in self._buffers:
            buffer.empty()

    def close(self) -> bool:
        """Give the buffers back, once nothing is under way; False if that cannot be yet: to be tried again."""
        self._buffers = [buffer for buffer in self._buffers if not buffer.close()]
        return not self._buffers


class _Buffer:
    """Pinned memory and the stream that empties it."""

    def __init__(self, copies: AclCopies, nbytes: int) -> None:
        self._memory: PinnedMemory = copies.allocate(nbytes)
        try:
            self._stream: CopyStream = copies.stream()
        except BaseException:
            self._memory.close()
            raise
        self._bytes = self._memory.tensor()
        self._used = 0

    @property
    def room(self) -> int:
        return self._memory.nbytes - self._used

    def send(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Pack `source` behind what is here, and begin to copy it."""
        staged = self._bytes[self._used : self._used + to.nbytes].view(to.dtype)
        staged.copy_(source)
        self._stream.to_device(to.data_ptr(), staged.data_ptr(), to.nbytes)
        self._used = min(-(-(self._used + to.nbytes) // ALIGNMENT) * ALIGNMENT, self._memory.nbytes)

    def empty(self) -> None:
        """Return when nothing of it is under way: all of it is room again."""
        self._stream.wait()
        self._used = 0

    def close(self) -> bool:
        return self._stream.close() and self._memory.close()
