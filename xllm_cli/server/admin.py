"""The operator's routes: health, metrics, models, memory, versions; sleep, wake-up and fork. Answers from snapshots."""

from __future__ import annotations

import ipaddress
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xllm_cli import __version__
from xllm_cli.errors import RequestError
from xllm_cli.server import metrics
from xllm_cli.server.failures import json_response
from xllm_cli.server.state import ServerState

MAX_SILENCE_SECONDS = 120.0  # longer than any step and any wait for memory


def routes(state: ServerState) -> APIRouter:
    """The router over this state."""
    router = APIRouter()
    _probe_routes(router, state)
    _model_routes(router, state)
    _weight_routes(router)
    return router


def _probe_routes(router: APIRouter, state: ServerState) -> None:
    @router.get("/health")
    @router.get("/readyz")
    @router.get("/ping")
    async def health() -> Response:
        report, status = _health(state)
        return json_response(report, status)

    @router.get("/livez")
    async def livez() -> Response:
        silent = state.client.silent_seconds()
        if state.phase == "gone" or silent > MAX_SILENCE_SECONDS:
            return json_response({"status": "unhealthy", "silent_seconds": round(silent, 1)}, 503)
        return json_response({"status": "alive"})

    @router.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(state), media_type=metrics.CONTENT_TYPE)

    @router.get("/version")
    async def versions() -> Response:
        return json_response({"version": __version__})

    @router.get("/vmm")
    async def memory() -> Response:
        snapshot = state.client.snapshot
        if snapshot is None:
            state.serving()  # raises what is missing
            raise RequestError("the engine has not reported its memory yet", status=503, code="model_loading")
        return json_response(snapshot.memory)


def _health(state: ServerState) -> tuple[dict[str, Any], int]:
    if state.phase == "loading":
        loading = state.client.loading
        phase, seconds = (loading.phase, round(loading.seconds, 2)) if loading else ("starting", 0.0)
        return {"status": "loading", "phase": phase, "seconds": seconds}, 503
    if state.phase != "ready":
        return {"status": "unhealthy", "reason": state.phase}, 503
    snapshot = state.client.snapshot
    if snapshot is not None and not snapshot.healthy:
        return {"status": "unhealthy", "reason": snapshot.reason}, 503
    return {"status": "healthy"}, 200


def _model_routes(router: APIRouter, state: ServerState) -> None:
    def card() -> dict[str, Any]:
        ready = state.client.ready
        return {
            "id": state.model.model_id,
            "object": "model",
            "created": state.created,
            "owned_by": "xllm",
            "max_model_len": ready.max_model_len if ready else None,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card()]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        state.model.check(name)
        return json_response(card())


def _weight_routes(router: APIRouter) -> None:
    @router.post("/sleep", dependencies=[Depends(_from_loopback)])
    @router.post("/wakeup", dependencies=[Depends(_from_loopback)])
    @router.post("/fork_master", dependencies=[Depends(_from_loopback)])
    async def needs_vmm_weights() -> Response:
        # R4: these calls move weight pages, and without the switch there are none.
        raise RequestError(
            "sleep, wake-up and fork need weights in VMM pages: start the server with --enable_vmm_weights=true",
            code="vmm_weights_required",
            param="enable_vmm_weights",
        )


async def _from_loopback(request: HttpRequest) -> None:
    """Without an API key the routes that change the server answer on this machine only."""
    host = request.client.host if request.client else ""
    try:
        local = ipaddress.ip_address(host.removeprefix("::ffff:")).is_loopback
    except ValueError:
        local = False
    if not local:
        raise RequestError("this route answers only on the loopback address", status=403, code="loopback_only")
