"""What the routes share that have the engine do something: how an order is read, carried out, answered. Knows no order.

The fields of an order may come in the body, as in the original, or in the query, as in vLLM. All these routes are
behind one guard, which refuses who may not.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xllm_cli.core import Command, Done
from xllm_cli.errors import RequestError
from xllm_cli.server.answering import read_body
from xllm_cli.server.failures import json_response
from xllm_cli.server.parsing import body_schema, decode_object, parse
from xllm_cli.server.state import ServerState

BODY_BYTES = 1 << 16
STEP_SECONDS = 30.0  # an engine between two steps answers in milliseconds; a long prefill is a long step
MOVE_SECONDS = 600.0  # for weights: a deep wake or a fork reads a checkpoint
WAIT_SECONDS = 24 * 3600.0  # for open requests to end: theirs are the deadlines
MODES = ("refuse", "wait", "abort")  # what becomes of open requests
TEXTS = ("model_id", "model_path", "path")  # in a query, everything is text; these are so elsewhere, too

Guard = Callable[[HttpRequest], Awaitable[None]]


class Order(BaseModel):
    """The fields of an order; one that is not known is a mistake."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class Transfer(Order):
    """An order whose weights are to come from another server, as the original's forms may ask."""

    remote_addrs: list[str] = Field([])
    src_weight_segments: list[Any] = Field([])


Asked = TypeVar("Asked", bound=Order)


def guarded(guard: Guard) -> APIRouter:
    """A router for orders."""
    return APIRouter(dependencies=[Depends(guard)])


def moving(state: ServerState, guard: Guard) -> APIRouter:
    """A router for orders that move weights or share them: RequestError 400 if they are not in pages (R4)."""

    async def check() -> None:
        _need_weights(state)

    return APIRouter(dependencies=[Depends(guard), Depends(check)])


def command_id() -> str:
    """A name for one command, never used again."""
    return uuid.uuid4().hex


def _need_weights(state: ServerState) -> None:
    if not state.settings["vmm"]["enable_vmm_weights"]:
        drafted = bool(state.settings["speculative"]["draft_model"])
        remedy = "start the server with --enable_vmm_weights=true" + (" and without --draft_model" if drafted else "")
        text = f"sleep, wake-up, fork and update need weights in VMM pages: {remedy}"
        raise RequestError(text, code="vmm_weights_required", param="enable_vmm_weights")


def refuse_transfer(asked: Transfer) -> None:
    """RequestError 400 where weights are to come from another server."""
    for name in Transfer.model_fields:
        if getattr(asked, name):
            text = (
                f"{name}: remote weight transfer is not supported yet, it needs a fully resident pool (R12); leave it "
                "out, and the weights are read from the model's folder"
            )
            raise RequestError(text, code="not_supported_yet", param=name)


async def read(kind: type[Asked], request: HttpRequest, *, besides: tuple[str, ...] = ()) -> Asked:
    """What was asked. RequestError 400 for what cannot be, and for what is said twice, and differently."""
    return parse(kind, await _fields(request, besides))


async def _fields(request: HttpRequest, besides: tuple[str, ...]) -> dict[str, Any]:
    """Body and query as one, the query without the names in `besides`; no body asks for nothing in particular."""
    found = decode_object(await read_body(request, limit=BODY_BYTES) or b"{}")
    for name, text in request.query_params.multi_items():
        if name in besides:
            continue
        value = text if name in TEXTS else _value(text)
        if found.setdefault(name, value) != value:
            raise RequestError(f"{name} is given twice, and differs", code="invalid_value", param=name)
    return found


def _value(text: str) -> bool | int | str:
    return {"true": True, "false": False}.get(text, int(text) if text.isdecimal() and len(text) < 10 else text)


async def carry_out(state: ServerState, command: Command, seconds: float) -> Done:
    """What the engine made of it. A client that goes away takes nothing back. RequestError if it could not."""
    state.serving()
    done = await state.client.command(command, seconds)
    if (error := done.error) is not None:
        raise RequestError(
            error.message, status=error.status, code=error.code, param=error.param, retry_after=error.retry_after
        )
    return done


def answer(model_id: str, done: Done, **more: Any) -> Response:
    """The transition of a model, how long it took, and what the pool holds now."""
    return json_response(
        {
            "model_id": model_id,
            "before": done.before,
            "after": done.after,
            **more,
            "milliseconds": round(done.seconds * 1000, 3),
            "physical": done.snapshot.memory.physical,
        }
    )


def schema(kind: type[Order], **query: Sequence[Any]) -> dict[str, Any]:
    """OpenAPI of a route whose body may be left out if nothing in it is required; the query takes these values."""
    described = body_schema(kind)
    body = described["requestBody"]
    body["required"] = bool(body["content"]["application/json"]["schema"].get("required"))
    if query:
        parameters = [{"name": name, "in": "query", "schema": {"enum": list(one)}} for name, one in query.items()]
        described["parameters"] = parameters
    return described
