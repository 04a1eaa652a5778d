"""From a body to an answer, for every route that generates: read, admit, parse, tokenize, submit, stream or collect.

Knows neither the fields nor the shapes of a particular API: a route brings how to read its body (`read`), how to make
token ids of it (`encode`) and how its answer looks (`reply`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xllm_cli.errors import RequestError
from xllm_cli.server.failures import json_response
from xllm_cli.server.generation import Generation
from xllm_cli.server.protocol import GenerationRequest
from xllm_cli.server.replies import Reply
from xllm_cli.server.sequences import make_requests, text_options
from xllm_cli.server.served import Served
from xllm_cli.server.sse import ClientGone, EventStream, while_connected
from xllm_cli.server.state import ServerState, Slot
from xllm_cli.server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Asked = TypeVar("Asked", bound=GenerationRequest)

BODY_SECONDS = 60.0
THREAD_BYTES = 4096  # larger bodies are tokenized off the event loop


@dataclass(frozen=True, slots=True)
class Dialect(Generic[Asked]):
    """How one API asks and is answered. `encode` gets the longest prompt that makes sense, in tokens."""

    read: Callable[[bytes], Asked]
    encode: Callable[[Asked, Tokenizer, int], list[list[int]]]
    reply: Callable[[str, Tokenizer, Asked], Reply]


async def generate(state: ServerState, http: HttpRequest, dialect: Dialect[Asked]) -> Response:
    """Whatever fails before the first token has a real status."""
    arrived = time.monotonic()
    state.check_admission()  # before a body is read for nothing
    body = await read_body(http, limit=state.service.max_body_bytes)
    slot = state.admit()  # after it, or slow senders would take the places
    with slot.released_on_error():
        served, asked, prompts = await tokenized(state, body, dialect)
        reply = dialect.reply(served.model_id, served.tokenizer, asked)
        requests = make_requests(asked, prompts, reply.reply_id, served.ready, served.tokenizer)
        served.model.instruments.observe("vllm:request_params_n", asked.n or 1)
        options = text_options(asked, requests[0].sampling)
        generation = Generation(state.client, served, requests, options, arrived=arrived)
        answer = await _answer(http, bool(asked.stream), generation, reply, slot)
    note_ignored(answer, asked.ignored_fields, reply.reply_id)
    return answer


async def tokenized(state: ServerState, body: bytes, dialect: Dialect[Asked]) -> tuple[Served, Asked, list[list[int]]]:
    """The model that a body asks, its request and its prompts. RequestError for what this server cannot or, being
    strict, will not read."""
    asked = await maybe_in_thread(len(body), lambda: dialect.read(body))
    served = state.serving(asked.model)
    if state.service.strict_requests and asked.ignored_fields:
        names = ", ".join(asked.ignored_fields)
        raise RequestError(f"unknown fields: {names}", code="unknown_parameter", param=asked.ignored_fields[0])
    _, tokenizer, ready = served
    prompts = await maybe_in_thread(len(body), lambda: dialect.encode(asked, tokenizer, ready.max_model_len))
    return served, asked, prompts


def note_ignored(answer: Response, names: list[str], request_id: str) -> None:
    """Tell of fields that changed nothing, in the log and in a header."""
    if names:
        logger.info("%s: ignored unknown fields: %s", request_id, ", ".join(names))
        answer.headers["x-xllm-ignored-fields"] = ", ".join(names)


async def _answer(http: HttpRequest, streams: bool, generation: Generation, reply: Reply, slot: Slot) -> Response:
    def close() -> None:
        generation.close()
        slot.release()

    try:
        if streams:
            events = _events(generation, reply)
            first = await while_connected(http.receive, anext(events))
            return EventStream(first, events, close)
        choices = await while_connected(http.receive, generation.whole())
    except BaseException:
        close()
        raise
    close()
    return json_response(reply.whole(choices, generation.usage()))


async def _events(generation: Generation, reply: Reply) -> AsyncGenerator[bytes]:
    """The events of a stream. An error before the first event is raised, a later one is an event."""
    started = False
    try:
        async for index, piece in generation.pieces():
            if not started:
                for event in reply.begin(generation.usage()):
                    yield event
            started = True
            for event in reply.piece(index, piece, generation.usage):
                yield event
        for event in reply.end(generation.usage()):
            yield event
    except RequestError as error:
        if not started:
            raise
        for event in reply.failed(error):
            yield event


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


async def maybe_in_thread(size: int, work: Callable[[], Result]) -> Result:
    """`work` done, in a thread when it belongs to a body of many bytes."""
    return await asyncio.to_thread(work) if size > THREAD_BYTES else work()
