"""How a flag is declared, and how the generators read a declaration back.

A flag is a field of a `Section`, written with `flag()`; `declared()` turns the fields into `Flag` records, from which
options, help, tables, the JSON file's keys and the environment's names are made. Knows no particular flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack, get_args

from pydantic import BaseModel, ConfigDict, Field

INT64_MAX = 2**63 - 1

Status = Literal["works", "accepted", "unsupported"]
Kind = Literal["bool", "int", "bytes", "float", "str", "choice"]


class Meta(TypedDict, total=False):
    """What a declaration may say beyond type, default and help.

    `low`, `high` bound a number (inclusive). `status`: "accepted" is parsed but changes nothing here (`why` says why),
    "unsupported" is refused unless it has its default or a value of `supported`. `unset` is the spelling that older
    scripts use for "not set" and is read as None. `bare` is the value of the flag given without one. `common` flags
    are in the short help.
    """

    low: float
    high: float
    status: Status
    supported: tuple[Any, ...]
    why: str
    unset: int
    bare: str
    is_bytes: bool
    common: bool


def flag(default: Any, help: str, **meta: Unpack[Meta]) -> Any:
    """One field of a section."""
    extra: Any = {key: list(value) if isinstance(value, tuple) else value for key, value in meta.items()}
    return Field(default, description=help, ge=meta.get("low"), le=meta.get("high"), json_schema_extra=extra)


class Section(BaseModel):
    """A group of flags: frozen, strict about types, no unknown names, no nan or inf."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


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

    @property
    def expects(self) -> str:
        """The allowed values in words, for help and messages."""
        if self.kind == "bool":
            return "true or false"
        if self.kind == "choice":
            return "one of " + ", ".join(choice or '""' for choice in self.choices)
        if self.kind == "str":
            return "text"
        noun = {"int": "an integer", "float": "a number", "bytes": "bytes, KiB, MiB, GiB allowed,"}[self.kind]
        low, high = self.meta.get("low", 0), self.meta.get("high", INT64_MAX)
        return f"{noun} of at least {low:g}" if high >= INT64_MAX else f"{noun} from {low:.10g} to {high:.10g}"


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
        meta: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in extra.items()}
        kind, choices = _kind(field.annotation, meta)
        yield Flag(name, section, kind, field.default, field.description, choices, meta)
