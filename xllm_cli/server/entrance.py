"""The ASGI application from the first moment on: probes are answered at once, all else waits for the routes.

The web framework takes a good part of a second to import, and an orchestrator asks from the first moment on. Knows no
framework.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from xllm_cli.server.state import ServerState

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

READINESS = frozenset({"/health", "/readyz", "/ping", "/v2/health/ready"})
LIVENESS = frozenset({"/livez", "/v2/health/live"})


class Entrance:
    """Passes requests on to the application that `open` brings."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._app: ASGIApp | None = None
        self._opened = asyncio.Event()

    def open(self, app: ASGIApp) -> None:
        """From now on `app` answers, also those who have been waiting."""
        self._app = app
        self._opened.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            if (report := self._early(scope)) is not None:
                await _answer(send, *report)
                return
            await self._opened.wait()
        assert self._app is not None
        await self._app(scope, receive, send)

    def _early(self, scope: Scope) -> tuple[dict[str, Any], int] | None:
        path = scope.get("path", "")
        if path in READINESS:
            return self._state.health()
        return self._state.liveness() if path in LIVENESS else None


async def _answer(send: Send, report: dict[str, Any], status: int) -> None:
    body = msgspec.json.encode(report)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
