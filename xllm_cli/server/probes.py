"""What orchestrators and scrapers ask: health, metrics, versions, memory. Answers from the engine's last snapshot."""

from __future__ import annotations

import asyncio
import time
import uuid

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from xllm_cli import __version__
from xllm_cli.core import Request, SamplingParams
from xllm_cli.errors import RequestError
from xllm_cli.server import metrics
from xllm_cli.server.detokenizer import TextOptions
from xllm_cli.server.failures import json_response
from xllm_cli.server.generation import Generation
from xllm_cli.server.served import Served
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

    @router.get("/health_generate")
    async def deep_health(model: str = "") -> Response:
        await _generate_one(state, state.serving(model))
        return json_response({"status": "healthy"})

    @router.get("/v2/health/ready")
    async def ready() -> Response:
        status = state.health()[1]
        return json_response({"ready": status == 200}, status)

    @router.get("/v2/health/live")
    async def live() -> Response:
        status = state.liveness()[1]
        return json_response({"live": status == 200}, status)

    @router.get("/metrics", response_class=PlainTextResponse)
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


async def _generate_one(state: ServerState, served: Served) -> None:
    """Have the engine generate one token. RequestError 503 when it takes longer than it may be silent."""
    seconds = state.service.liveness_timeout_secs
    request = Request(
        request_id=f"health-{uuid.uuid4().hex}",
        prompt_ids=[*served.ready.eos_token_ids, 0][:1],
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        model=served.ready.model_id,
    )
    generation = Generation(state.client, served, [request], TextOptions(), arrived=time.monotonic())
    try:
        async with asyncio.timeout(seconds):
            await generation.whole()
    except TimeoutError as error:
        text = f"the engine generated nothing within {seconds:g} seconds"
        raise RequestError(text, status=503, code="engine_stuck") from error
    finally:
        generation.close()
