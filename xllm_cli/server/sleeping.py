"""The routes of a model's sleep, in the original's form and in vLLM's. Behind the same guard as the other admin routes.

    POST /sleep   {"model_id", "master_status": 1|2, "park", "mode"}   or   /sleep?level=1|2&mode=…
    POST /wakeup  {"model_id"}                                         or   /wake_up?tags=weights,kv_cache

Knows what may be asked and how it is answered; what it does is the engine's business.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xllm_cli.core import Done, Sleep, Wake
from xllm_cli.errors import RequestError
from xllm_cli.server.admin import ADMIN_BODY_BYTES, command_id
from xllm_cli.server.answering import read_body
from xllm_cli.server.failures import json_response
from xllm_cli.server.parsing import body_schema, decode_object, parse
from xllm_cli.server.state import ServerState

MOVE_SECONDS = 600.0  # a deep wake reads the checkpoint again
WAIT_SECONDS = 24 * 3600.0  # for open requests to end: theirs are the deadlines
TAGS = ("weights", "kv_cache")


class SleepRequest(BaseModel):
    """POST /sleep, in the body or the query. `level` is vLLM's word for `master_status`: 1 keeps a copy of the weights
    on the host, 2 reads the checkpoint to wake. `park` only sets the pages aside, until somebody needs them. `mode`:
    what becomes of open requests."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
    model_id: str | None = None
    master_status: Literal[1, 2] | None = None
    level: Literal[1, 2] | None = None
    park: bool = False
    mode: Literal["refuse", "wait", "abort"] = "refuse"


class WakeRequest(BaseModel):
    """POST /wakeup and POST /wake_up."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
    model_id: str | None = None
    master_status: Literal[0] = 0
    remote_addrs: list[str] = Field([], max_length=0)
    src_weight_segments: list[Any] = Field([], max_length=0)


class ForkRequest(BaseModel):
    """POST /fork_master: another model in this process."""

    model_config = ConfigDict(protected_namespaces=())
    model_path: str
    model_id: str | None = None


def routes(state: ServerState, guard: Callable[[HttpRequest], Awaitable[None]]) -> APIRouter:
    """The router over this state; `guard` refuses who may not."""
    router = APIRouter(dependencies=[Depends(guard)])

    @router.post("/sleep", openapi_extra=_schema(SleepRequest, level=[1, 2], mode=["refuse", "wait", "abort"]))
    async def sleep(request: HttpRequest) -> Response:
        _need_weights(state)
        asked = parse(SleepRequest, _fields(request, await read_body(request, limit=ADMIN_BODY_BYTES)))
        state.model.check(asked.model_id)
        seconds = WAIT_SECONDS if asked.mode == "wait" else MOVE_SECONDS
        command = Sleep(command_id=command_id(), level=_level(asked), park=asked.park, mode=asked.mode)
        done = await _carry_out(state, command, seconds)
        state.instruments.observe("xllm:sleep_seconds", done.seconds)
        return _answer(state, done, freed=done.freed)

    @router.post("/wakeup", openapi_extra=_schema(WakeRequest))
    async def wakeup(request: HttpRequest) -> Response:
        _need_weights(state)
        state.model.check(parse(WakeRequest, await _body(request)).model_id)
        return await _wake(state)

    @router.post("/wake_up", openapi_extra=_schema(WakeRequest, tags=list(TAGS)))
    async def wake_up(request: HttpRequest) -> Response:
        _need_weights(state)
        state.model.check(parse(WakeRequest, await _body(request)).model_id)
        tags = _tags(request.query_params.getlist("tags"))
        return await _wake(state) if not tags or "weights" in tags else _leave_weights(state)

    @router.post("/fork_master", openapi_extra=_schema(ForkRequest))
    async def fork(request: HttpRequest) -> Response:
        _need_weights(state)
        parse(ForkRequest, await read_body(request, limit=ADMIN_BODY_BYTES))
        text = "this server serves one model and cannot fork it yet: start another `xllm serve` for the other model"
        raise RequestError(text, code="not_supported_yet")

    return router


def _need_weights(state: ServerState) -> None:
    if not state.settings["vmm"]["enable_vmm_weights"]:  # R4: these calls move weight pages, and there are none
        drafted = bool(state.settings["speculative"]["draft_model"])
        remedy = "start the server with --enable_vmm_weights=true" + (" and without --draft_model" if drafted else "")
        text = f"sleep, wake-up and fork need weights in VMM pages: {remedy}"
        raise RequestError(text, code="vmm_weights_required", param="enable_vmm_weights")


async def _body(request: HttpRequest) -> bytes:
    """An absent body asks for nothing in particular."""
    return await read_body(request, limit=ADMIN_BODY_BYTES) or b"{}"


def _fields(request: HttpRequest, body: bytes) -> dict[str, Any]:
    """Body and query as one. RequestError 400 for what both say differently."""
    fields = decode_object(body or b"{}")
    for name, text in request.query_params.multi_items():
        value = {"true": True, "false": False}.get(text, int(text) if text.isdecimal() and len(text) < 10 else text)
        if fields.setdefault(name, value) != value:
            raise RequestError(f"{name} is given twice, and differs", code="invalid_value", param=name)
    return fields


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


async def _wake(state: ServerState) -> Response:
    done = await _carry_out(state, Wake(command_id()), MOVE_SECONDS)
    state.instruments.observe("xllm:wake_seconds", done.seconds)
    return _answer(state, done, taken=done.taken)


def _leave_weights(state: ServerState) -> Response:
    """KV pages come with the first request that needs them: alone they are nothing to wake."""
    state.serving()
    text = "KV pages come with requests" + ("; the weights still sleep" if state.model_state != "awake" else "")
    return json_response(
        {"model_id": state.model.model_id, "before": state.model_state, "after": state.model_state, "message": text}
    )


async def _carry_out(state: ServerState, command: Sleep | Wake, seconds: float) -> Done:
    """What the engine made of it. A client that goes away takes nothing back."""
    state.serving()
    done = await state.client.command(command, seconds)
    if (error := done.error) is not None:
        raise RequestError(
            error.message, status=error.status, code=error.code, param=error.param, retry_after=error.retry_after
        )
    return done


def _answer(state: ServerState, done: Done, **moved: int) -> Response:
    return json_response(
        {
            "model_id": state.model.model_id,
            "before": done.before,
            "after": done.after,
            **moved,
            "milliseconds": round(done.seconds * 1000, 3),
            "physical": done.snapshot.memory.physical,
        }
    )


def _schema(kind: type[BaseModel], **query: list[Any]) -> dict[str, Any]:
    """OpenAPI of a route whose body may be left out, and whose query takes these values."""
    schema = body_schema(kind)
    body = schema["requestBody"]
    body["required"] = bool(body["content"]["application/json"]["schema"].get("required"))
    if query:
        schema["parameters"] = [{"name": name, "in": "query", "schema": {"enum": one}} for name, one in query.items()]
    return schema
