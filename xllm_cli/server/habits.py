"""How a model writes what is not content: tool calls and reasoning. As its chat template shows, or as flags say."""

from __future__ import annotations

from typing import NamedTuple

from xllm_cli.server import reasoning, toolcalls

_ASKS_TEMPLATE = ("", "auto")
_UNANNOUNCED = "deepseek-r1"


class Habits(NamedTuple):
    """`calls_tools`: as HermesParser reads it. `reasons`: as ThinkParser does; `begins_in_reasoning` without a tag."""

    calls_tools: bool
    reasons: bool
    begins_in_reasoning: bool = False


def habits_of(template: str | None, tool_call_parser: str = "", reasoning_parser: str = "") -> Habits:
    """The habits of a model with this chat template; a flag that names a parser is believed more than the template."""
    return Habits(
        _has(tool_call_parser, toolcalls.OPEN, template),
        _has(reasoning_parser, reasoning.OPEN, template),
        reasoning_parser == _UNANNOUNCED,
    )


def _has(parser: str, tag: str, template: str | None) -> bool:
    return tag in (template or "") if parser in _ASKS_TEMPLATE else parser != "none"
