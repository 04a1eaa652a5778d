"""What a chat message is made of while it is written: content, reasoning and tool calls. The interface of the parsers.

A parser gets a message's text in pieces of any size and tells what became certain. What it told is never taken back,
so the join of all deltas is the same whatever the pieces were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class ToolCall(NamedTuple):
    """A complete call: the function's name and its arguments, the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """One of the three."""

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None


class MessageParser(Protocol):
    """Takes a message apart."""

    def feed(self, text: str) -> list[Delta]:
        """What became certain with this text."""
        ...

    def flush(self) -> list[Delta]:
        """What is left at the end of the message."""
        ...


class PlainParser:
    """Everything is content."""

    def feed(self, text: str) -> list[Delta]:
        """See MessageParser."""
        return [Delta(content=text)] if text else []

    def flush(self) -> list[Delta]:
        """See MessageParser."""
        return []


def held_back(text: str, tag: str) -> int:
    """Letters at the end of `text` that may become `tag`."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-size:])), 0)
