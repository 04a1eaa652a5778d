"""What the engine must keep an answer to: `response_format`, calls that are demanded, and the reasoning before either.

A model that reasons does so before its answer, so the grammar of the answer begins where the reasoning ends.
"""

from __future__ import annotations

import msgspec

from xllm_cli.core import Grammar
from xllm_cli.errors import RequestError
from xllm_cli.server import reasoning, toolcalls
from xllm_cli.server.deltas import MessageParser, PlainParser
from xllm_cli.server.formats import grammar_of
from xllm_cli.server.protocol import ChatRequest, GenerationRequest
from xllm_cli.server.reasoning import ThinkParser
from xllm_cli.server.tokenizer import Tokenizer
from xllm_cli.server.toolcalls import HermesParser
from xllm_cli.server.tools import call_rules

_ANY = r"/(.|\n)*/"
_GAP = r"/\n{0,4}/"


def parser_of(asked: ChatRequest, tokenizer: Tokenizer) -> MessageParser | None:
    """What takes an answer apart; None where everything is content."""
    calls = HermesParser(most_calls=asked.most_calls) if asked.offered_tools else None
    if tokenizer.habits.reasons:
        return ThinkParser(calls or PlainParser(), is_open=_is_open(asked, tokenizer))
    return calls


def _is_open(asked: ChatRequest, tokenizer: Tokenizer) -> bool:
    """Whether the answer begins within reasoning."""
    return asked.starts_in_reasoning or tokenizer.habits.begins_in_reasoning


def constraint_of(asked: GenerationRequest, tokenizer: Tokenizer, end_ids: tuple[int, ...]) -> Grammar | None:
    """The grammar of an answer; None when it is free. RequestError for what does not go together."""
    answer = grammar_of(asked.response_format, end_ids)
    if not isinstance(asked, ChatRequest) or (answer is None and not asked.forced_tools):
        return answer
    has_prefix = tokenizer.habits.reasons
    calls = asked.forced_tools or (asked.offered_tools if answer is not None else [])
    if answer is not None and (answer.kind == "lark" or not (has_prefix or calls)):
        if calls:
            raise RequestError("a lark response_format and tools exclude each other", param="response_format")
        return answer
    rules: list[str] = []
    parts: list[str] = []
    if answer is not None and not asked.forced_tools:
        rules.append(f"answer: {_inline(answer)}")
        parts.append("answer")
    if calls:
        tags = {tag: _lark_tag(tag, tokenizer) for tag in (toolcalls.OPEN, toolcalls.CLOSE)}
        rules.append(call_rules(calls, asked.most_calls, tags))
        parts.append("calls")
    prefix, more = _thoughts(tokenizer, is_open=_is_open(asked, tokenizer)) if has_prefix else ("", [])
    text = "\n".join([f"start: {prefix}({' | '.join(parts)})", *more, *rules])
    return Grammar("lark", text, end_ids, "tools" if asked.forced_tools else "response_format")


def _inline(answer: Grammar) -> str:
    """A schema or a regular expression as the right side of a rule."""
    if answer.kind == "json_schema":
        return f"%json {answer.text}"
    escaped = answer.text.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n")
    return f"/{escaped}/"


def _thoughts(tokenizer: Tokenizer, *, is_open: bool) -> tuple[str, list[str]]:
    """(what stands before the answer in `start`, the rules it needs)"""
    open_tag, close_tag = _lark_tag(reasoning.OPEN, tokenizer), _lark_tag(reasoning.CLOSE, tokenizer)
    # a tag that is a token of its own cannot be a part of the text before it
    rule = f"{_ANY} {close_tag}" if close_tag.startswith("<") else "until"
    more = [] if close_tag.startswith("<") else [f"until[suffix={close_tag}]: {_ANY}"]
    thoughts = f"{rule} {_GAP}"
    return (f"{thoughts} " if is_open else f"({open_tag} {thoughts})? "), more


def _lark_tag(text: str, tokenizer: Tokenizer) -> str:
    """A tag as the token it is, else as a text."""
    token_id = tokenizer.token_id(text)
    return f"<[{token_id}]>" if token_id is not None else msgspec.json.encode(text).decode()
