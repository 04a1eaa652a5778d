"""The folder that server and engine share: private, locked while its server lives, swept when it is not.

xllm-XXXXXXXX/  lock         held by the server (flock) for as long as it lives
                config.json  to_engine  from_engine
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "xllm-"
MAX_SOCKET_PATH = 107  # sun_path, less its final zero


class RuntimeFolder:
    """A new folder that only this user can enter, under XDG_RUNTIME_DIR where that is sound, else the temporary one.

    What servers that were killed left there is removed first.
    """

    def __init__(self) -> None:
        parent = _private_parent() or Path(tempfile.gettempdir())
        sweep(parent)
        made = Path(tempfile.mkdtemp(prefix="new-" + PREFIX, dir=parent))
        self._lock = os.open(made / "lock", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.rename(parent / made.name.removeprefix("new-"))  # it has a sweepable name only when locked

    def write(self, name: str, text: str) -> None:
        """Create a file that only this user can read."""
        with os.fdopen(os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)

    def remove(self) -> None:
        """Remove it, whatever is left in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def sweep(parent: Path) -> list[Path]:
    """Remove the folders of this user whose server is gone; returns them."""
    abandoned = [folder for folder in parent.glob(PREFIX + "*") if _is_abandoned(folder)]
    for folder in abandoned:
        shutil.rmtree(folder, ignore_errors=True)
    return abandoned


def _is_abandoned(folder: Path) -> bool:
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return False
        lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _private_parent() -> Path | None:
    parent = os.environ.get("XDG_RUNTIME_DIR", "")
    try:
        status = os.stat(parent)
    except OSError:
        return None
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
    fits = len(os.path.join(parent, PREFIX + "12345678", "from_engine")) <= MAX_SOCKET_PATH
    return Path(parent) if private and fits else None
