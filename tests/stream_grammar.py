"""Checks that a server-sent stream is what OpenAI's clients expect, and says what it held. Used by every stream test.

    stream  := chunk* [usage] (done | error done)
    choice  := [opening, chat only] delta* closing        chunks of several choices may interleave

Every chunk of a stream has the same id, object, model and creation time. An opening names the role; `finish_reason` is
null until the one closing chunk, whose delta is empty; nothing of a choice follows it. The usage chunk has no choices
and is there exactly when it was asked for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StreamedChoice:
    """One choice, joined."""

    text: str = ""
    finish: str | None = None
    opened: bool = False
    num_deltas: int = 0
    logprobs: list[Any] = field(default_factory=list)
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Stream:
    """A whole stream, joined."""

    choices: dict[int, StreamedChoice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


def check_stream(text: str, *, chat: bool, include_usage: bool = False) -> Stream:
    """The stream in a response body; AssertionError where it breaks the grammar."""
    events = text.split("\n\n")
    assert events.pop() == "", "a stream ends with an empty line"
    assert all(event.startswith("data: ") and "\n" not in event for event in events), text
    payloads = [event.removeprefix("data: ") for event in events]
    assert payloads.pop() == "[DONE]", "the last event is [DONE]"
    assert "[DONE]" not in payloads
    stream, heads = Stream(), set()
    for payload in map(json.loads, payloads):
        assert stream.error is None and stream.usage is None, "nothing but [DONE] follows an error or the usage"
        if "error" in payload:
            stream.error = payload["error"]
            assert set(payload["error"]) == {"message", "type", "param", "code"}
            continue
        heads.add(tuple(payload[name] for name in ("id", "object", "created", "model")))
        _check_chunk(stream, payload, chat=chat, include_usage=include_usage)
    assert len(heads) <= 1, heads
    if stream.error is None:
        assert all(choice.finish is not None for choice in stream.choices.values())
        assert (stream.usage is not None) == include_usage
    return stream


def _check_chunk(stream: Stream, payload: dict[str, Any], *, chat: bool, include_usage: bool) -> None:
    assert payload["object"] == ("chat.completion.chunk" if chat else "text_completion")
    assert ("usage" in payload) == include_usage
    if not payload["choices"]:
        stream.usage = payload["usage"]
        assert stream.usage is not None, "only the usage chunk has no choices"
        return
    for part in payload["choices"]:
        choice = stream.choices.setdefault(part["index"], StreamedChoice())
        assert choice.finish is None, "nothing of a choice follows its closing chunk"
        text = _chat_text(choice, part) if chat else part["text"]
        if part["finish_reason"] is None:
            choice.text += text
            choice.num_deltas += 1
            choice.logprobs += _logprobs(part, chat)
        else:
            assert text == "" and not (chat and part["delta"]), "the closing chunk has an empty delta"
            assert part["finish_reason"] in ("stop", "length", "tool_calls")
            choice.finish = part["finish_reason"]


def _chat_text(choice: StreamedChoice, part: dict[str, Any]) -> str:
    delta = part["delta"]
    assert ("role" in delta) == (not choice.opened), "the role comes first and once"
    choice.opened = True
    choice.reasoning += delta.get("reasoning_content", "")
    for call in delta.get("tool_calls", ()):
        assert call["index"] == len(choice.calls) and call["id"] and call["type"] == "function"
        choice.calls.append(call["function"])
    return delta.get("content", "")


def _logprobs(part: dict[str, Any], chat: bool) -> list[Any]:
    if part["logprobs"] is None:
        return []
    return part["logprobs"]["content"] if chat else list(zip(*part["logprobs"].values(), strict=True))
