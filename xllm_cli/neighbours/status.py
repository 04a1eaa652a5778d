"""What an engine tells its neighbours: one small file, written by its owner alone, read by anyone of the same user.

    magic (8) | length (4) | crc32 (4) | JSON of a Status

Readers use pread, so a torn or damaged page is a checksum that does not match, never a fault. The owner holds a flock:
a file that can be locked belongs to a dead engine and is removed by whoever sees it.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import msgspec

MAGIC = b"XLLMST01"
HEAD = struct.Struct("<8sII")
FILE_BYTES = 4096
SUFFIX = ".status"
READ_ATTEMPTS = 3  # a page being rewritten is read again; the owner writes a few times a second


class Status(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine as its neighbours see it. Bytes unless named otherwise; the words are DESIGN.md's.

    `engine` names the file and the socket. `idle` could be given to the device now: cached blocks nobody uses, spares,
    free handles and parked weights; 0 where pages never leave (a fixed pool, a physical cache). `short` is what its
    requests wait for. `active_at` is when a row last ran, and `oldest_at` when what it would forget first was last used
    (0: nothing would be lost), both in seconds of the machine's monotonic clock.
    """

    engine: str
    pid: int
    model_id: str
    device: str
    mode: str = ""
    total: int = 0
    free: int = 0
    physical: int = 0
    kv_live: int = 0
    kv_cached: int = 0
    kv_spare: int = 0
    free_handles: int = 0
    weights: int = 0
    limit: int | None = None
    headroom: int = 0
    headroom_limited_by: str = ""
    idle: int = 0
    short: int = 0
    running: int = 0
    waiting: int = 0
    active_at: float = 0.0
    oldest_at: float = 0.0
    written_at: float = 0.0


class StatusFile:
    """The owner's end. It appears in the folder only when it is locked and whole."""

    def __init__(self, folder: Path, first: Status) -> None:
        self.path = folder / (first.engine + SUFFIX)
        made = folder / f"new-{first.engine}"
        self._fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._encoder = msgspec.json.Encoder()
        self.write(first)
        made.rename(self.path)

    def write(self, status: Status) -> None:
        """Replace the whole page with one system call."""
        text = self._encoder.encode(status)
        assert len(text) <= FILE_BYTES - HEAD.size, "a status is numbers and two short names"
        os.pwrite(self._fd, HEAD.pack(MAGIC, len(text), zlib.crc32(text)) + text, 0)

    def close(self) -> None:
        """The engine is no neighbour any more; doing it twice changes nothing."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def read_statuses(folder: Path) -> list[Status]:
    """The engines of a device that are alive, by name; the files of dead ones are removed on the way.

    A page that cannot be read (another version's, damaged, on a disk that fails) is left out.
    """
    found = (_read(path) for path in sorted(folder.glob("*" + SUFFIX)))
    return [status for status in found if status is not None]


def _read(path: Path) -> Status | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # its owner has just left
        return None
    try:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode) or seen.st_uid != os.getuid():
            return None
        if _is_abandoned(fd):
            path.unlink(missing_ok=True)
            path.with_suffix(".sock").unlink(missing_ok=True)
            return None
        statuses = (_parse(os.pread(fd, FILE_BYTES, 0)) for _ in range(READ_ATTEMPTS))
        return next((status for status in statuses if status is not None), None)
    except OSError:
        return None
    finally:
        os.close(fd)


def _is_abandoned(fd: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    return False


def _parse(page: bytes) -> Status | None:
    if len(page) < HEAD.size:
        return None
    magic, length, checksum = HEAD.unpack_from(page)
    text = page[HEAD.size : HEAD.size + length]
    if magic != MAGIC or len(text) != length or zlib.crc32(text) != checksum:
        return None
    try:
        return msgspec.json.decode(text, type=Status)
    except msgspec.DecodeError:
        return None
