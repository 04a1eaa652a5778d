"""OpenAI's POST /v1/responses without state: nothing is stored, so nothing can be continued by its id."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xllm_cli.core import FinishReason
from xllm_cli.errors import RequestError
from xllm_cli.server.answering import Dialect, generate
from xllm_cli.server.detokenizer import Piece
from xllm_cli.server.failures import error_body
from xllm_cli.server.generation import Usage, WholeChoice
from xllm_cli.server.openai import encode_chat
from xllm_cli.server.parsing import body_schema, parse, refuse
from xllm_cli.server.protocol import ChatRequest, Count
from xllm_cli.server.replies import Reply
from xllm_cli.server.sse import named_event
from xllm_cli.server.state import ServerState
from xllm_cli.server.tokenizer import Tokenizer

# Field → the values that ask for nothing this server cannot do. Any other value is a 400.
_STATELESS: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "include": (None, []),
    "logprobs": (None, False),
    "max_tool_calls": (None,),
    "n": (None, 1),
    "previous_response_id": (None,),
    "prompt": (None,),
    "reasoning": (None, {}),
    "store": (None, False),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "text": (None, {}, {"format": {"type": "text"}}),
    "top_logprobs": (None, 0),
}
_HARMLESS = ("safety_identifier", "truncation", "prompt_cache_retention", "stream_options")
_TEXT_PARTS = ("text", "input_text", "output_text")


class InputItem(BaseModel):
    """One message of the input."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]

    def as_message(self) -> dict[str, Any]:
        """As a message of a conversation; parts that are not text stay and are refused there."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        texts = [{**part, "type": "text"} if part.get("type") in _TEXT_PARTS else part for part in self.content]
        return {"role": role, "content": texts}


class ResponsesRequest(BaseModel):
    """POST /v1/responses."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        """The same as the fields of a ChatRequest. RequestError for what needs state or is not there."""
        extra = dict(self.model_extra or {})
        refuse(extra, _STATELESS)
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        fields = {name: value for name, value in extra.items() if name not in _HARMLESS and name not in _STATELESS}
        names = ("model", "temperature", "top_p", "stream")
        fields |= {name: value for name in names if (value := getattr(self, name)) is not None}
        messages = [*system, *(item.as_message() for item in items)]
        return fields | {"messages": messages, "max_completion_tokens": self.max_output_tokens}


class ResponsesReply(Reply):
    """The shapes of /v1/responses.

    stream := created in_progress item.added part.added text.delta* text.done part.done item.done (completed|incomplete)
    Every event has a `sequence_number` from 0; there is no [DONE].
    """

    def __init__(self, model_id: str, tokenizer: Tokenizer, asked: ChatRequest) -> None:
        self.reply_id = f"resp_{uuid.uuid4().hex}"
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._texts: list[str] = []
        self._finish: FinishReason | None = None
        self._number = -1
        self._head = {
            "id": self.reply_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model_id,
            "max_output_tokens": asked.token_limit,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "store": False,
            "text": {"format": {"type": "text"}},
            "error": None,
        }

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        self._texts, self._finish = [choices[0].text], choices[0].finish
        return self._response(self._status, [self._item(self._status)], usage)

    def begin(self, usage: Usage) -> Iterable[bytes]:
        yield self._event("response.created", response=self._response("in_progress", [], None))
        yield self._event("response.in_progress", response=self._response("in_progress", [], None))
        item = {**self._item("in_progress"), "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._part_event("response.content_part.added", part=self._part())

    def piece(self, index: int, piece: Piece, usage: Callable[[], Usage]) -> Iterable[bytes]:
        self._finish = piece.finish
        if piece.text:
            self._texts.append(piece.text)
            yield self._part_event("response.output_text.delta", delta=piece.text, logprobs=[])

    def end(self, usage: Usage) -> Iterable[bytes]:
        part, status = self._part(), self._status
        yield self._part_event("response.output_text.done", text=part["text"], logprobs=[])
        yield self._part_event("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=0, item=self._item(status))
        response = self._response(status, [self._item(status)], usage)
        yield self._event(f"response.{status}", response=response)

    def failed(self, error: RequestError) -> Iterable[bytes]:
        detail = error_body(error)["error"]
        response = self._response("failed", [self._item("incomplete")], None)
        response["error"] = {"code": detail["code"], "message": detail["message"]}
        yield self._event("response.failed", response=response)

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._finish == "length" else "completed"

    def _response(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        counted = None if usage is None else _usage(usage)
        return {**self._head, "status": status, "incomplete_details": reason, "output": output, "usage": counted}

    def _item(self, status: str) -> dict[str, Any]:
        return {
            "id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": [self._part()],
        }  # fmt: skip

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": "".join(self._texts), "annotations": [], "logprobs": []}

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event(kind, {"type": kind, "sequence_number": self._number, **fields})


def read_responses(body: bytes) -> ChatRequest:
    """A body of this API as a conversation."""
    return parse(ChatRequest, parse(ResponsesRequest, body).as_chat())


RESPONSES = Dialect(read_responses, encode_chat, ResponsesReply)


def routes(state: ServerState) -> APIRouter:
    """The router over this state."""
    router = APIRouter()

    @router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
    async def responses(request: HttpRequest) -> Response:
        return await generate(state, request, RESPONSES)

    return router


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
