"""gflags' and other habits of spelling → one canonical spelling: `--name=value`, each flag once.

A pure function of its tokens. It knows which flags exist and which are true/false, but not what a value means or
whether it is allowed; it reads nothing else. Where it differs from gflags: `--flag false` (two arguments) is false,
and names are never abbreviated.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from xllm_cli.declare import FALSE_WORDS, TRUE_WORDS, Flag, did_you_mean
from xllm_cli.flags import ALIASES, FLAGS
from xllm_cli.foreign_names import advice

_HELP = MappingProxyType({"helpfull": "all", "helpshort": "short"})  # gflags' names for two of our --help=TOPIC
_DASHES = frozenset("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d")


class Canonical(NamedTuple):
    """`argv` in order of first appearance; with `errors` it is what could be understood."""

    argv: list[str]
    warnings: list[str]
    errors: list[str]


def canonical(tokens: Sequence[str]) -> Canonical:
    """The canonical spelling of `xllm serve`'s arguments. A repeated flag: a list grows, else the last one wins, with a
    warning."""
    reader = _Reader(tokens)
    reader.read()
    argv = [f"--{name}={_joined(name, values)}" for name, values in reader.given.items()]
    warnings = [
        f"--{name} is given {len(values)} times ({', '.join(map(repr, values))}): the last one, {values[-1]!r}, wins"
        for name, values in reader.given.items()
        if len(set(values)) > 1 and not _is_list(name)
    ]
    return Canonical(argv, warnings, reader.errors)


def _joined(name: str, values: Sequence[str]) -> str:
    return ",".join(values) if _is_list(name) else values[-1]


def _is_list(name: str) -> bool:
    return name in FLAGS and FLAGS[name].meta.get("is_list", False)


@dataclass
class _Reader:
    """The tokens, how far they are read (`at`), and what was found so far."""

    tokens: Sequence[str]
    at: int = 0
    given: dict[str, list[str]] = field(default_factory=dict)
    positionals: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def read(self) -> None:
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            self.at += 1
            if token == "--":
                self._read_words(self.tokens[self.at :])
                break
            if reason := _unreadable(token):
                self.errors.append(reason)
            elif _is_flag(token):
                self._read_flag(token)
            elif token.strip(" \t\n"):
                self.positionals.append(token)
        self._read_positionals()

    def _read_words(self, tokens: Sequence[str]) -> None:
        """What comes after the end of flags: a word may begin with any dash there."""
        for token in tokens:
            if "\r" in token:
                self.errors.append(_unreadable(token))
            elif token.strip():
                self.positionals.append(token)

    def _read_flag(self, token: str) -> None:
        bare = token[1:] if token[1] != "-" else token[2:]
        name, equals, value = bare.partition("=")
        if re.search(r"\s", name.strip()):
            self.errors.append(f"{token!r} holds a flag and its value in one argument: pass as two arguments or with =")
            return
        name = "help" if token == "-h" else name.strip().replace("-", "_")
        name = ALIASES.get(name, name)
        if name in _HELP:
            self._give("help", _HELP[name])
        elif name in FLAGS:
            self._give(name, value if equals else self._following(FLAGS[name]))
        elif positive := _negated(name):
            if equals:
                self.errors.append(f"{token}: the negated form takes no value, write --{positive}={value}")
            self._give(positive, "false")
        else:
            self.errors.append(_unknown(token.partition("=")[0], name))
            if not equals and self._peek() is not None and not _is_flag(self.tokens[self.at]):
                self.at += 1  # most likely its value: one error is enough

    def _give(self, name: str, value: str | None) -> None:
        if value is None:
            self.errors.append(f"--{name} needs a value: {FLAGS[name].expects}")
        else:
            self.given.setdefault(name, []).append(value)

    def _following(self, flag: Flag) -> str | None:
        """The value of a flag given without `=`: its bare value, or the next argument where that is a value."""
        after = self._peek()
        if flag.kind == "bool" or "bare" in flag.meta:
            if after is not None and after.lower() in TRUE_WORDS | FALSE_WORDS and flag.kind != "str":
                self.at += 1
                return after
            return flag.meta.get("bare", "true")
        if after is None or _is_flag(after) or after == "--":
            return None
        self.at += 1
        return after

    def _peek(self) -> str | None:
        """The next argument, unless it cannot be a value. Blanks other than '' are stray line continuations."""
        while self.at < len(self.tokens) and self.tokens[self.at].isspace() and "\r" not in self.tokens[self.at]:
            self.at += 1
        if self.at == len(self.tokens) or _unreadable(self.tokens[self.at]):
            return None
        return self.tokens[self.at]

    def _read_positionals(self) -> None:
        if len(self.positionals) == 1 and "model" not in self.given:
            self.given["model"] = self.positionals
            return
        for token in self.positionals:
            self.errors.append(
                f"unexpected argument {token!r}: flags begin with --, and a true/false flag takes only true or false"
            )


def _is_flag(token: str) -> bool:
    """`--name`, `-name` or `-h`; a negative number is a value."""
    return re.match(r"--?[^-\d\s]|---|--\d", token) is not None


def _unreadable(token: str) -> str:
    """Why a token can only be a mistake of copying, or ''."""
    if "\r" in token:
        return f"{token!r} ends in a carriage return: the script has Windows line ends, convert it with dos2unix"
    for char in token[:2]:
        if char in _DASHES:
            code, name = f"U+{ord(char):04X}", unicodedata.name(char)
            return f"{token!r}: {char!r} looks like a dash but is {code} ({name}), type it as -"
        if char != "-":
            break
    return ""


def _negated(name: str) -> str:
    """The true/false flag that `noNAME`, `no_NAME` or `no-NAME` turns off, or ''."""
    for prefix in ("no_", "no"):
        positive = name.removeprefix(prefix)
        if positive != name and positive in FLAGS and FLAGS[positive].kind == "bool":
            return positive
    return ""


def _unknown(spelled: str, name: str) -> str:
    if foreign := advice(name):
        return f"{spelled}: {foreign}"
    if name.startswith("no") and name[2:].lstrip("_") in FLAGS:
        return f"{spelled}: only true/false flags have a negated form"
    return f"no such flag {spelled}" + did_you_mean(name, FLAGS, "--")
