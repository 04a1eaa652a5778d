"""What orchestrators and scrapers ask: health, metrics, versions, memory. Answers from the engine's last snapshot."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from xllm_cli import __version__
from xllm_cli.errors import RequestError
from xllm_cli.server import metrics
from xllm_cli.server.failures import json_response
from xllm_cli.server.state import ServerState


def routes(state: ServerState) -> APIRouter:
    """The router over this state."""
    router = APIRouter()
    exposition = metrics.Exposition(state)

    @router.get("/health")
    @router.get("/readyz")
    @router.get("/ping")
    async def health() -> Response:
        return json_response(*state.health())

    @router.get("/livez")
    async def livez() -> Response:
        return json_response(*state.liveness())

    @router.get("/v2/health/ready")
    async def ready() -> Response:
        status = state.health()[1]
        return json_response({"ready": status == 200}, status)

    @router.get("/v2/health/live")
    async def live() -> Response:
        status = state.liveness()[1]
        return json_response({"live": status == 200}, status)

    @router.get("/metrics")
    async def prometheus() -> Response:
        return Response(exposition.render(), media_type=metrics.CONTENT_TYPE)

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

    return router
