"""What an answer must look like: `response_format` read into a grammar for the engine. Knows no prompts and no models.

{"type": "text"}                                        anything
{"type": "json_object"}                                 any JSON object
{"type": "json_schema", "json_schema": {"schema": …}}   JSON that fits the schema
{"type": "regex", "regex": "…"}                         what the regular expression matches
{"type": "lark", "lark": "…"}                           what the grammar derives, in llguidance's Lark
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from xllm_cli.core import Grammar
from xllm_cli.errors import RequestError

PARAM = "response_format"
TYPES = ("text", "json_object", "json_schema", "regex", "lark")


def grammar_of(wanted: Mapping[str, Any] | None, end_ids: tuple[int, ...]) -> Grammar | None:
    """The grammar of a `response_format`; None when anything may be answered. RequestError on any other shape.

    Only the shape is checked here: whether a grammar can be used is known once the engine has compiled it.
    """
    match (wanted or {}).get("type", "text" if not wanted else None):
        case "text":
            return None
        case "json_object":
            return Grammar("json_schema", '{"type":"object"}', end_ids, PARAM)
        case "json_schema":
            return Grammar("json_schema", msgspec.json.encode(_schema(wanted)).decode(), end_ids, PARAM)
        case "regex":
            return Grammar("regex", _text(wanted, "regex"), end_ids, PARAM)
        case "lark":
            return Grammar("lark", _text(wanted, "lark"), end_ids, PARAM)
    raise _refusal(f"its type must be one of {', '.join(TYPES)}")


def _schema(wanted: Mapping[str, Any] | None) -> dict[str, Any]:
    outer = (wanted or {}).get("json_schema")
    schema = outer.get("schema") if isinstance(outer, dict) else None
    if not isinstance(schema, dict):
        raise _refusal("json_schema needs json_schema.schema, an object")
    return schema


def _text(wanted: Mapping[str, Any] | None, name: str) -> str:
    text = (wanted or {}).get(name)
    if not isinstance(text, str) or not text:
        raise _refusal(f"{name} needs {name}, a text")
    return text


def _refusal(reason: str) -> RequestError:
    return RequestError(f"{PARAM}: {reason}", code="invalid_value", param=PARAM)
