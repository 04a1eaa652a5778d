"""HTTP to a running server, for the commands that ask one: standard library only. Knows no route."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from xllm_cli.errors import ConfigError, XllmError
from xllm_cli.server.keys import read_keys
from xllm_cli.sources import API_KEY_VARIABLE

DEFAULT_URL = "http://127.0.0.1:8010"


class Unreachable(XllmError):
    """No HTTP answer came: nobody listens, TLS failed, or it took too long."""


class Answer(NamedTuple):
    """A whole answer. `seconds` is from the request to its last byte."""

    status: int
    body: bytes
    seconds: float

    def json(self) -> Any:
        """The body as JSON; ValueError if it is none."""
        return json.loads(self.body)


class Client:
    """Asks the server at `url`; a path in it, such as /v1, is dropped. ConfigError for what is no URL."""

    def __init__(self, url: str, key: str = "", *, timeout: float = 30.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            self._host = ""
        if not self._host or parts.scheme not in ("http", "https"):
            raise ConfigError(f"{url!r} is no address of a server: it must look like {DEFAULT_URL}")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._is_tls = parts.scheme == "https"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout = timeout

    def get(self, path: str) -> Answer:
        """GET; Unreachable without an answer."""
        return self._whole("GET", path, None)

    def post(self, path: str, body: Any) -> Answer:
        """POST of JSON; Unreachable without an answer."""
        return self._whole("POST", path, body)

    def delete(self, path: str) -> Answer:
        """DELETE; Unreachable without an answer."""
        return self._whole("DELETE", path, None)

    def events(self, path: str, body: Any) -> Iterator[tuple[float, str]]:
        """The data of each server-sent event, with the seconds since the request. Unreachable, or ValueError for an
        answer that is no stream."""
        started = time.monotonic()
        try:
            with closing(self._connection()) as connection:
                answer = self._ask(connection, "POST", path, body)
                if answer.status != 200 or "text/event-stream" not in answer.headers.get("content-type", ""):
                    raise ValueError(f"{answer.status}: {answer.read(2000).decode('utf-8', 'replace')}")
                for line in answer:
                    if time.monotonic() - started > self._timeout:
                        raise Unreachable(f"the stream did not end within {self._timeout:g} s")
                    if line.startswith(b"data:"):
                        yield time.monotonic() - started, line[5:].strip().decode("utf-8")
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(self._reason(error)) from error

    def _whole(self, method: str, path: str, body: Any) -> Answer:
        started = time.monotonic()
        try:
            with closing(self._connection()) as connection:
                answer = self._ask(connection, method, path, body)
                content = answer.read()
                return Answer(answer.status, content, time.monotonic() - started)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(self._reason(error)) from error

    def _connection(self) -> http.client.HTTPConnection:
        if self._is_tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection.getresponse()

    def _reason(self, error: Exception) -> str:
        match error:
            case TimeoutError():
                return f"{self.url} did not answer within {self._timeout:g} s"
            case ssl.SSLCertVerificationError():
                hint = "SSL_CERT_FILE=FILE names a certificate to trust"
                return f"{self.url}: its certificate is not trusted ({error.verify_message}); {hint}"
            case socket.gaierror() | OSError():
                return f"{self.url} cannot be reached: {error.strerror or error}"
        return f"{self.url} does not speak HTTP: {error or type(error).__name__}"


def api_key(file: Path | None) -> str:
    """The first key in `file`, else the environment's XLLM_API_KEY, else ''. ConfigError for an unusable file."""
    return read_keys(file)[0] if file else os.environ.get(API_KEY_VARIABLE, "").partition(",")[0].strip()
