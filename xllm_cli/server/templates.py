"""Chat templates: Jinja text from the model folder, run in a sandbox. Knows nothing of tokens or HTTP.

The environment is the one the hub's templates are written for: trimmed blocks, loop controls, `raise_exception`,
`strftime_now`, `tojson` without HTML escaping, and a `{% generation %}` block that only marks its body.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# What a template's own expressions can raise on messages it was not written for.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


_MARK = "\ue000\ue001"  # of the private use area: no text of this world holds it


class TemplateError(ValueError):
    """The template cannot be compiled, or refuses these messages; the text is the template's own."""


class _GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}` renders its body; trainers use the mark, a server does not."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads this attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template with the model's special tokens. Construction compiles and dry-runs: TemplateError if bad."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self.render([{"role": "user", "content": "Hello"}])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Whatever a template does wrong with these messages is a TemplateError."""
        return self._render(messages, add_generation_prompt, variables)

    def render_open(self, messages: Sequence[Mapping[str, Any]], *, variables: Mapping[str, Any] | None = None) -> str:
        """The prompt text up to the end of the last message's content. TemplateError where that cannot be found."""
        *earlier, last = messages
        if not isinstance(last.get("content"), str):
            raise TemplateError("only a message with a text can be continued")
        marked = self._render([*earlier, {**last, "content": last["content"] + _MARK}], False, variables)
        text, mark, _ = marked.rpartition(_MARK)
        if not mark:
            raise TemplateError("the chat template does not show the last message as it is, so it cannot be continued")
        return text

    def _render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any] | None
    ) -> str:
        scope: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        scope.update(messages=list(messages), add_generation_prompt=add_generation_prompt)
        try:
            return self._template.render(scope)
        except _TEMPLATE_FAILURES as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error
