"""The ASGI application: routes, error shapes and the few things that hold for every request."""

from __future__ import annotations

import re
import uuid

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xllm_cli.server import admin, failures, openai
from xllm_cli.server.state import ServerState

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


def create_app(state: ServerState) -> ASGIApp:
    """The application over this state."""
    app = FastAPI(title="xllm", docs_url=None, redoc_url=None, redirect_slashes=False)
    failures.install(app)
    app.include_router(openai.routes(state))
    app.include_router(admin.routes(state))
    return Envelope(app)


class Envelope:
    """What every request gets: a clean path, HEAD as GET, and a request id in the answer.

    A base URL with a trailing slash makes clients ask for `/v1//models`; doubled and trailing slashes collapse.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = re.sub("/{2,}", "/", scope["path"])
        path = path.rstrip("/") or "/"
        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the HTTP layer drops a HEAD's body
        request_id = _request_id(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app({**scope, "path": path, "raw_path": path.encode(), "method": method}, receive, send_with_id)


def _request_id(scope: Scope) -> str:
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
