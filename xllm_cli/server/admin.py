"""The routes that change how much memory the server holds. Behind the key or the loopback address."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xllm_cli.core import SetLimit, Trim
from xllm_cli.server.failures import json_response
from xllm_cli.server.orders import STEP_SECONDS, Guard, Order, carry_out, command_id, guarded, read, schema
from xllm_cli.server.state import ServerState

logger = logging.getLogger(__name__)

Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]


class LimitRequest(Order):
    """POST /vmm/limit: the most bytes of KV cache from now on, of one model or of all together; 0 lifts the limit."""

    bytes: Bytes
    model_id: str | None = None


class TrimRequest(Order):
    """POST /vmm/trim: bytes to give back, of one model or of all; all that no request uses when left out."""

    bytes: Bytes | None = None
    model_id: str | None = None


def routes(state: ServerState, guard: Guard) -> APIRouter:
    """The router over this state."""
    router = guarded(guard)

    @router.post("/vmm/limit", openapi_extra=schema(LimitRequest))
    async def limit(request: HttpRequest) -> Response:
        asked = await read(LimitRequest, request)
        model_id = state.named(asked.model_id)
        return await _change(state, SetLimit(command_id(), asked.bytes or None, model_id), model_id)

    @router.post("/vmm/trim", openapi_extra=schema(TrimRequest))
    async def trim(request: HttpRequest) -> Response:
        asked = await read(TrimRequest, request)
        model_id = state.named(asked.model_id)
        return await _change(state, Trim(command_id(), asked.bytes, model_id), model_id)

    return router


async def _change(state: ServerState, command: SetLimit | Trim, model_id: str) -> Response:
    """The engine's answer: what it gave back to the device, and what it holds and may hold now, in bytes."""
    done = await carry_out(state, command, STEP_SECONDS)
    memory = done.snapshot.memory
    facts = memory.models.get(model_id, {})
    limit = facts.get("limit") if model_id else memory.limit
    mapped = facts.get("kv_mapped", 0) if model_id else memory.mapped
    whose = f"KV cache of {model_id}" if model_id else "KV cache"
    told = "none" if limit is None else limit
    logger.info("%s by order: %d bytes given back, %d mapped, limit %s", whose, done.freed, mapped, told)
    return json_response(
        {
            "freed": done.freed,
            "milliseconds": round(done.seconds * 1000, 3),
            "limit": limit,
            "mapped": mapped,
            "physical": memory.physical,
            **({"model_id": model_id} if model_id else {}),
        }
    )
