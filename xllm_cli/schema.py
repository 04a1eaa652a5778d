"""The JSON schema of --config_json_file, generated from the flags, for editors and deployment tools.

It has the canonical names only; the reader (sources.py) also takes hyphens in names and choices in any case.
"""

from __future__ import annotations

from typing import Any

from xllm_cli.declare import Flag
from xllm_cli.flags import FLAGS, sections

_TYPES = {"bool": "boolean", "int": "integer", "bytes": "integer", "float": "number", "str": "string"}


def json_schema() -> dict[str, Any]:
    """An object of flags, or of sections of flags by either of their names."""
    flags = {name: _flag(flag) for name, flag in FLAGS.items() if flag.section != "launch"}
    groups: dict[str, Any] = {}
    for attribute, section in sections():
        group = {
            "type": "object",
            "description": section.__doc__,
            "properties": {name: flags[name] for name in section.model_fields},
            "additionalProperties": False,
        }
        groups |= {attribute: group, section.__name__: group}
    shared = {name: {"anyOf": [flags[name], groups[name]]} for name in flags.keys() & groups.keys()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "xllm serve --config_json_file",
        "type": "object",
        "properties": {**flags, **groups, **shared},
        "additionalProperties": False,
    }


def _flag(flag: Flag) -> dict[str, Any]:
    """null is "not set", and so is what older scripts write for it."""
    meta = flag.meta
    kinds: list[dict[str, Any]] = [
        {"enum": list(flag.choices)} if flag.kind == "choice" else {"type": _TYPES[flag.kind]}
    ]
    for name, key in (("low", "minimum"), ("high", "maximum"), ("multiple", "multipleOf")):
        if name in meta:
            kinds[0][key] = meta[name]  # type: ignore[literal-required]
    if "unset" in meta:
        kinds.append({"const": meta["unset"]})
    described: dict[str, Any] = {"description": flag.help, "default": flag.default}
    if meta.get("is_secret"):
        described["writeOnly"] = True
    return {**described, "anyOf": [*kinds, {"type": "null"}]}
