"""gflags' --flagfile: a file of flags, one a line, read as if they were typed in its place. Knows no flag.

Blank lines and lines that begin with # or // are left out. A flagfile may name others; one that names itself is an
error, and so is a line that is no flag (gflags reads those as names of programs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from xllm_cli.errors import ConfigError

_NAMES = ("--flagfile", "-flagfile")
_COMMENTS = ("#", "//")


class Token(NamedTuple):
    """An argument and the flagfile whose line it is, "" where it was typed."""

    text: str
    file: str


def expand(tokens: Sequence[str]) -> list[Token]:
    """The tokens with the content of every flagfile in its place. ConfigError when one cannot be read."""
    return list(_expanded(tokens, "", ()))


def _expanded(tokens: Sequence[str], file: str, outer: tuple[Path, ...]) -> Iterator[Token]:
    rest = iter(tokens)
    for token in rest:
        name, equals, value = token.partition("=")
        if token == "--":
            yield Token(token, file)
            yield from (Token(word, file) for word in rest)
        elif name in _NAMES:
            for path in (value if equals else next(rest, "")).split(","):
                yield from _content(path, file, outer)
        else:
            yield Token(token, file)


def _content(name: str, file: str, outer: tuple[Path, ...]) -> Iterator[Token]:
    path = Path(name)
    if not name:
        where = f" in {file}" if file else ""
        raise ConfigError(f"--flagfile{where} needs a value: a file of flags, one on each line")
    if path.resolve() in outer:
        raise ConfigError(f"--flagfile={name} names itself")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--flagfile={name}: {reason}") from error
    lines = [line.strip(" \t\n") for line in text.split("\n")]
    tokens = [line for line in lines if line and not line.startswith(_COMMENTS)]
    for token in tokens:
        if not token.startswith("-"):
            raise ConfigError(f"--flagfile={name}: the line {token!r} is no flag, write --name=value")
    yield from _expanded(tokens, name, (*outer, path.resolve()))
