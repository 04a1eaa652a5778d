"""Who may come in. Deny by default: with API keys every path but the probes needs one, whatever routes there are."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from xllm_cli.errors import RequestError
from xllm_cli.server.entrance import LIVENESS, READINESS
from xllm_cli.server.failures import error_response
from xllm_cli.server.keys import ApiKeys

OPEN_PATHS = frozenset({*READINESS, *LIVENESS, "/version"})


class Guard:
    """Refuses requests without a key: `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, *, public_metrics: bool) -> None:
        self._app = app
        self._keys = keys
        self._open = OPEN_PATHS | ({"/metrics"} if public_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or not self._keys
            or scope["path"] in self._open
            or self._has_key(Headers(scope=scope))
        ):
            await self._app(scope, receive, send)
            return
        refusal = RequestError(
            "this server needs an API key: Authorization: Bearer KEY", status=401, code="invalid_api_key"
        )
        response = error_response(refusal, scope["path"])
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return self._keys.accept(given)


def admin_only(keys: ApiKeys) -> Callable[[HttpRequest], Awaitable[None]]:
    """A dependency for the routes that change the server. With API keys the guard has asked for one; without, they
    answer on this machine only, and to no page of another site that a browser here may show."""

    async def check(request: HttpRequest) -> None:
        if keys:
            return
        origin = request.headers.get("origin")
        hosts = [request.client.host if request.client else "", *([] if origin is None else [_host(origin)])]
        if not all(map(_is_loopback, hosts)):
            raise RequestError(
                "without an API key this route answers only on the loopback address", status=403, code="loopback_only"
            )

    return check


def _host(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False
