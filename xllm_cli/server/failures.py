"""Every error answer in OpenAI's shape: `{"error": {message, type, param, code}}`. Never echoes what a client sent.

On Anthropic's route the error's type is one of theirs and the body has a type of its own, as their clients expect.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from xllm_cli.errors import RequestError
from xllm_cli.server.sse import ClientGone

logger = logging.getLogger(__name__)
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
ANTHROPIC = "/v1/messages"
_ANTHROPIC_TYPES = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
_TEXTS = {
    404: ("not_found", "this server has no such route"),
    405: ("method_not_allowed", "this route has no such method"),
}
CLIENT_CLOSED_REQUEST = 499
_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    "default": {"description": "An error", "content": {"application/json": {"schema": _SCHEMA}}}
}


def error_body(error: RequestError, path: str = "") -> dict[str, Any]:
    """The JSON body of an error on the route `path`, also the payload of an error event."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    if not path.startswith(ANTHROPIC):
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else kind)
    detail = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return {"type": "error", "error": detail}


def error_response(error: RequestError, path: str = "") -> Response:
    """The HTTP answer of an error, with Retry-After where waiting helps."""
    response = json_response(error_body(error, path), error.status)
    if error.retry_after is not None:
        response.headers["retry-after"] = str(error.retry_after)
    return response


def json_response(payload: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(payload), status, media_type="application/json")


def install(app: FastAPI) -> None:
    """Answer every exception in OpenAI's shape."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error_response(error, request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code, text = _TEXTS.get(error.status_code, ("http_error", "the request was refused"))
        response = error_response(RequestError(text, status=error.status_code, code=code), request.url.path)
        response.headers.update(error.headers or {})
        return response

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def unexpected(request: Request, error: Exception) -> Response:
        failure = RequestError("internal error; the log has it", status=500, code="internal_error")
        return error_response(failure, request.url.path)

    app.add_exception_handler(RequestError, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(Exception, unexpected)
