"""How a flag is declared, and how the generators read a declaration back.

A flag is a field of a `Section`, written with `flag()`; `declared()` turns the fields into `Flag` records, from which
options, help, tables, the JSON file's keys and the environment's names are made. Knows no particular flag.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypedDict, Unpack, get_args

from pydantic import BaseModel, ConfigDict, Field

INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
INT64_MAX = 2**63 - 1
TRUE_WORDS = frozenset({"true", "t", "1", "yes", "y", "on"})
FALSE_WORDS = frozenset({"false", "f", "0", "no", "n", "off"})
_SUFFIXES = {
    "": 1,
    "k": 2**10,
    "kib": 2**10,
    "m": 2**20,
    "mib": 2**20,
    "g": 2**30,
    "gib": 2**30,
    "t": 2**40,
    "tib": 2**40,
}

Status = Literal["works", "accepted", "unsupported"]
Kind = Literal["bool", "int", "bytes", "float", "str", "choice"]


class Meta(TypedDict, total=False):
    """What a declaration may say beyond type, default and help.

    `low`, `high` bound a number (inclusive), `multiple` is its step. `status`: "accepted" is parsed but changes nothing
    here, "unsupported" is refused unless it has its default or a value of `supported`; `why` says why. `never`: nothing
    to wait for, `instead` is what to write. `only_on` are the devices where it has an effect. `unset` is the spelling
    that older scripts use for "not set" and is read as None. `bare` is the value of the flag given without one. `also`
    are other names of the flag on the command line. `common` flags are in the short help. `is_list` joins repetitions
    with commas. `is_secret` keeps the value out of every dump, message and log.
    """

    low: float
    high: float
    multiple: int
    status: Status
    supported: tuple[Any, ...]
    why: str
    never: bool
    only_on: tuple[str, ...]
    instead: str
    also: tuple[str, ...]
    unset: int
    bare: str
    is_bytes: bool
    common: bool
    is_list: bool
    is_secret: bool


def flag(default: Any, help: str, **meta: Unpack[Meta]) -> Any:
    """One field of a section."""
    extra: Any = {key: list(value) if isinstance(value, tuple) else value for key, value in meta.items()}
    bounds: Any = {"ge": meta.get("low"), "le": meta.get("high"), "multiple_of": meta.get("multiple")}
    hidden = meta.get("is_secret", False)
    return Field(default, description=help, json_schema_extra=extra, exclude=hidden, repr=not hidden, **bounds)


def idle(default: Any, help: str, reason: str, **meta: Unpack[Meta]) -> Any:
    """A flag that is taken from older scripts and changes nothing here."""
    said: Meta = {**meta, "why": reason, "status": "accepted"}
    return flag(default, help, **said)


def unbuilt(default: Any, help: str, reason: str, **meta: Unpack[Meta]) -> Any:
    """A flag that is refused unless it has its default or a value of `supported`."""
    said: Meta = {**meta, "why": reason, "status": "unsupported"}
    return flag(default, help, **said)


class Section(BaseModel):
    """A group of flags: frozen, strict about types, no unknown names, no nan or inf.

    `group` is said once for all of its flags; what a flag says itself wins.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
    group: ClassVar[Meta] = {}


