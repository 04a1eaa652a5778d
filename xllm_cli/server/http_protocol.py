"""What is not even HTTP: answered in the shape of every other error. Everything else is uvicorn's."""

from __future__ import annotations

import http
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10  # of a request line and headers that arrive in several pieces


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a limit on the head of a request, and errors in OpenAI's shape."""

    _is_in_head = False
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, "headers_too_large", f"the headers are limited to {MAX_HEAD_BYTES} bytes")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._is_in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "invalid_http", "this is not an HTTP request")

    def _refuse(self, status: int, code: str, message: str) -> None:
        error: dict[str, Any] = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = msgspec.json.encode({"error": error})
        head = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
