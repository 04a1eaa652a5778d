"""Every HTTP request seen from outside: one line in the log, one count in the metrics. Knows no route and no body."""

from __future__ import annotations

import logging
import time
from typing import Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xllm_cli.server.entrance import LIVENESS, READINESS
from xllm_cli.server.instruments import HttpInstruments

logger = logging.getLogger(__name__)
PROBES = frozenset({*READINESS, *LIVENESS, "/metrics"})
CLIENT_GONE = 499  # the status of an answer that nobody waited for


class AccessLog:
    """Wraps an application that leaves its route in the scope."""

    def __init__(self, app: ASGIApp, http: HttpInstruments, lines: Literal["requests", "all", "off"]) -> None:
        self._app = app
        self._http = http
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status, is_whole = CLIENT_GONE, False

        async def watched(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                is_whole = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._note(scope, status if is_whole else CLIENT_GONE, time.monotonic() - started)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        is_probe = scope["path"] in PROBES
        handler = getattr(scope.get("route"), "path", "none")
        self._http.answered(scope["method"], handler, status, seconds)
        if self._lines == "all" or (self._lines == "requests" and not is_probe):
            host = (scope.get("client") or ("-",))[0]
            path = ascii(scope["path"])[1:-1]  # a path may hold anything, a line feed too
            request_id = scope["state"]["request_id"]
            logger.info("%s %s %s %d %.3f s %s", host, scope["method"], path, status, seconds, request_id)
