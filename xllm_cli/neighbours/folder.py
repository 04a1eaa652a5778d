"""The folder in which all engines of one user and one device meet.

<base>/xllm-UID/<device>/  lock         flocked while free memory is read and pages are created
                           ID.status    what an engine tells of itself, flocked for as long as it lives
                           ID.sock      where it is asked for memory

The base does not depend on the environment: two engines of one user must find each other whatever started them.
Containers that share a device mount one folder and name it (`--vmm_neighbours_dir`).
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from xllm_cli.errors import DeviceError

LOCK_NAME = "lock"
BASES = (Path("/dev/shm"), Path("/tmp"))  # a private folder is made below it, and checked


def device_folder(device: str, base: str | Path = "") -> Path:
    """The folder of `device` ("cpu", "npu0"), made where it is missing. `base` "" is the machine's own.

    Raises DeviceError if it is somebody else's, not private, or cannot be made.
    """
    return _private(_private(_users_folder(base)) / device)


def device_folders(base: str | Path = "") -> list[Path]:
    """The folders of all devices on which an engine of this user has run; none is made."""
    users = _users_folder(base)
    return sorted(path for path in users.iterdir() if path.is_dir()) if users.is_dir() else []


def _users_folder(base: str | Path) -> Path:
    root = Path(base) if base else next((path for path in BASES if os.access(path, os.W_OK | os.X_OK)), BASES[-1])
    return root / f"xllm-{os.getuid()}"


def _private(folder: Path) -> Path:
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        seen = folder.lstat()
    except OSError as error:
        raise DeviceError(f"{folder}, where the engines of a device meet, cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        raise DeviceError(f"{folder} must be a folder of mode 0700 of this user; remove it and start again")
    return folder
