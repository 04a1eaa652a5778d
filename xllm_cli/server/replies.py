"""How an answer looks, whole and streamed: the interface, and OpenAI's shapes. Knows no sockets and no engine."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from xllm_cli.core import FinishReason, TokenLogprob
from xllm_cli.errors import RequestError
from xllm_cli.server.constraints import parser_of
from xllm_cli.server.deltas import Delta, MessageParser, PlainParser
from xllm_cli.server.detokenizer import LogprobEntry, Piece
from xllm_cli.server.failures import error_body
from xllm_cli.server.generation import Usage, WholeChoice
from xllm_cli.server.protocol import ChatRequest, GenerationRequest
from xllm_cli.server.sse import DONE, event
from xllm_cli.server.tokenizer import Tokenizer
from xllm_cli.server.tools import NamedChoice

MIN_LOGPROB = -9999.0  # JSON has no -inf


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Reply(ABC):
    """How one request is answered: whole, or as the events of a stream.

    stream  := begin piece* (end | failed)        before the first piece a failure is an HTTP status instead
    """

    reply_id: str

    @abstractmethod
    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        """The answer of a request that did not stream."""

    def begin(self, usage: Usage) -> Iterable[bytes]:
        """What comes before the first piece."""
        return ()

    @abstractmethod
    def piece(self, index: int, piece: Piece, usage: Callable[[], Usage]) -> Iterable[bytes]:
        """The events of a piece of choice `index`."""

    @abstractmethod
    def end(self, usage: Usage) -> Iterable[bytes]:
        """What comes after the last piece."""

    @abstractmethod
    def failed(self, error: RequestError) -> Iterable[bytes]:
        """What comes when it breaks off."""


class OpenAIReply(Reply):
    """What completions and chat have in common.

    A stream's grammar, for each choice: [opening] delta* closing, where the closing chunk has an empty delta and the
    only `finish_reason`; then one usage chunk without choices if it was asked for; then [DONE].
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model_id: str, tokenizer: Tokenizer, asked: GenerationRequest) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = asked.num_logprobs is not None
        self._wants_usage = asked.wants_usage
        self._wants_continuous_usage = asked.wants_continuous_usage
        self._opened: set[int] = set()
        self.reply_id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head = {"id": self.reply_id, "created": int(time.time()), "model": model_id}

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        parts = [self._whole_choice(choice) for choice in choices]
        return {**self._head, "object": self.whole_object, "choices": parts, "usage": usage_object(usage)}

    def piece(self, index: int, piece: Piece, usage: Callable[[], Usage]) -> Iterable[bytes]:
        parts = []
        if index not in self._opened and (opening := self.opening(index)) is not None:
            parts.append(opening)
        self._opened.add(index)
        parts += self.deltas(index, piece)
        if piece.finish is not None:
            parts.append(self.closing(index, piece.finish))
        now = usage_object(usage()) if self._wants_continuous_usage else None
        return [self._chunk([part], now) for part in parts]

    def end(self, usage: Usage) -> Iterable[bytes]:
        return [*([self._chunk([], usage_object(usage))] if self._wants_usage else []), DONE]

    def failed(self, error: RequestError) -> Iterable[bytes]:
        return [event(error_body(error)), DONE]

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        payload = {**self._head, "object": self.chunk_object, "choices": choices}
        if self._wants_usage:
            payload["usage"] = usage
        return event(payload)

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The first part of a choice, if the shape has one."""

    @abstractmethod
    def deltas(self, index: int, piece: Piece) -> Sequence[dict[str, Any]]:
        """The parts of a choice that a piece makes."""

    @abstractmethod
    def closing(self, index: int, finish: FinishReason) -> dict[str, Any]:
        """The last part of a choice."""

    @abstractmethod
    def _whole_choice(self, choice: WholeChoice) -> dict[str, Any]: ...


class CompletionReply(OpenAIReply):
    """The shapes of /v1/completions."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> None:
        return None

    def deltas(self, index: int, piece: Piece) -> Sequence[dict[str, Any]]:
        if not piece.text and not piece.entries:
            return ()
        return [self._part(index, piece.text, piece.entries, None)]

    def closing(self, index: int, finish: FinishReason) -> dict[str, Any]:
        return self._part(index, "", [], finish)

    def _whole_choice(self, choice: WholeChoice) -> dict[str, Any]:
        return self._part(choice.index, choice.text, choice.entries, choice.finish)

    def _part(
        self, index: int, text: str, entries: Sequence[LogprobEntry], finish: FinishReason | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(entries) if self._with_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        return {
            "text_offset": [entry.offset for entry in entries],
            "tokens": [self._tokenizer.token_text(entry.logprob.token_id) for entry in entries],
            "token_logprobs": [max(entry.logprob.logprob, MIN_LOGPROB) if entry.known else None for entry in entries],
            "top_logprobs": [self._top(entry.logprob) if entry.known else None for entry in entries],
        }

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the chosen one by text; where several have one text, as parts of characters do, the
        likeliest of them."""
        top: dict[str, float] = {}
        for token_id, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            top.setdefault(self._tokenizer.token_text(token_id), max(value, MIN_LOGPROB))
        return top


class ChatMessageShape:
    """One choice's message: its deltas as they come, and all of it at the end."""

    def __init__(self, parser: MessageParser, *, is_named: bool) -> None:
        self._parser = parser
        self._is_named = is_named
        self._content = ""
        self._reasoning = ""
        self._calls: list[dict[str, Any]] = []

    def feed(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """The deltas of a piece of text."""
        deltas = [*self._parser.feed(text), *(self._parser.flush() if is_last else [])]
        return [self._shape(delta) for delta in deltas]

    def _shape(self, delta: Delta) -> dict[str, Any]:
        if delta.call is not None:
            function = {"name": delta.call.name, "arguments": delta.call.arguments}
            call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
            self._calls.append(call)
            return {"tool_calls": [{"index": len(self._calls) - 1, **call}]}
        self._content += delta.content
        self._reasoning += delta.reasoning
        return {"reasoning_content": delta.reasoning} if delta.reasoning else {"content": delta.content}

    def whole(self) -> dict[str, Any]:
        """The message of an answer that did not stream."""
        message: dict[str, Any] = {"role": "assistant", "content": self._content or (None if self._calls else "")}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def finish_reason(self, finish: FinishReason | None) -> str | None:
        """As OpenAI has it: a call ends the message, but one that the client named is just its end."""
        return "tool_calls" if self._calls and finish == "stop" and not self._is_named else finish


class ChatReply(OpenAIReply):
    """The shapes of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, model_id: str, tokenizer: Tokenizer, asked: ChatRequest) -> None:
        super().__init__(model_id, tokenizer, asked)
        self._asked = asked
        self._messages: dict[int, ChatMessageShape] = {}

    def opening(self, index: int) -> dict[str, Any]:
        return self._part(index, {"role": "assistant", "content": ""}, [], None)

    def deltas(self, index: int, piece: Piece) -> Sequence[dict[str, Any]]:
        shaped = self._message(index).feed(piece.text, is_last=piece.finish is not None)
        if not shaped and piece.entries:
            shaped = [{"content": ""}]
        # the log probabilities come with the first part: those of tags have no text of their own
        return [self._part(index, delta, [] if number else piece.entries, None) for number, delta in enumerate(shaped)]

    def closing(self, index: int, finish: FinishReason) -> dict[str, Any]:
        return self._part(index, {}, [], self._message(index).finish_reason(finish))

    def _whole_choice(self, choice: WholeChoice) -> dict[str, Any]:
        shape = self._message(choice.index)
        shape.feed(choice.text, is_last=True)
        logprobs = self._logprobs(choice.entries) if self._with_logprobs else None
        finish = shape.finish_reason(choice.finish)
        return {"index": choice.index, "message": shape.whole(), "logprobs": logprobs, "finish_reason": finish}

    def _message(self, index: int) -> ChatMessageShape:
        if index not in self._messages:
            parser = parser_of(self._asked, self._tokenizer) or PlainParser()
            self._messages[index] = ChatMessageShape(parser, is_named=isinstance(self._asked.tool_choice, NamedChoice))
        return self._messages[index]

    def _part(
        self, index: int, delta: dict[str, Any], entries: Sequence[LogprobEntry], finish: str | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(entries) if self._with_logprobs and entries else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token(entry.logprob.token_id, entry.logprob.logprob),
                    "top_logprobs": [self._token(token_id, value) for token_id, value in entry.logprob.top],
                }
                for entry in entries
            ]
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, MIN_LOGPROB), "bytes": list(raw)}
