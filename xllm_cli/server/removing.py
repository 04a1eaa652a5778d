"""The route that takes a model out of the server.

    DELETE /v1/models/{model_id}?mode=refuse|wait|abort      OpenAI's route and answer, and what other orders tell

The engine knows best what may leave: it is asked about every name, also about one that is not listed here, such as that
of a fork whose answer came too late. What is known here of a model goes once the engine has nothing of it any more.
"""

from __future__ import annotations

import logging
from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xllm_cli.core import Done, Remove
from xllm_cli.errors import RequestError
from xllm_cli.server.orders import (
    MODES,
    MOVE_SECONDS,
    WAIT_SECONDS,
    Guard,
    Order,
    answer,
    carry_out,
    command_id,
    guarded,
    read,
    schema,
)
from xllm_cli.server.served import ServedModel
from xllm_cli.server.state import ServerState

logger = logging.getLogger(__name__)


class RemoveRequest(Order):
    """DELETE /v1/models/{model_id}, in the body or the query. `mode`: what becomes of open requests."""

    mode: Literal["refuse", "wait", "abort"] = "refuse"


def routes(state: ServerState, guard: Guard) -> APIRouter:
    """The router over this state."""
    router = guarded(guard)

    @router.delete("/v1/models/{name:path}", openapi_extra=schema(RemoveRequest, mode=MODES))
    async def remove(request: HttpRequest, name: str) -> Response:
        asked = await read(RemoveRequest, request)
        model = state.models.of_url(name)
        command = Remove(command_id=command_id(), model=name if model is None else model.model_id, mode=asked.mode)
        seconds = WAIT_SECONDS if asked.mode == "wait" else MOVE_SECONDS
        done = await (carry_out(state, command, seconds) if model is None else _part(state, model, command, seconds))
        logger.info("removed %s, %.1f s", command.model, done.seconds)
        told = {"message": done.message} if done.message else {}
        return answer(command.model, done, id=command.model, object="model", deleted=True, freed=done.freed, **told)

    return router


async def _part(state: ServerState, model: ServedModel, command: Remove, seconds: float) -> Done:
    """Let a model that is listed leave."""
    model.num_removals += 1
    try:
        done = await carry_out(state, command, seconds)
    except RequestError as error:
        if error.code == "model_not_found":  # it left after the answer to an earlier order came too late
            state.forget(model)
        raise
    finally:
        model.num_removals -= 1
    state.forget(model)
    return done
