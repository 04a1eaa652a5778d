"""The routes of a model's sleep, in the original's form and in vLLM's.

    POST /sleep   {"model_id", "master_status": 1|2, "park", "mode"}   or   /sleep?level=1|2&mode=…&model_id=…
    POST /wakeup  {"model_id"}                                         or   /wake_up?tags=weights,kv_cache&model_id=…

Knows what may be asked and how it is answered; what it does is the engine's business.
"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xllm_cli.core import Sleep, Wake
from xllm_cli.errors import RequestError
from xllm_cli.server.failures import json_response
from xllm_cli.server.orders import (
    MODES,
    MOVE_SECONDS,
    WAIT_SECONDS,
    Guard,
    Order,
    Transfer,
    answer,
    carry_out,
    command_id,
    moving,
    read,
    refuse_transfer,
    schema,
)
from xllm_cli.server.served import ServedModel
from xllm_cli.server.state import ServerState

TAGS = ("weights", "kv_cache")


class SleepRequest(Order):
    """POST /sleep, in the body or the query. `level` is vLLM's word for `master_status`: 1 keeps a copy of the weights
    on the host, 2 reads the checkpoint to wake. `park` only sets the pages aside, until somebody needs them. `mode`:
    what becomes of open requests."""

    model_id: str | None = None
    master_status: Literal[1, 2] | None = None
    level: Literal[1, 2] | None = None
    park: bool = False
    mode: Literal["refuse", "wait", "abort"] = "refuse"


class WakeRequest(Transfer):
    """POST /wakeup and POST /wake_up."""

    model_id: str | None = None
    master_status: Literal[0] = 0


def routes(state: ServerState, guard: Guard) -> APIRouter:
    """The router over this state."""
    router = moving(state, guard)

    @router.post("/sleep", openapi_extra=schema(SleepRequest, level=[1, 2], mode=MODES))
    async def sleep(request: HttpRequest) -> Response:
        asked = await read(SleepRequest, request)
        model = state.models.find(asked.model_id, "model_id")
        command = Sleep(
            command_id=command_id(), model=model.model_id, level=_level(asked), park=asked.park, mode=asked.mode
        )
        done = await carry_out(state, command, WAIT_SECONDS if asked.mode == "wait" else MOVE_SECONDS)
        model.instruments.observe("xllm:sleep_seconds", done.seconds)
        return answer(model.model_id, done, freed=done.freed)

    @router.post("/wakeup", openapi_extra=schema(WakeRequest))
    async def wakeup(request: HttpRequest) -> Response:
        asked = await _asked(request)
        return await _wake(state, state.models.find(asked.model_id, "model_id"))

    @router.post("/wake_up", openapi_extra=schema(WakeRequest, tags=list(TAGS)))
    async def wake_up(request: HttpRequest) -> Response:
        asked = await _asked(request, "tags")
        model = state.models.find(asked.model_id, "model_id")
        tags = _tags(request.query_params.getlist("tags"))
        return await _wake(state, model) if not tags or "weights" in tags else _leave_weights(state, model)

    return router


def _level(asked: SleepRequest) -> Literal[1, 2]:
    level, status = asked.level or asked.master_status or 1, asked.master_status or asked.level or 1
    if level != status:
        text = f"level={level} and master_status={status} are two names of one thing: give one"
        raise RequestError(text, code="invalid_value", param="level")
    if asked.park and level == 2:
        text = "a parked model keeps its pages, one at level 2 not even a copy: ask for park with level 1, or for none"
        raise RequestError(text, code="invalid_value", param="park")
    return level


def _tags(given: list[str]) -> set[str]:
    tags = {tag for text in given for tag in text.split(",") if tag}
    if not tags.issubset(TAGS):
        raise RequestError(f"tags are {' and '.join(TAGS)}", code="invalid_value", param="tags")
    return tags


async def _asked(request: HttpRequest, *besides: str) -> WakeRequest:
    asked = await read(WakeRequest, request, besides=besides)
    refuse_transfer(asked)
    return asked


async def _wake(state: ServerState, model: ServedModel) -> Response:
    done = await carry_out(state, Wake(command_id(), model.model_id), MOVE_SECONDS)
    model.instruments.observe("xllm:wake_seconds", done.seconds)
    return answer(model.model_id, done, taken=done.taken)


def _leave_weights(state: ServerState, model: ServedModel) -> Response:
    """KV pages come with the first request that needs them: alone they are nothing to wake."""
    state.serving()
    now = state.state_of(model)
    text = "KV pages come with requests" + ("; the weights still sleep" if now != "awake" else "")
    return json_response({"model_id": model.model_id, "before": now, "after": now, "message": text})
