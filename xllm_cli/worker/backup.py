"""A copy of a model's packed parameters in a file without a name: clean page cache, which the kernel drops when memory
is short and reads again from the disk.

The file is private and gone with the process, whatever ends it. It costs the disk what the parameters cost in memory.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

log = logging.getLogger(__name__)

Chunks = Callable[[Callable[[torch.Tensor, int], None]], None]


class Backup:
    """Bytes written once and read back in any order. Chunks are uint8 tensors of any device."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` None: the user's cache. OSError if no file can be made there."""
        folder = folder or _cache_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._fd = _nameless(folder)
        self.nbytes = 0

    def write(self, chunks: Chunks) -> None:
        """Keep all chunks; on the disk soon, from a thread of its own. OSError if the disk is full."""
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
        """Read the chunk that was written at `offset`. OSError if the disk fails."""
        on_host = chunk if chunk.device.type == "cpu" else torch.empty(chunk.shape, dtype=chunk.dtype)
        self._read(on_host, offset)
        if on_host is not chunk:
            chunk.copy_(on_host)

    def _read(self, chunk: torch.Tensor, offset: int) -> None:
        data = chunk.numpy().data
        while data:
            read = os.preadv(self._fd, [data], offset)
            if read == 0:
                raise OSError(f"the copy of the weights ends at {offset}, {len(data)} bytes early")
            data, offset = data[read:], offset + read

    def close(self) -> None:
        """Give the disk back, soon: with the last descriptor the kernel lets all its pages and blocks go, which takes
        longer than a sleep should."""
        if self._fd >= 0:
            threading.Thread(target=os.close, args=(self._fd,), name="backup", daemon=True).start()
            self._fd = -1


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
