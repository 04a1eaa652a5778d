"""The tools of a chat request: their shape, which of them must be called, and the grammar of such calls.

Calls are written as Hermes and Qwen do (toolcalls.py); a model of another habit is refused tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from xllm_cli.errors import RequestError
from xllm_cli.server.toolcalls import CLOSE, OPEN

MAX_TOOLS = 128
_DEFINITIONS = ("$defs", "definitions")  # references into them stay right when they move to the top


class _Function(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: _Function


class _Name(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: str


class NamedChoice(BaseModel):
    """The one function that must be called."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: _Name


class ToolFields(BaseModel):
    """The fields of a chat request about tools; `tools` stay as they came, for the template."""

    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        try:
            for tool in value or ():
                _Tool.model_validate(tool)
        except ValidationError as error:
            place = ".".join(str(part) for part in error.errors(include_input=False)[0]["loc"])
            raise ValueError(f"a tool is a function with a name and parameters, not so: {place}") from error
        return value

    @model_validator(mode="after")
    def _check_choice(self) -> ToolFields:
        names = [tool["function"]["name"] for tool in self.tools or ()]
        is_named = isinstance(self.tool_choice, NamedChoice)
        if (is_named or self.tool_choice == "required") and not names:
            raise RequestError("tool_choice needs tools", code="invalid_value", param="tool_choice")
        if isinstance(self.tool_choice, NamedChoice) and self.tool_choice.function.name not in names:
            raise RequestError("tool_choice names none of the tools", code="invalid_value", param="tool_choice")
        return self

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools the model hears of."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """Those of which one must be called; empty when the model may answer in words."""
        if isinstance(self.tool_choice, NamedChoice):
            name = self.tool_choice.function.name
            return [tool for tool in self.tools or () if tool["function"]["name"] == name][:1]
        return self.offered_tools if self.tool_choice == "required" else []

    @property
    def most_calls(self) -> int | None:
        """How many calls may be made; None for any number."""
        return 1 if self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedChoice) else None


def call_rules(tools: Sequence[Mapping[str, Any]], most_calls: int | None, tag: Mapping[str, str]) -> str:
    """Lark rules of `calls`. `tag` has the two tags as Lark."""
    schema = msgspec.json.encode(_call_schema(tools)).decode()
    more = "" if most_calls == 1 else ' ("\\n" call)*'
    return f'calls: call{more}\ncall: {tag[OPEN]} "\\n" body "\\n" {tag[CLOSE]}\nbody: %json {schema}'


def _call_schema(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON schema of one call. RequestError when tools define one name differently."""
    definitions: dict[str, dict[str, Any]] = {}
    kinds: list[dict[str, Any]] = []
    for tool in tools:
        function = tool["function"]
        parameters = dict(function.get("parameters") or {"type": "object"})
        for place in _DEFINITIONS:
            for name, schema in dict(parameters.pop(place, {})).items():
                if definitions.setdefault(place, {}).setdefault(name, schema) != schema:
                    raise RequestError(
                        f"tools: two of them define {place} of one name differently",
                        code="invalid_value",
                        param="tools",
                    )
        kinds.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": kinds, **definitions}
