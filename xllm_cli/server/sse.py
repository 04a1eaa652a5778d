"""Server-sent events over ASGI: framing, and a response that ends its source when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection; nobody reads the answer."""


def event(payload: Any) -> bytes:
    """One `data:` event with a JSON payload."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def named_event(name: str, payload: Any) -> bytes:
    """An event with a name besides its JSON payload."""
    return f"event: {name}\n".encode() + event(payload)


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`, cancelled with ClientGone as soon as the client goes. The body must have been read."""
    running = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientGone
        return running.result()
    finally:
        await _cancel(running)
        await _cancel(gone)


class EventStream(Response):
    """Streams `first` and then `events`; `close` runs exactly once at the end, however it came."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except (ClientGone, OSError):
            return  # a failed write is the other way to learn that the client went
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async with aclosing(self._events) as events:
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
