"""The routes that hold a model's requests back.

    POST /pause   {"mode": "keep"|"abort"|"wait", "model_id"}
    POST /resume  {"model_id"}

Without `model_id` they are about all models. A mode that is not known is a 400: the original warns in its log and
keeps, and who meant to abort does not learn of it.
"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xllm_cli.core import Pause, Resume
from xllm_cli.server.failures import json_response
from xllm_cli.server.orders import (
    STEP_SECONDS,
    WAIT_SECONDS,
    Guard,
    Order,
    carry_out,
    command_id,
    guarded,
    read,
    schema,
)
from xllm_cli.server.state import ServerState

MODES = ["keep", "abort", "wait"]


class PauseRequest(Order):
    """POST /pause, in the body or the query. `mode`: what becomes of running requests: kept for later, aborted, or
    waited for. Those that wait keep their place, new ones queue."""

    model_id: str | None = None
    mode: Literal["keep", "abort", "wait"] = "keep"


class ResumeRequest(Order):
    """POST /resume, in the body or the query."""

    model_id: str | None = None


def routes(state: ServerState, guard: Guard) -> APIRouter:
    """The router over this state."""
    router = guarded(guard)

    @router.post("/pause", openapi_extra=schema(PauseRequest, mode=MODES))
    async def pause(request: HttpRequest) -> Response:
        asked = await read(PauseRequest, request)
        model_id = state.named(asked.model_id)
        seconds = WAIT_SECONDS if asked.mode == "wait" else STEP_SECONDS
        command = Pause(command_id=command_id(), model=model_id, mode=asked.mode)
        return await _change(state, command, seconds, "paused")

    @router.post("/resume", openapi_extra=schema(ResumeRequest))
    async def resume(request: HttpRequest) -> Response:
        asked = await read(ResumeRequest, request)
        return await _change(state, Resume(command_id(), state.named(asked.model_id)), STEP_SECONDS, "running")

    return router


async def _change(state: ServerState, command: Pause | Resume, seconds: float, status: str) -> Response:
    """`before` and `after` by model: paused or running. RequestError 404 if the model was removed meanwhile."""
    before = _statuses(state)
    done = await carry_out(state, command, seconds)
    after = _statuses(state)
    asked = [state.named(command.model)] if command.model else list(after)
    return json_response(
        {
            "status": status,
            "models": {name: {"before": before[name], "after": after[name]} for name in asked if name in before},
            "milliseconds": round(done.seconds * 1000, 3),
        }
    )


def _statuses(state: ServerState) -> dict[str, str]:
    return {model.model_id: "paused" if state.is_paused(model) else "running" for model in state.models}
