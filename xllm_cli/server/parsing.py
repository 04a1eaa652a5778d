"""From a JSON body to a checked model: what is malformed, unsupported or out of range is a 400 that names the field.

Unknown fields are accepted and told of (`unknown_fields`); fields this server knows but cannot honour are refused,
because ignoring them would change the answer silently. The input is never repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from xllm_cli.errors import RequestError

MAX_IGNORED = 16  # names reported back
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

# Field → the values that ask for nothing. Any other value is a 400.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "beam_width": (None, 0, 1),
    "best_of": (None, 1),
    "chat_template": (None,),
    "documents": (None, []),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "input_tensors": (None,),
    "modalities": (None, ["text"]),
    "no_stop_trim": (None, False),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "return_hidden_states": (None, False),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
}
# What to do instead, where there is something.
_INSTEAD: dict[str, str] = {
    "best_of": "ask for n choices and take the best",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_grammar": "use response_format with type lark",
    "guided_json": "use response_format with type json_schema",
    "guided_regex": "use response_format with type regex",
    "prompt_logprobs": "use echo with logprobs in /v1/completions",
    "structured_outputs": "use response_format",
}
# Bookkeeping of clients and routers that changes no answer: accepted without a word.
HARMLESS = frozenset(
    {
        "include_reasoning",
        "metadata",
        "prompt_cache_key",
        "request_id",
        "separate_reasoning",
        "service_tier",
        "store",
        "stream_reasoning",
        "user",
    }
)

RequestModel = TypeVar("RequestModel", bound=BaseModel)


def parse(kind: type[RequestModel], body: bytes | dict[str, Any]) -> RequestModel:
    """The request in a JSON body, or in one already decoded. RequestError 400 naming the field; the input is never
    repeated."""
    fields = decode_object(body) if isinstance(body, bytes) else body
    refuse(fields, UNSUPPORTED)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        depth = 3 if first["loc"][:1] == ("messages",) else 1  # deeper parts name union members, not fields
        path = ".".join(str(part) for part in first["loc"][:depth]) or None
        text = first["msg"].removeprefix("Value error, ")
        message = f"{path}: {text}" if path else text
        raise RequestError(message, code="invalid_value", param=path) from error


def refuse(fields: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """RequestError 400 for a field of the table `neutral` that has another value than those there."""
    for name, values in neutral.items():
        if name in fields and fields[name] not in values:
            text = f"{name} is not supported here" + (f"; {_INSTEAD[name]}" if name in _INSTEAD else "")
            raise RequestError(text, code="unsupported_parameter", param=name)


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object; NaN, bad UTF-8, other types and hopeless nesting are a 400."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError("the body is not valid JSON", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return value


def body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """What OpenAPI says of a route that takes this request: the body is read by `parse`, not by the framework. Where
    it knows `stream`, the answer may be one."""
    schema = kind.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    kinds = ["application/json", *(["text/event-stream"] if "stream" in kind.model_fields else [])]
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"content": {name: {} for name in kinds}}},
    }


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        if "$ref" in node:
            return _inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
        return {name: _inlined(value, definitions) for name, value in node.items()}
    return [_inlined(value, definitions) for value in node] if isinstance(node, list) else node


def unknown_fields(names: Iterable[str]) -> list[str]:
    """Those that this server does not know; odd ones, which no client means as a field, as `?`."""
    unknown = [name for name in names if name not in UNSUPPORTED and name not in HARMLESS]
    return sorted({name if _FIELD_NAME.fullmatch(name) else "?" for name in unknown})[:MAX_IGNORED]
