"""The routes that change the server: sleep, wake-up and fork. Behind the key or the loopback address."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Depends
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xllm_cli.errors import RequestError
from xllm_cli.server.state import ServerState


def routes(state: ServerState, guard: Callable[[HttpRequest], Awaitable[None]]) -> APIRouter:
    """The router over this state; `guard` refuses who may not."""
    router = APIRouter(dependencies=[Depends(guard)])

    @router.post("/sleep")
    @router.post("/wakeup")
    @router.post("/fork_master")
    async def needs_vmm_weights() -> Response:
        # R4: these calls move weight pages, and without the switch there are none.
        raise RequestError(
            "sleep, wake-up and fork need weights in VMM pages: start the server with --enable_vmm_weights=true",
            code="vmm_weights_required",
            param="enable_vmm_weights",
        )

    return router
