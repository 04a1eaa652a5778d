"""The routes that read another checkpoint while the server runs.

    POST /fork_master     {"model_path", "model_id", "master_status": 0|1|2, …}   one more model over the same pages
    POST /update_weights  {"model_id", "model_path"}                              other weights for a model

A model is listed only when both are there: the engine's part and the tokenizer. The tokenizer is read first, since a
model without one would be of no use to anybody. One fork at a time, so that two for one id make one model.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xllm_cli.core import Fork, UpdateWeights
from xllm_cli.errors import ModelError, RequestError
from xllm_cli.facts import peek
from xllm_cli.server.failures import json_response
from xllm_cli.server.orders import (
    MOVE_SECONDS,
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
from xllm_cli.server.tokenizer import Tokenizer, digest_of

logger = logging.getLogger(__name__)

_ONE_LINE = r"^[^\x00-\x1f\x7f]+$"  # names and paths are logged
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=_ONE_LINE)]
Folder = Annotated[str, Field(min_length=1, max_length=4096, pattern=_ONE_LINE)]
Size = Annotated[int, Field(ge=1)]


class ForkRequest(Transfer):
    """POST /fork_master: the checkpoint in `model_path`, on the server's machine, served as `model_id`, by default its
    folder's name. `master_status`: 0 awake, 1 and 2 asleep at once, as after POST /sleep."""

    model_path: Folder
    model_id: Name | None = None
    master_status: Literal[0, 1, 2] = 0
    master_node_addr: str = Field("", description="of the original; one process has no meeting point")
    nnodes: Size | None = None
    dp_size: Size | None = None

    @property
    def name(self) -> str:
        """What the model will be called; empty for a path that names no folder."""
        return self.model_id or os.path.basename(os.path.abspath(self.model_path))


class UpdateRequest(Order):
    """POST /update_weights: exchange a model's weights for those in `model_path`, also called `path`; left out, they
    are read again from where they came. Tokenizer and template go with them where they differ."""

    model_id: str | None = None
    model_path: Folder | None = None
    path: Folder | None = None

    @model_validator(mode="after")
    def _check_path(self) -> UpdateRequest:
        if self.path and self.model_path and self.path != self.model_path:
            raise ValueError("path and model_path are two names of one thing: give one")
        return self


def routes(state: ServerState, guard: Guard) -> APIRouter:
    """The router over this state."""
    router = moving(state, guard)
    one_at_a_time = asyncio.Lock()

    @router.post("/fork_master", openapi_extra=schema(ForkRequest))
    async def fork(request: HttpRequest) -> Response:
        asked = await read(ForkRequest, request)
        _refuse_what_is_missing(state, asked)
        if (there := _existing(state, asked)) is not None:
            return there
        tokenizer = await asyncio.to_thread(_read_checkpoint, asked.model_path, state.settings["model"], _known(state))
        async with one_at_a_time:
            return _existing(state, asked) or await _fork(state, asked, tokenizer)

    @router.post("/update_weights", openapi_extra=schema(UpdateRequest))
    async def update_weights(request: HttpRequest) -> Response:
        asked = await read(UpdateRequest, request)
        model = state.models.find(asked.model_id, "model_id")
        path = asked.model_path or asked.path or ""
        tokenizer = await asyncio.to_thread(_read_update, model, path, state.settings["model"], _known(state))
        command = UpdateWeights(command_id=command_id(), model=model.model_id, model_path=path)
        done = await carry_out(state, command, MOVE_SECONDS)
        model.path, model.tokenizer = path or model.path, tokenizer or model.tokenizer
        logger.info("%s has the weights of %s, %.1f s", model.model_id, model.path, done.seconds)
        kept = "kept" if tokenizer is None else "exchanged"
        return answer(model.model_id, done, model_path=model.path, tokenizer=kept, taken=done.taken, freed=done.freed)

    return router


def _refuse_what_is_missing(state: ServerState, asked: ForkRequest) -> None:
    """RequestError 400 for what the original does and this server does not."""
    refuse_transfer(asked)
    for name, section in (("nnodes", "distributed"), ("dp_size", "parallel")):
        wanted, own = getattr(asked, name), state.settings[section][name]
        if wanted is not None and wanted > own:
            text = f"{name} {wanted} is more than this server's own, {own}: a fork runs on its ranks; leave {name} out"
            raise RequestError(text, code="invalid_value", param=name)
    if not asked.name:
        raise RequestError("model_path names no folder; give a model_id", code="invalid_value", param="model_id")


