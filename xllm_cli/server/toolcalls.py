"""Tool calls as Hermes and Qwen write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, several in a row.

A call is told when it is complete and right, never before: a client acts on what it is told. A block that is no call
is content, one that was cut off is nothing.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from xllm_cli.server.deltas import Delta, ToolCall, held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Content and calls. Blanks before a block and after one belong to neither."""

    def __init__(self, *, most_calls: int | None = None) -> None:
        """Calls beyond `most_calls` are dropped."""
        self._most = most_calls
        self._num_calls = 0
        self._held = ""
        self._block: _Block | None = None

    def feed(self, text: str) -> list[Delta]:
        """See MessageParser."""
        deltas: list[Delta] = []
        while text:
            if self._block is None:
                before, tag, text = self._search(text)
                deltas += self._content(before, is_before_block=bool(tag))
                self._block = _Block() if tag else None
            else:
                text = self._block.feed(text)
                if self._block.is_closed:
                    deltas += self._end(self._block)
                    self._block = None
        return deltas

    def flush(self) -> list[Delta]:
        """See MessageParser. A last call may lack its closing tag."""
        if self._block is not None:
            call = parse_call(self._block.body)
            return self._call(call) if call is not None else []
        rest, self._held = self._held, ""
        return [Delta(content=rest)] if rest and not (self._num_calls and rest.isspace()) else []

    def _search(self, text: str) -> tuple[str, str, str]:
        text = self._held + text
        before, tag, after = text.partition(OPEN)
        if tag:
            self._held = ""
            return before, tag, after
        # blanks wait, too: should a block follow, they are not content
        safe = text[: len(text) - held_back(text, OPEN)].rstrip()
        self._held = text[len(safe) :]
        return safe, "", ""

    def _content(self, text: str, *, is_before_block: bool) -> list[Delta]:
        if is_before_block:
            text = text.rstrip()
        return [Delta(content=text)] if text and not (self._num_calls and text.isspace()) else []

    def _end(self, block: _Block) -> list[Delta]:
        call = parse_call(block.body)
        return self._call(call) if call is not None else [Delta(content=f"{OPEN}{block.body}{CLOSE}")]

    def _call(self, call: ToolCall) -> list[Delta]:
        if self._most is not None and self._num_calls >= self._most:
            return []
        self._num_calls += 1
        return [Delta(call=call)]


class _Block:
    """What stands between the tags; a closing tag within a JSON string is text."""

    def __init__(self) -> None:
        self.body = ""
        self.is_closed = False
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> str:
        """Take letters up to the closing tag; what follows it is given back."""
        for index, letter in enumerate(text):
            self.body += letter
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = letter == "\\"
                self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter == ">" and self.body.endswith(CLOSE):
                self.body = self.body[: -len(CLOSE)]
                self.is_closed = True
                return text[index + 1 :]
        return ""


def parse_call(body: str) -> ToolCall | None:
    """The call a block holds; None when it is none. Models write `parameters` for `arguments`, or nothing at all."""
    try:
        value = json.loads(body, strict=False, parse_constant=_refuse)
        arguments = value.get("arguments", value.get("parameters")) if isinstance(value, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments, strict=False, parse_constant=_refuse)
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or not name or not isinstance(arguments, dict | None):
            return None
        return ToolCall(name, json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def arguments_as_object(call: dict[str, Any]) -> dict[str, Any]:
    """A call of an earlier message as templates want it: its arguments an object, where their text is one."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
