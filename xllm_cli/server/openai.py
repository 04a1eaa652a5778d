"""The generating routes of OpenAI: /v1/completions and /v1/chat/completions, and what they would run (render)."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xllm_cli.errors import RequestError
from xllm_cli.server.answering import Dialect, generate, read_body, tokenized
from xllm_cli.server.failures import json_response
from xllm_cli.server.parsing import body_schema, parse
from xllm_cli.server.protocol import ChatRequest, CompletionRequest
from xllm_cli.server.replies import ChatReply, CompletionReply
from xllm_cli.server.sequences import make_requests
from xllm_cli.server.state import ServerState
from xllm_cli.server.tokenizer import Tokenizer


def encode_completion(asked: CompletionRequest, tokenizer: Tokenizer, enough: int) -> list[list[int]]:
    """The prompts as token ids."""
    special = asked.add_special_tokens is not False
    return [tokenizer.encode(p, special, enough=enough) if isinstance(p, str) else p for p in asked.prompts()]


def encode_chat(asked: ChatRequest, tokenizer: Tokenizer, enough: int) -> list[list[int]]:
    """The conversation as one prompt."""
    if asked.offered_tools and not tokenizer.habits.calls_tools:
        raise RequestError("tools are not supported with this model", code="unsupported_parameter", param="tools")
    messages = [message.for_template() for message in asked.messages]
    variables = {**(asked.chat_template_kwargs or {}), "tools": asked.offered_tools or None}
    text = tokenizer.chat(
        messages, asked.add_generation_prompt is not False, variables, continues=bool(asked.continue_final_message)
    )
    asked.rendered(text)
    return [tokenizer.encode(text, bool(asked.add_special_tokens), enough=enough)]


COMPLETIONS = Dialect(partial(parse, CompletionRequest), encode_completion, CompletionReply)
CHAT = Dialect(partial(parse, ChatRequest), encode_chat, ChatReply)


def routes(state: ServerState) -> APIRouter:
    """The router over this state."""
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
    async def completions(request: HttpRequest) -> Response:
        return await generate(state, request, COMPLETIONS)

    @router.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
    async def chat(request: HttpRequest) -> Response:
        return await generate(state, request, CHAT)

    @router.post("/v1/completions/render", openapi_extra=body_schema(CompletionRequest))
    async def render_completions(request: HttpRequest) -> Response:
        return json_response(await _rendered(state, request, COMPLETIONS))

    @router.post("/v1/chat/completions/render", openapi_extra=body_schema(ChatRequest))
    async def render_chat(request: HttpRequest) -> Response:
        return json_response((await _rendered(state, request, CHAT))[0])

    return router


async def _rendered(state: ServerState, http: HttpRequest, dialect: Dialect[Any]) -> list[dict[str, Any]]:
    """What each prompt would be run as: routers hash `token_ids` to find the server that has the prefix."""
    state.serving()
    body = await read_body(http, limit=state.service.max_body_bytes)
    (model, tokenizer, ready), asked, prompts = await tokenized(state, body, dialect)
    number = asked.n or 1
    requests = make_requests(asked, prompts, f"render-{uuid.uuid4().hex}", ready, tokenizer)[::number]
    return [
        {
            "request_id": request.request_id,
            "model": model.model_id,
            "token_ids": request.prompt_ids,
            "prompt_token_ids": request.prompt_ids,
            "prompt": tokenizer.decode(request.prompt_ids, skip_special_tokens=False),
            "sampling_params": {**msgspec.structs.asdict(request.sampling), "n": number, "stop": asked.stops},
            "stream": bool(asked.stream),
        }
        for request in requests
    ]
