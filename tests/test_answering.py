"""Reading a body over ASGI's own functions: its size, its time, and a client that goes in the middle of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.requests import Request

from xllm_cli.errors import RequestError
from xllm_cli.server.answering import read_body
from xllm_cli.server.sse import ClientGone


def read(messages: Iterable[dict[str, Any]], headers: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """The body of a request that sends these messages and then nothing, with a limit of 4 bytes and 50 ms."""
    waiting = iter(messages)

    async def receive() -> dict[str, Any]:
        for message in waiting:
            return message
        await asyncio.sleep(10)
        raise AssertionError("nobody waits for so long")

    request = Request({"type": "http", "method": "POST", "headers": list(headers)}, receive)
    return asyncio.run(read_body(request, limit=4, seconds=0.05))


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_arrives_in_parts() -> None:
    assert read([part(b"ab"), part(b"cd", more=False)]) == b"abcd"
    assert read([part(b"", more=False)]) == b""


@pytest.mark.parametrize(
    ("messages", "headers", "status"),
    [
        ([part(b"abc"), part(b"de")], [], 413),
        ([], [(b"content-length", b"5")], 413),
        ([part(b"ab")], [(b"content-length", b"4")], 408),
        ([part(b"abcde", more=False)], [(b"content-length", b"x")], 413),
    ],
)
def test_a_body_too_large_or_too_slow_is_refused(messages: Any, headers: Any, status: int) -> None:
    with pytest.raises(RequestError) as caught:
        read(messages, headers)
    assert caught.value.status == status


def test_a_client_that_goes_in_the_middle_is_no_error() -> None:
    with pytest.raises(ClientGone):
        read([part(b"ab"), {"type": "http.disconnect"}])
