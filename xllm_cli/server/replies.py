"""How an answer looks, whole and streamed: the interface, and OpenAI's shapes. Knows no sockets and no engine."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from xllm_cli.core import FinishReason, TokenLogprob
from xllm_cli.errors import RequestError
from xllm_cli.server.detokenizer import LogprobEntry, Piece
from xllm_cli.server.failures import error_body
from xllm_cli.server.generation import Usage, WholeChoice
from xllm_cli.server.protocol import GenerationRequest
from xllm_cli.server.sse import DONE, event
from xllm_cli.server.tokenizer import Tokenizer

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
        if piece.text or piece.entries:
            parts.append(self.delta(index, piece))
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
    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        """A part with text."""

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

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._part(index, piece.text, piece.entries, None)

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


class ChatReply(OpenAIReply):
    """The shapes of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        return self._part(index, {"role": "assistant", "content": ""}, [], None)

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._part(index, {"content": piece.text}, piece.entries, None)

    def closing(self, index: int, finish: FinishReason) -> dict[str, Any]:
        return self._part(index, {}, [], finish)

    def _whole_choice(self, choice: WholeChoice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text}
        logprobs = self._logprobs(choice.entries) if self._with_logprobs else None
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}

    def _part(
        self, index: int, delta: dict[str, Any], entries: Sequence[LogprobEntry], finish: FinishReason | None
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