def _existing(state: ServerState, asked: ForkRequest) -> Response | None:
    """The answer where the id is taken; None where it is free. RequestError 409 if another checkpoint has it, or if its
    model is leaving."""
    model = state.models.get(asked.name)
    if model is not None and state.is_gone(model):
        state.forget(model)
        return None
    if model is None:
        return None
    if model.num_removals:
        text = f"{asked.name} is being removed: wait until it is gone, or give another model_id"
        raise RequestError(text, status=409, code="model_changing", param="model_id")
    if os.path.realpath(model.path) != os.path.realpath(asked.model_path):
        text = f"{asked.name} is a model here already, from {model.path}; give another model_id"
        raise RequestError(text, status=409, code="model_exists", param="model_id")
    now, snapshot = state.state_of(model), state.client.snapshot
    physical = snapshot.memory.physical if snapshot is not None else 0
    return json_response(
        {
            "model_id": model.model_id,
            "before": now,
            "after": now,
            "taken": 0,
            "milliseconds": 0,
            "physical": physical,
            "message": "there already, nothing done",
        }
    )


def _known(state: ServerState) -> list[Tokenizer]:
    """What a model from equal files can share: making one anew takes longer than the rest of a fork."""
    return [model.tokenizer for model in state.models if model.tokenizer is not None]


def _read_checkpoint(path: str, flags: dict[str, Any], known: list[Tokenizer]) -> Tokenizer:
    """The tokenizer in the folder, in a thread, or the known one of the same files. RequestError 400 for a folder that
    cannot be served."""
    _check_folder(path)
    parsers = {"tool_call_parser": flags["tool_call_parser"], "reasoning_parser": flags["reasoning_parser"]}
    with _explained():
        digest = digest_of(path)
        same = next((tokenizer for tokenizer in known if tokenizer.digest == digest), None)
        return same or Tokenizer.from_folder(path, **parsers)


@contextmanager
def _explained() -> Iterator[None]:
    """What is wrong with a folder's files leaves as a RequestError 400."""
    try:
        yield
    except ModelError as error:
        raise RequestError(str(error), code="model_invalid", param="model_path") from error


def _read_update(model: ServedModel, path: str, flags: dict[str, Any], known: list[Tokenizer]) -> Tokenizer | None:
    """The tokenizer for weights from `path`, "" being where the model came from, in a thread; None where it is the same
    or there is none: who trains a model writes its weights alone at times. RequestError 400 for a folder that cannot be
    used."""
    if path:
        _check_folder(path)
    path = path or model.path
    if not os.path.isfile(os.path.join(path, "tokenizer.json")):
        return None
    with _explained():
        is_same = model.tokenizer is not None and model.tokenizer.digest == digest_of(path)
    return None if is_same else _read_checkpoint(path, flags, known)


def _check_folder(path: str) -> None:
    """RequestError 400 if there is no checkpoint that an engine with weights in pages could serve."""
    if not os.path.isfile(os.path.join(path, "config.json")):
        missing = "has no config.json" if os.path.isdir(path) else "is no folder on the server's machine"
        text = f"model_path {path} {missing}; it must be a model folder in the Hugging Face layout"
        raise RequestError(text, code="model_invalid", param="model_path")
    backend, is_hybrid = peek(path)
    if backend not in (None, "llm"):
        text = f"{path} needs the {backend} backend; weights in virtual memory need the LLM backend (R2)"
        raise RequestError(text, code="model_invalid", param="model_path")
    if is_hybrid:
        text = f"{path} has a linear state; weights in virtual memory cannot be combined with it (R7)"
        raise RequestError(text, code="model_invalid", param="model_path")


async def _fork(state: ServerState, asked: ForkRequest, tokenizer: Tokenizer) -> Response:
    command = Fork(command_id=command_id(), model=asked.name, model_path=asked.model_path, level=asked.master_status)
    done = await carry_out(state, command, MOVE_SECONDS)
    assert done.ready is not None, "a fork is described"
    model = ServedModel(asked.name, asked.model_path, state.instruments.of(asked.name), tokenizer, done.ready)
    state.models.add(model)
    logger.info("forked %s from %s, %s, %.1f s", model.model_id, model.path, done.after, done.seconds)
    weights = done.snapshot.memory.models.get(model.model_id, {}).get("weights", 0)
    return answer(model.model_id, done, taken=done.taken, weights=weights)
