"""What clients and routers ask about the server: models, settings, load. Field names are vLLM's and SGLang's."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from xllm_cli import __version__
from xllm_cli.core import Counters, ModelActivity, Snapshot, VmmReport
from xllm_cli.server.failures import json_response
from xllm_cli.server.instruments import activity_of
from xllm_cli.server.served import ServedModel
from xllm_cli.server.state import ServerState

_NOTHING_YET = Snapshot(memory=VmmReport(), counters=Counters())
_COUNTED = ("num_running_reqs", "num_waiting_reqs", "num_total_reqs", "num_used_tokens")


def routes(state: ServerState) -> APIRouter:
    """The router over this state."""
    router = APIRouter()
    _model_routes(router, state)
    _load_routes(router, state)
    return router


def _model_routes(router: APIRouter, state: ServerState) -> None:
    def card(model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.model_id,
            "object": "model",
            "created": model.created,
            "owned_by": "xllm",
            "root": model.path,
            "max_model_len": model.ready.max_model_len if model.ready else None,
            "state": state.state_of(model),
            "is_paused": state.is_paused(model),
        }

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card(model) for model in state.models]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(card(state.models.find(name)))

    @router.get("/is_sleeping")
    async def is_sleeping(model_id: str = "") -> Response:
        now = state.state_of(state.serving(model_id).model)
        return json_response({"is_sleeping": now != "awake", "state": now})

    @router.get("/is_paused")
    async def is_paused(model_id: str = "") -> Response:
        return json_response({"is_paused": state.is_paused(state.serving(model_id).model)})

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> Response:
        first = state.models.first
        ready = first.ready
        return json_response(
            {
                "model_path": first.path,
                "tokenizer_path": first.path,
                "served_model_name": first.model_id,
                "is_generation": True,
                "architectures": [ready.architecture] if ready else [],
                "max_context_length": ready.max_model_len if ready else None,
                "vocab_size": ready.vocab_size if ready else None,
                "eos_token_ids": ready.eos_token_ids if ready else [],
                "preferred_sampling_params": None,
                "weight_version": "default",
            }
        )

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> Response:
        first = state.models.first
        flags = {name: value for section in state.settings.values() for name, value in section.items()}
        del flags["model"]  # `model` and `model_id` are one field to sglang-router, which reads neither then
        return json_response(
            {
                **flags,
                "version": __version__,
                "status": state.phase,
                "model_id": first.model_id,
                "model_path": first.path,
                "served_model_name": first.model_id,
                "max_total_num_tokens": first.ready.capacity_tokens if first.ready else 0,
                "max_running_requests": state.service.max_concurrent_requests,
                "uptime_seconds": int(time.time()) - first.created,
            }
        )


def _load_routes(router: APIRouter, state: ServerState) -> None:
    @router.get("/load")
    async def load() -> Response:
        return json_response({"server_load": state.open_requests})

    @router.get("/v1/loads")
    async def loads() -> Response:
        models = {model.model_id: _load_of(state, model) for model in state.models}
        ready = state.models.first.ready
        rank = {
            "dp_rank": 0,
            **{name: sum(load[name] for load in models.values()) for name in _COUNTED},
            "max_total_num_tokens": ready.capacity_tokens if ready else 0,
            "token_usage": sum(load["token_usage"] for load in models.values()),
            "max_running_requests": state.service.max_concurrent_requests,
        }
        return json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": __version__,
                "dp_rank_count": 1,
                "loads": [rank],
                "models": models,
                "aggregate": {
                    "total_running_reqs": rank["num_running_reqs"],
                    "total_waiting_reqs": rank["num_waiting_reqs"],
                    "total_reqs": rank["num_total_reqs"],
                    "avg_token_usage": rank["token_usage"],
                },
            }
        )


def _load_of(state: ServerState, model: ServedModel) -> dict[str, Any]:
    """One model's requests and tokens. A token of one model is as many bytes as it has; what each could have, were it
    alone, is of one pool: so shares may be added, capacities not."""
    snapshot = state.client.snapshot or _NOTHING_YET
    activity = activity_of(snapshot, model.model_id) or ModelActivity(counters=Counters())
    facts = snapshot.memory.models.get(model.model_id, {})
    blocks = int(facts.get("kv_live", 0)) / int(facts.get("bytes_per_block", 0) or 1)
    used = int(blocks * int(state.settings["kv_cache"]["block_size"]))
    capacity = model.ready.capacity_tokens if model.ready else 0
    return {
        "num_running_reqs": activity.num_running,
        "num_waiting_reqs": activity.num_waiting,
        "num_total_reqs": activity.num_running + activity.num_waiting,
        "num_used_tokens": used,
        "max_total_num_tokens": capacity,
        "token_usage": used / capacity if capacity else 0.0,
    }
