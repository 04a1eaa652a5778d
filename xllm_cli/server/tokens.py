"""The tokenizer's routes: /tokenize, /detokenize, /tokenizer_info. They take no place among the running requests."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xllm_cli.errors import RequestError
from xllm_cli.server.answering import maybe_in_thread, read_body
from xllm_cli.server.failures import json_response
from xllm_cli.server.parsing import body_schema, parse
from xllm_cli.server.protocol import ChatMessage, TokenId
from xllm_cli.server.state import ServerState
from xllm_cli.server.tokenizer import Tokenizer


class TokenizeRequest(BaseModel):
    """POST /tokenize: a text, or a conversation."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """The token ids. RequestError when there is neither or both of prompt and messages."""
        if (self.prompt is None) == (not self.messages):
            raise RequestError("give either prompt or messages", code="invalid_prompt", param="prompt")
        if self.prompt is not None:
            return tokenizer.encode(self.prompt, self.add_special_tokens is not False)
        messages = [message.for_template() for message in self.messages or ()]
        text = tokenizer.chat(messages, self.add_generation_prompt is not False, self.chat_template_kwargs)
        return tokenizer.encode(text, bool(self.add_special_tokens))


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 22)]


def routes(state: ServerState) -> APIRouter:
    """The router over this state."""
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
    async def tokenize(request: HttpRequest) -> Response:
        state.serving()
        body = await read_body(request, limit=state.service.max_body_bytes)
        asked = await maybe_in_thread(len(body), partial(parse, TokenizeRequest, body))
        _, tokenizer, ready = state.serving(asked.model)
        tokens = await maybe_in_thread(len(body), partial(asked.encode, tokenizer))
        texts = [tokenizer.token_text(token) for token in tokens] if asked.return_token_strs else None
        return json_response(
            {"count": len(tokens), "max_model_len": ready.max_model_len, "tokens": tokens, "token_strs": texts}
        )

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
    async def detokenize(request: HttpRequest) -> Response:
        state.serving()
        body = await read_body(request, limit=state.service.max_body_bytes)
        asked = await maybe_in_thread(len(body), partial(parse, DetokenizeRequest, body))
        tokenizer = state.serving(asked.model).tokenizer
        return json_response(
            {"prompt": await maybe_in_thread(len(body), partial(tokenizer.decode, asked.tokens, False))}
        )

    @router.get("/tokenizer_info")
    async def tokenizer_info(model: str = "") -> Response:
        _, tokenizer, ready = state.serving(model)
        return json_response(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **tokenizer.special_tokens,
                "vocab_size": tokenizer.vocab_size,
                "eos_token_ids": tokenizer.eos_token_ids,
                "chat_template": tokenizer.chat_template,
                "model_max_length": ready.max_model_len,
            }
        )

    return router
