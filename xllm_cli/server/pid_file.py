"""The pid file: written once the server listens, locked while it lives, replaced when its server is dead."""

from __future__ import annotations

import contextlib
import fcntl
import os

import psutil  # type: ignore[import-untyped]

from xllm_cli.errors import BindError, ConfigError


class PidFile:
    """Holds this process's id in `path` until `remove`; an empty path holds nothing.

    BindError when a living server has it, ConfigError when it cannot be written or is no pid file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        if not path:
            return
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"--pid_file={path}: {error.strerror}") from error
        try:
            self._take()
        except BaseException:
            os.close(self._file)
            raise

    def _take(self) -> None:
        content = os.read(self._file, 64).strip()
        if content and not content.isdigit():
            raise ConfigError(f"--pid_file={self._path} exists and holds no process id; it is left alone")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BindError(f"--pid_file={self._path}: process {int(content or 0)} is running with it") from error
        if content and int(content) != os.getpid() and self._is_alive(int(content)):
            raise BindError(f"--pid_file={self._path}: process {int(content)} is alive and has written it")
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def _is_alive(self, pid: int) -> bool:
        """Whether the process that wrote the file lives; a younger one only has inherited its number."""
        try:
            created: float = psutil.Process(pid).create_time()
        except (psutil.Error, ValueError, OverflowError):
            return False
        return created <= os.fstat(self._file).st_mtime + 1

    def remove(self) -> None:
        """Remove the file if it is still ours."""
        if not self._path:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._file)):
                os.unlink(self._path)
            os.close(self._file)
        self._path = ""
