"""Anthropic's API: POST /v1/messages and /v1/messages/count_tokens, as a conversation of ours in another dress."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xllm_cli.core import FinishReason
from xllm_cli.errors import RequestError
from xllm_cli.server.answering import Dialect, generate, read_body, tokenized
from xllm_cli.server.detokenizer import Piece
from xllm_cli.server.failures import ANTHROPIC, error_body, json_response
from xllm_cli.server.generation import Usage, WholeChoice
from xllm_cli.server.openai import encode_chat
from xllm_cli.server.parsing import body_schema, decode_object, parse, refuse
from xllm_cli.server.protocol import MAX_STOPS, ChatMessage, ChatRequest, Count
from xllm_cli.server.replies import Reply
from xllm_cli.server.sse import named_event
from xllm_cli.server.state import ServerState
from xllm_cli.server.tokenizer import Tokenizer

_HARMLESS = ("metadata", "service_tier", "context_management", "container", "betas", "cache_control")
_SINGLE: dict[str, tuple[Any, ...]] = {"n": (None, 1), "logprobs": (None, False), "stop": (None,), "tools": (None, [])}
_STOPPED: dict[FinishReason, str] = {"length": "max_tokens"}


class MessagesRequest(BaseModel):
    """POST /v1/messages. `max_tokens` is required there."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    max_tokens: Count
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        """The same as the fields of a ChatRequest. RequestError for what this server cannot do."""
        extra = dict(self.model_extra or {})
        refuse(extra, _SINGLE)
        thinking = extra.pop("thinking", None)
        if thinking not in (None, {"type": "disabled"}):
            raise RequestError(
                "thinking is not supported by this server", code="unsupported_parameter", param="thinking"
            )
        if (choice := extra.pop("tool_choice", None)) not in (None, {"type": "none"}):
            extra["tool_choice"] = choice
        fields = {name: value for name, value in extra.items() if name not in _HARMLESS}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        names = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
        messages = [message.model_dump() for message in self.messages]
        fields |= {name: value for name in names if (value := getattr(self, name)) is not None}
        return fields | {"messages": [*system, *messages], "stop": self.stop_sequences}


class MessagesReply(Reply):
    """Anthropic's shapes.

    stream := message_start content_block_start content_block_delta* content_block_stop message_delta message_stop
    """

    def __init__(self, model_id: str, tokenizer: Tokenizer, asked: ChatRequest) -> None:
        self.reply_id = f"msg_{uuid.uuid4().hex}"
        self._model_id = model_id
        self._ended: dict[str, Any] = {}

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        choice = choices[0]
        content = [{"type": "text", "text": choice.text}]
        return self._message(content, _ending(choice.finish, choice.stop), usage)

    def begin(self, usage: Usage) -> Iterable[bytes]:
        yield _event("message_start", message=self._message([], _ending(None, None), usage))
        yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def piece(self, index: int, piece: Piece, usage: Callable[[], Usage]) -> Iterable[bytes]:
        if piece.text:
            yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece.text})
        if piece.finish is not None:
            self._ended = _ending(piece.finish, piece.stop)
            yield _event("content_block_stop", index=0)

    def end(self, usage: Usage) -> Iterable[bytes]:
        yield _event("message_delta", delta=self._ended, usage=_usage(usage))
        yield _event("message_stop")

    def failed(self, error: RequestError) -> Iterable[bytes]:
        yield named_event("error", error_body(error, ANTHROPIC))

    def _message(self, content: list[dict[str, Any]], ending: dict[str, Any], usage: Usage) -> dict[str, Any]:
        head = {"id": self.reply_id, "type": "message", "role": "assistant", "model": self._model_id}
        return {**head, "content": content, **ending, "usage": _usage(usage)}


def read_messages(body: bytes) -> ChatRequest:
    """A body of Anthropic's API as a conversation of ours."""
    return parse(ChatRequest, parse(MessagesRequest, body).as_chat())


def read_counting(body: bytes) -> ChatRequest:
    """The same for counting, which needs no `max_tokens`."""
    return parse(ChatRequest, parse(MessagesRequest, {"max_tokens": 1, **decode_object(body)}).as_chat())


MESSAGES = Dialect(read_messages, encode_chat, MessagesReply)
COUNTING = Dialect(read_counting, encode_chat, MessagesReply)


def routes(state: ServerState) -> APIRouter:
    """The router over this state."""
    router = APIRouter()

    @router.post("/v1/messages", openapi_extra=body_schema(MessagesRequest))
    async def messages(request: HttpRequest) -> Response:
        return await generate(state, request, MESSAGES)

    @router.post("/v1/messages/count_tokens", openapi_extra=body_schema(MessagesRequest))
    async def count_tokens(request: HttpRequest) -> Response:
        state.serving()
        body = await read_body(request, limit=state.service.max_body_bytes)
        _, _, prompts = await tokenized(state, body, COUNTING)
        return json_response({"input_tokens": len(prompts[0])})

    return router


def _ending(finish: FinishReason | None, stop: str | None) -> dict[str, Any]:
    reason = None if finish is None else "stop_sequence" if stop is not None else _STOPPED.get(finish, "end_turn")
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(usage: Usage) -> dict[str, int]:
    """Their `input_tokens` leave out those read from the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})