@dataclass(frozen=True, slots=True)
class Flag:
    """One declared flag, as the generators read it. `section` is the attribute of Config, "launch" for LaunchConfig."""

    name: str
    section: str
    kind: Kind
    default: Any
    help: str
    choices: tuple[str, ...]
    meta: Meta

    @property
    def status(self) -> Status:
        """Whether it works, is accepted without effect, or is refused."""
        return self.meta.get("status", "works")

    def is_supported(self, value: Any) -> bool:
        """False for a value that is declared but not built."""
        supported = self.meta.get("supported", (self.default,) if self.status == "unsupported" else None)
        return supported is None or value in supported

    def why_idle(self, value: Any, device: str) -> str:
        """Why a value that asks for something changes nothing on this device; '' if it asks nothing or has an effect.

        None, also where it is read as false, asks nothing.
        """
        if value is None or value == self.default or (value is False and self.default is None):
            return ""
        if self.status == "accepted":
            return self.meta["why"]
        devices = self.meta.get("only_on", (device,))
        return "" if device in devices else f"the device is {device}, and this is for {' and '.join(devices)}"

    @property
    def expects(self) -> str:
        """The allowed values in words, for help and messages."""
        if self.kind == "bool":
            return "true or false"
        if self.kind == "choice":
            return "one of " + ", ".join(choice or '""' for choice in self.choices)
        if self.kind == "str":
            return "text"
        noun = {"int": "an integer", "float": "a number", "bytes": "bytes (KiB, MiB, GiB allowed)"}[self.kind]
        if "high" not in self.meta:
            return f"{noun} of at least {self.meta['low']:g}"
        low, high = self.meta["low"], self.meta["high"]
        step = f", a multiple of {self.meta['multiple']}" if "multiple" in self.meta else ""
        return f"{noun} from {low:g} to {high:g}" if self.kind == "float" else f"{noun} from {low} to {high}{step}"

    def parse(self, text: str) -> Any:
        """The value that a text from the command line or the environment means; ValueError if it means none.

        Truth has many words (1/0, t/f, yes/no, y/n, on/off), bytes have suffixes, integers may be grouped (1_000).
        """
        if self.kind == "bool":
            return parse_bool(text)
        if self.kind in ("int", "bytes"):
            return self.normalise(_parse_int(text, _SUFFIXES if self.kind == "bytes" else {"": 1}))
        if self.kind == "float":
            if not text.isascii() or text != text.strip():
                raise ValueError(text)
            return float(text)
        if self.meta.get("bare") == "true" and text.lower() in TRUE_WORDS | FALSE_WORDS:
            return str(parse_bool(text)).lower()
        return self.normalise(text)

    def normalise(self, value: Any) -> Any:
        """A typed value in the one form a Config holds: the older spelling of "unset" as None, choices in our case."""
        if "unset" in self.meta and value == self.meta["unset"] and not isinstance(value, bool):
            return None
        if self.kind == "choice" and isinstance(value, str):
            return next((choice for choice in self.choices if choice.lower() == value.lower()), value)
        return value

    def spell(self, value: Any) -> str:
        """`--name=value` as one would type it; None is told as unset, a secret is not told."""
        if value is None:
            return f"--{self.name} unset"
        if value and self.meta.get("is_secret"):
            return f"--{self.name}=(hidden)"
        return f"--{self.name}={str(value).lower() if isinstance(value, bool) else value}"


def parse_bool(text: str) -> bool:
    """True or false by any of the accepted words, in any case; ValueError for other texts."""
    if text.lower() in TRUE_WORDS:
        return True
    if text.lower() in FALSE_WORDS:
        return False
    raise ValueError(text)


def parse_bytes(text: str) -> int:
    """A number of bytes, perhaps with a suffix (KiB, M, GiB …); ValueError for other texts."""
    return _parse_int(text, _SUFFIXES)


def _parse_int(text: str, suffixes: dict[str, int]) -> int:
    match = re.fullmatch(r"([+-]?[0-9]+(?:_[0-9]+)*)([A-Za-z]*)", text)
    if match is None or match[2].lower() not in suffixes:
        raise ValueError(text)
    return int(match[1]) * suffixes[match[2].lower()]


def closest(name: str, names: Iterable[str]) -> list[str]:
    """Up to three of `names` that `name` is likely to stand for: misspelt or begun."""
    names = sorted(names)
    close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.7)
    if close and difflib.SequenceMatcher(None, name.lower(), close[0]).ratio() > 0.9:
        return close[:1]
    begun = [other for other in names if len(name) > 2 and other.startswith(name.lower()) and other not in close]
    return (close + begun)[:3]


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """`, did you mean …?`, or nothing when no name is close."""
    close = closest(name, names)
    return f", did you mean {' or '.join(prefix + other for other in close)}?" if close else ""


def _kind(annotation: Any, meta: Meta) -> tuple[Kind, tuple[str, ...]]:
    members = [member for member in get_args(annotation) if member is not type(None)]
    if members and isinstance(members[0], str):
        return "choice", tuple(members)
    plain = members[0] if members else annotation
    names: dict[Any, Kind] = {bool: "bool", int: "int", float: "float", str: "str"}
    return ("bytes" if meta.get("is_bytes") else names[plain]), ()


def declared(section: str, model: type[Section]) -> Iterator[Flag]:
    """The flags of a section, in order."""
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict) and field.description is not None
        own: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in extra.items()}
        meta: Any = {**model.group, **own}
        kind, choices = _kind(field.annotation, meta)
        yield Flag(name, section, kind, field.default, field.description, choices, meta)
