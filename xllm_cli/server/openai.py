"""The generating routes: /v1/completions and /v1/chat/completions. From a parsed request to an answer or a stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xllm_cli.core import Ready, Request, SamplingParams
from xllm_cli.errors import RequestError
from xllm_cli.server.detokenizer import TextOptions
from xllm_cli.server.failures import error_body, json_response
from xllm_cli.server.generation import Generation
from xllm_cli.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, body_schema, parse
from xllm_cli.server.replies import ChatReply, CompletionReply, Reply, usage_object
from xllm_cli.server.sse import DONE, ClientGone, EventStream, event, while_connected
from xllm_cli.server.state import ServerState, Slot
from xllm_cli.server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

COMPLETION_MAX_TOKENS = 16  # OpenAI's default, clipped to what is left of the context
MAX_SEQUENCES = 256
BODY_SECONDS = 60.0
THREAD_BYTES = 4096  # larger bodies are tokenized off the event loop


def routes(state: ServerState) -> APIRouter:
    """The router over this state."""
    router = APIRouter()

    def enough() -> int:
        return state.serving()[1].max_model_len

    @router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
    async def completions(request: HttpRequest) -> Response:
        def encode(asked: CompletionRequest, tokenizer: Tokenizer) -> list[list[int]]:
            special = asked.add_special_tokens is not False
            prompts = asked.prompts()
            return [tokenizer.encode(p, special, enough=enough()) if isinstance(p, str) else p for p in prompts]

        return await _generate(state, request, CompletionRequest, CompletionReply, encode)

    @router.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
    async def chat(request: HttpRequest) -> Response:
        def encode(asked: ChatRequest, tokenizer: Tokenizer) -> list[list[int]]:
            messages = [message.for_template() for message in asked.messages]
            text = tokenizer.chat(messages, asked.add_generation_prompt is not False, asked.chat_template_kwargs)
            return [tokenizer.encode(text, bool(asked.add_special_tokens), enough=enough())]

        return await _generate(state, request, ChatRequest, ChatReply, encode)

    return router


Asked = TypeVar("Asked", bound=GenerationRequest)


async def _generate(
    state: ServerState,
    http: HttpRequest,
    kind: type[Asked],
    reply_kind: type[Reply],
    encode: Callable[[Asked, Tokenizer], list[list[int]]],
) -> Response:
    """Read, admit, parse, tokenize, submit, answer; whatever fails before the first token has a real status."""
    state.check_admission()  # before a body is read for nothing
    body = await read_body(http, limit=state.max_body_bytes)
    slot = state.admit()  # after it, or slow senders would take the places
    with slot.released_on_error():
        asked = await _maybe_in_thread(len(body), lambda: parse(kind, body))
        state.model.check(asked.model)
        tokenizer, ready = state.serving()
        prompts = await _maybe_in_thread(len(body), lambda: encode(asked, tokenizer))
        reply = reply_kind(state.model.model_id, tokenizer, asked.num_logprobs is not None)
        requests = _requests(asked, prompts, reply.reply_id, ready, tokenizer)
        generation = Generation(state.client, tokenizer, requests, _text_options(asked, requests[0].sampling))
        answer = await _answer(http, asked, generation, reply, slot)
    if asked.ignored_fields:
        names = ", ".join(asked.ignored_fields)
        logger.info("%s: ignored unknown fields: %s", reply.reply_id, names)
        answer.headers["x-xllm-ignored-fields"] = names
    return answer


async def _answer(
    http: HttpRequest, asked: GenerationRequest, generation: Generation, reply: Reply, slot: Slot
) -> Response:
    def close() -> None:
        generation.close()
        slot.release()

    try:
        if asked.stream:
            events = _events(asked, generation, reply)
            first = await while_connected(http.receive, anext(events))
            return EventStream(first, events, close)
        choices = await while_connected(http.receive, generation.whole())
    except BaseException:
        close()
        raise
    close()
    return json_response(reply.whole(choices, generation.usage()))


async def _events(asked: GenerationRequest, generation: Generation, reply: Reply) -> AsyncGenerator[bytes]:
    """The events of a stream. An error before the first event is raised, a later one is an event; [DONE] is last."""

    def chunk(part: dict[str, Any] | None) -> bytes:
        payload = reply.chunk(part)
        if asked.wants_usage:
            now = part is None or asked.wants_continuous_usage
            payload["usage"] = usage_object(generation.usage()) if now else None
        return event(payload)

    opened: set[int] = set()
    started = False
    try:
        async for index, piece in generation.pieces():
            started = True
            if index not in opened and (opening := reply.opening(index)) is not None:
                yield chunk(opening)
            opened.add(index)
            if piece.text or piece.entries:
                yield chunk(reply.delta(index, piece))
            if piece.finish is not None:
                yield chunk(reply.closing(index, piece.finish))
        if asked.wants_usage:
            yield chunk(None)
    except RequestError as error:
        if not started:
            raise
        yield event(error_body(error))
    yield DONE


def _requests(
    asked: GenerationRequest, prompts: list[list[int]], reply_id: str, ready: Ready, tokenizer: Tokenizer
) -> list[Request]:
    """Prompt-major: all choices of the first prompt, then of the second."""
    num_choices = asked.n or 1
    if len(prompts) * num_choices > MAX_SEQUENCES:
        raise RequestError(f"prompts times n is limited to {MAX_SEQUENCES}", code="invalid_value", param="n")
    requests: list[Request] = []
    for number, prompt in enumerate(prompts):
        _check_prompt(prompt, asked, ready)
        sampling = _sampling(asked, len(prompt), ready, tokenizer)
        requests.extend(
            Request(
                request_id=f"{reply_id}-{number * num_choices + choice}",
                prompt_ids=prompt,
                sampling=sampling,
                choice=choice,
                cache_salt=asked.cache_salt or "",
            )
            for choice in range(num_choices)
        )
    return requests


def _check_prompt(prompt: list[int], asked: GenerationRequest, ready: Ready) -> None:
    param = "messages" if isinstance(asked, ChatRequest) else "prompt"
    if not prompt:
        raise RequestError("the prompt has no tokens", code="empty_prompt", param=param)
    wanted = asked.token_limit or 1
    if len(prompt) + wanted > ready.max_model_len:
        raise RequestError(
            f"the model's context is {ready.max_model_len} tokens; the request needs at least {len(prompt) + wanted}: "
            f"{len(prompt)} of the prompt and {wanted} to generate",
            code="context_length_exceeded",
            param=param,
        )
    if max(prompt) >= ready.vocab_size:
        raise RequestError(
            f"token ids must be below {ready.vocab_size}, the size of the vocabulary",
            code="invalid_prompt",
            param=param,
        )


def _sampling(asked: GenerationRequest, num_prompt: int, ready: Ready, tokenizer: Tokenizer) -> SamplingParams:
    limit = asked.token_limit
    if limit is None and not isinstance(asked, ChatRequest):
        left = min(ready.max_model_len, ready.capacity_tokens) - num_prompt
        limit = max(1, min(COMPLETION_MAX_TOKENS, left))
    min_tokens = asked.min_tokens or 0
    if limit is not None and min_tokens > limit:
        raise RequestError("min_tokens is larger than max_tokens", code="invalid_value", param="min_tokens")
    ends = () if asked.ignore_eos else (*ready.eos_token_ids, *tokenizer.eos_token_ids)
    return SamplingParams(
        max_tokens=limit,
        min_tokens=min_tokens,
        temperature=1.0 if asked.temperature is None else float(asked.temperature),
        top_p=1.0 if asked.top_p is None else float(asked.top_p),
        top_k=max(0, asked.top_k or 0),
        seed=asked.seed,
        logprobs=asked.num_logprobs,
        stop_token_ids=tuple(sorted({*ends, *(asked.stop_token_ids or ())})),
        ignore_eos=bool(asked.ignore_eos),
    )


def _text_options(asked: GenerationRequest, sampling: SamplingParams) -> TextOptions:
    return TextOptions(
        stop=asked.stops,
        include_stop=bool(asked.include_stop_str_in_output),
        stop_token_ids=frozenset(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        skip_special_tokens=asked.skip_special_tokens is not False,
    )


async def read_body(http: HttpRequest, *, limit: int, seconds: float = BODY_SECONDS) -> bytes:
    """The request's body. RequestError 413 as soon as it is known to exceed `limit` bytes, 408 when it is too slow."""
    too_large = RequestError(f"the body is limited to {limit} bytes", status=413, code="body_too_large")
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in http.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError as error:
        text = f"the body did not arrive within {seconds:g} seconds"
        raise RequestError(text, status=408, code="request_timeout") from error
    except ClientDisconnect as error:
        raise ClientGone from error
    return bytes(body)


async def _maybe_in_thread(size: int, work: Callable[[], Result]) -> Result:
    return await asyncio.to_thread(work) if size > THREAD_BYTES else work()
