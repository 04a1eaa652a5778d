"""A copy of a model's packed parameters on the host, for them to come back from.

FileBackup    in a file without a name: clean page cache, which the kernel drops when memory is short and reads again
              from the disk. Private, gone with the process whatever ends it; as large on the disk as they are
PinnedBackup  in memory from which a device copies by itself, as fast as its link is; as large as they are
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import torch

from xllm_cli.errors import MemoryShortage
from xllm_cli.worker.npu_copies import AclCopies, PinnedMemory

log = logging.getLogger(__name__)

Chunks = Callable[[Callable[[torch.Tensor, int], None]], None]


class Backup(Protocol):
    """Bytes written once and read back in any order. Chunks are uint8 tensors of the device's memory.

    place   where they are, in words
    nbytes  how many
    """

    place: str
    nbytes: int

    def write(self, chunks: Chunks) -> None:
        """Keep all chunks. OSError, MemoryShortage or DeviceError if that cannot be; close() it then."""
        ...

    def fill(self, chunk: torch.Tensor, offset: int) -> None:
        """Begin to bring back the chunk that was written at `offset`. OSError or DeviceError if that fails."""
        ...

    def settle(self) -> None:
        """Return when every chunk that was begun to be filled is. DeviceError if one is not."""
        ...

    def close(self) -> bool:
        """Give back what it takes; False if that cannot be yet: to be tried again."""
        ...


class FileBackup:
    """See Backup. `guard` surrounds what a device does, see worker.device.Device."""

    place = "a file"

    def __init__(
        self, folder: Path | None = None, guard: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """`folder` None: the user's cache. OSError if no file can be made there."""
        folder = folder or _cache_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._fd = _nameless(folder)
        self._guard = guard
        self.nbytes = 0

    def write(self, chunks: Chunks) -> None:
        """See Backup; on the disk soon, from a thread of its own. OSError if the disk is full."""
        with self._guard():
            chunks(self._append)
        descriptor = os.dup(self._fd)
        threading.Thread(target=_settle, args=(descriptor,), name="backup", daemon=True).start()

    def _append(self, chunk: torch.Tensor, offset: int) -> None:
        data = chunk.cpu().numpy().data
        while data:
            written = os.pwrite(self._fd, data, offset)
            data, offset = data[written:], offset + written
        self.nbytes = max(self.nbytes, offset)

    def fill(self, chunk: torch.Tensor, offset: int) -> None:
        """See Backup: done when it returns. OSError if the disk fails."""
        on_host = chunk if chunk.device.type == "cpu" else torch.empty(chunk.shape, dtype=chunk.dtype)
        self._read(on_host, offset)
        if on_host is not chunk:
            with self._guard():
                chunk.copy_(on_host)

    def settle(self) -> None:
        """See Backup: nothing is under way."""

    def _read(self, chunk: torch.Tensor, offset: int) -> None:
        data = chunk.numpy().data
        while data:
            read = os.preadv(self._fd, [data], offset)
            if read == 0:
                raise OSError(f"the copy of the weights ends at {offset}, {len(data)} bytes early")
            data, offset = data[read:], offset + read

    def close(self) -> bool:
        """Give the disk back, soon: with the last descriptor the kernel lets all its pages and blocks go, which takes
        longer than a sleep should."""
        if self._fd >= 0:
            threading.Thread(target=os.close, args=(self._fd,), name="backup", daemon=True).start()
            self._fd = -1
        return True


class PinnedBackup:
    """See Backup: a piece of pinned memory for each chunk, so that nothing is needed in one piece."""

    place = "pinned host memory"

    def __init__(self, copies: AclCopies, nbytes: int, *, free: int, fence: Callable[[], None]) -> None:
        """For `nbytes`, of `free` bytes that the host has to give: pinned pages are never swapped, so they must not be
        its last. `fence` returns when the device has written what is to be kept. MemoryShortage, or DeviceError."""
        if nbytes > free:
            raise MemoryShortage(f"{nbytes} bytes of pinned memory wanted, the host has {free} to give")
        self._copies = copies
        self._fence = fence
        self._pieces: dict[int, PinnedMemory] = {}
        self._stream = copies.stream()
        self.nbytes = 0

    def write(self, chunks: Chunks) -> None:
        """See Backup: done when it returns."""
        self._fence()
        chunks(self._append)
        self._stream.wait()

    def _append(self, chunk: torch.Tensor, offset: int) -> None:
        piece = self._pieces[offset] = self._copies.allocate(chunk.nbytes)
        self._stream.to_host(piece.address, chunk.data_ptr(), chunk.nbytes)
        self.nbytes += chunk.nbytes

    def fill(self, chunk: torch.Tensor, offset: int) -> None:
        """See Backup: the device takes it while the next pages are made."""
        piece = self._pieces[offset]
        assert piece.nbytes == chunk.nbytes, "chunks are filled as they were written"
        self._stream.to_device(chunk.data_ptr(), piece.address, piece.nbytes)

    def settle(self) -> None:
        """See Backup."""
        self._stream.wait()

    def close(self) -> bool:
        """See Backup: memory that a copy may still touch stays until it cannot."""
        if not self._stream.close():
            return False
        self._pieces = {offset: piece for offset, piece in self._pieces.items() if not piece.close()}
        return not self._pieces


def _settle(descriptor: int) -> None:
    """Dirty pages cannot be dropped: bring them to the disk, where no request waits for it."""
    try:
        os.fdatasync(descriptor)
    except OSError as error:
        log.warning("the copy of the weights is not on the disk yet: %s", error)
    finally:
        os.close(descriptor)


def _nameless(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # not every file system can: then a name for a moment
        descriptor, name = tempfile.mkstemp(dir=folder)
        os.unlink(name)
        return descriptor


def _cache_folder() -> Path:
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # containers give users without an entry anywhere
        raise OSError("this user has no home folder; set XDG_CACHE_HOME") from error
    return base / "xllm" / "weights"
