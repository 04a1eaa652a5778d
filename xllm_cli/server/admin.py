"""The routes that change how much memory the server holds. Behind the key or the loopback address."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xllm_cli.core import Command, SetLimit, Trim
from xllm_cli.server.answering import read_body
from xllm_cli.server.failures import json_response
from xllm_cli.server.parsing import body_schema, parse
from xllm_cli.server.state import ServerState

logger = logging.getLogger(__name__)
COMMAND_SECONDS = 30.0  # an engine between two steps answers in milliseconds; a long prefill is a long step
ADMIN_BODY_BYTES = 1 << 16

Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]


class LimitRequest(BaseModel):
    """POST /vmm/limit: the most bytes of KV cache from now on; 0 lifts the limit."""

    model_config = ConfigDict(strict=True, extra="forbid")
    bytes: Bytes


class TrimRequest(BaseModel):
    """POST /vmm/trim: bytes to give back; all that no request uses when left out."""

    model_config = ConfigDict(strict=True, extra="forbid")
    bytes: Bytes | None = None


def routes(state: ServerState, guard: Callable[[HttpRequest], Awaitable[None]]) -> APIRouter:
    """The router over this state; `guard` refuses who may not."""
    router = APIRouter(dependencies=[Depends(guard)])

    @router.post("/vmm/limit", openapi_extra=body_schema(LimitRequest))
    async def limit(request: HttpRequest) -> Response:
        asked = parse(LimitRequest, await read_body(request, limit=ADMIN_BODY_BYTES))
        return await _carry_out(state, SetLimit(command_id(), asked.bytes or None))

    @router.post("/vmm/trim", openapi_extra=body_schema(TrimRequest))
    async def trim(request: HttpRequest) -> Response:
        body = await read_body(request, limit=ADMIN_BODY_BYTES)
        return await _carry_out(state, Trim(command_id(), parse(TrimRequest, body or b"{}").bytes))

    return router


def command_id() -> str:
    """A name for one command, never used again."""
    return uuid.uuid4().hex


async def _carry_out(state: ServerState, command: Command) -> Response:
    """The engine's answer: what it gave back to the device, and what it holds and may hold now, in bytes."""
    state.serving()
    done = await state.client.command(command, COMMAND_SECONDS)
    memory = done.snapshot.memory
    limit = "none" if memory.limit is None else memory.limit
    logger.info("KV cache by order: %d bytes given back, %d mapped, limit %s", done.freed, memory.mapped, limit)
    return json_response(
        {
            "freed": done.freed,
            "milliseconds": round(done.seconds * 1000, 3),
            "limit": memory.limit,
            "mapped": memory.mapped,
            "physical": memory.physical,
        }
    )
