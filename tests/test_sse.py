"""Event framing and the two ways a client can go, over ASGI's own functions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from xllm_cli.server.sse import ClientGone, EventStream, event, while_connected

Message = dict[str, Any]
DEADLINE = 5.0


class Client:
    """The other end of one ASGI request: stays until `leave`, or fails a write."""

    def __init__(self, break_at: int | None = None) -> None:
        self.sent: list[Message] = []
        self.left = asyncio.Event()
        self.break_at = break_at

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if len(self.sent) == self.break_at:
            raise OSError("broken pipe")
        self.sent.append(message)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))


def test_an_event_is_one_line_of_json() -> None:
    assert event({"a": "x\n\ny é"}) == 'data: {"a":"x\\n\\ny é"}\n\n'.encode()


def test_work_gives_its_result_while_the_client_stays() -> None:
    async def scenario() -> None:
        assert await while_connected(Client().receive, asyncio.sleep(0, "done")) == "done"

    run(scenario)


def test_work_is_cancelled_when_the_client_goes() -> None:
    async def scenario() -> None:
        client, work = Client(), asyncio.ensure_future(asyncio.sleep(DEADLINE * 2))
        asyncio.get_running_loop().call_later(0.01, client.left.set)
        with pytest.raises(ClientGone):
            await while_connected(client.receive, work)
        assert work.cancelled()

    run(scenario)


async def stream_to(client: Client, *, endless: bool) -> list[str]:
    """What happened at the source of a stream, in order."""
    happened: list[str] = []

    async def events() -> AsyncGenerator[bytes]:
        try:
            yield b"2"
            while endless:
                await asyncio.sleep(0.001)
                yield b"x"
        finally:
            happened.append("source ended")

    response = EventStream(b"1", events(), lambda: happened.append("closed"))
    await response({"type": "http"}, client.receive, client.send)
    return happened


def test_a_stream_sends_everything_and_closes_once() -> None:
    async def scenario() -> None:
        client = Client()
        assert await stream_to(client, endless=False) == ["source ended", "closed"]
        assert [message.get("body") for message in client.sent] == [None, b"1", b"2", b""]
        headers = dict(client.sent[0]["headers"])
        assert headers[b"content-type"].startswith(b"text/event-stream") and b"content-length" not in headers

    run(scenario)


def test_a_stream_ends_when_the_client_goes() -> None:
    async def scenario() -> None:
        client = Client()
        asyncio.get_running_loop().call_later(0.01, client.left.set)
        assert await stream_to(client, endless=True) == ["source ended", "closed"]
        assert client.sent[-1]["more_body"]

    run(scenario)


@pytest.mark.parametrize("break_at", [0, 1, 5])
def test_a_stream_ends_when_a_write_fails(break_at: int) -> None:
    async def scenario() -> None:
        happened = await stream_to(Client(break_at), endless=True)
        assert happened[-1] == "closed" and happened.count("closed") == 1
        assert break_at < 3 or "source ended" in happened

    run(scenario)
