"""The API keys: where they come from and whether a request brings one. Never printed, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from xllm_cli.errors import ConfigError
from xllm_cli.flags import SecurityConfig


class ApiKeys:
    """A set of keys; falsy without any. Only their digests are kept."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def of(cls, security: SecurityConfig) -> ApiKeys:
        """The keys of --api_key and --api_key_file. ConfigError for a file that cannot be read or holds none."""
        keys = [key.strip() for key in security.api_key.split(",")]
        if security.api_key_file:
            keys += read_keys(Path(security.api_key_file))
        keys = [key for key in keys if key]
        if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
            raise ConfigError("an API key may hold only printable ASCII characters without blanks")
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, key: str) -> bool:
        """Whether `key` is one of ours; the time it takes says nothing about them."""
        given = _digest(key)
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path) -> list[str]:
    """The keys in a file, one on each line. ConfigError for a file that cannot be read or holds none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--api_key_file={path}: {reason}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"--api_key_file={path} holds no key: write one on each line")
    return keys
