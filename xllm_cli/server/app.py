"""The ASGI application: routes, error shapes and the few things that hold for every request.

Envelope (path, HEAD, request id) → AccessLog → CORS, if any → Guard → routes
"""

from __future__ import annotations

import re
import uuid

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xllm_cli import __version__
from xllm_cli.flags import SecurityConfig
from xllm_cli.server import (
    admin,
    failures,
    forking,
    info,
    messages,
    openai,
    pausing,
    probes,
    removing,
    responses,
    sleeping,
    tokens,
)
from xllm_cli.server.access_log import AccessLog
from xllm_cli.server.guard import Guard, admin_only
from xllm_cli.server.instruments import HttpInstruments
from xllm_cli.server.keys import ApiKeys
from xllm_cli.server.origins import allowed_origins
from xllm_cli.server.state import ServerState

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_EXPOSED = ("x-request-id", "x-xllm-ignored-fields", "retry-after")
_PREFLIGHT_SECONDS = 600


def create_app(state: ServerState, keys: ApiKeys, security: SecurityConfig) -> ASGIApp:
    """The application over this state."""
    routes = FastAPI(
        title="xllm", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False,
        responses=failures.DOCUMENTED,
    )  # fmt: skip
    failures.install(routes)
    for router in create_routers(state, keys):
        routes.include_router(router)
        _announce(router, state.instruments.http)
    app: ASGIApp = Guard(routes, keys, public_metrics=security.public_metrics)
    if origins := allowed_origins(security):
        # outside the guard: a browser asks whether it may send a key before it sends one
        app = CORSMiddleware(
            app, allow_origins=origins, allow_methods=("*",), allow_headers=("*",), expose_headers=_EXPOSED,
            max_age=_PREFLIGHT_SECONDS,
        )  # fmt: skip
    return Envelope(AccessLog(app, state.instruments.http, state.service.access_log))


def create_routers(state: ServerState, keys: ApiKeys) -> list[APIRouter]:
    """Every route there is."""
    parts = (openai, responses, messages, tokens, info, probes)
    orders = (admin, sleeping, forking, removing, pausing)
    guard = admin_only(keys)
    return [*(part.routes(state) for part in parts), *(part.routes(state, guard) for part in orders)]


def _announce(router: APIRouter, http: HttpInstruments) -> None:
    for route in router.routes:
        if isinstance(route, APIRoute):
            for method in route.methods or ():
                http.announce(method, route.path)


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

        scope = {**scope, "path": path, "raw_path": path.encode("utf-8", "replace"), "method": method}
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        await self._app(scope, receive, send_with_id)


def _request_id(scope: Scope) -> str:
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
