"""The API process's end of the sockets, with the engine's end held by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from xllm_cli.core import (
    Abort,
    Command,
    Counters,
    ErrorInfo,
    Fatal,
    Fork,
    FromEngine,
    Heartbeat,
    Loading,
    Output,
    Ready,
    Request,
    SamplingParams,
    Shutdown,
    Snapshot,
    StepEvents,
    ToEngine,
    Trim,
    VmmReport,
)
from xllm_cli.errors import EngineDead, RequestError
from xllm_cli.server.engine_client import EngineClient

DEADLINE = 5.0


class Engine:
    """The other end."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.asyncio.Context()
        self.inbox, self.outbox = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        self.inbox.connect(f"ipc://{folder}/to_engine")
        self.outbox.connect(f"ipc://{folder}/from_engine")

    async def say(self, message: FromEngine) -> None:
        await self.outbox.send(msgspec.msgpack.encode(message))

    async def hear(self) -> Any:
        return msgspec.msgpack.decode(await self.inbox.recv(), type=ToEngine)


def run(folder: Path, scenario: Callable[[EngineClient, Engine], Awaitable[None]]) -> None:
    """Run a scenario with both ends connected and the client receiving."""

    async def main() -> None:
        client, engine = EngineClient(folder), Engine(folder)
        receiving = asyncio.ensure_future(client.receive())
        try:
            await engine.say(Loading("connecting", 0.0))
            await client.changed.wait()
            client.changed.clear()
            await scenario(client, engine)
        finally:
            receiving.cancel()
            await asyncio.wait({receiving})
            engine.context.destroy(linger=0)
            client.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE))


def request(request_id: str) -> Request:
    return Request(request_id=request_id, prompt_ids=[1], sampling=SamplingParams())


def snapshot(steps: int) -> Snapshot:
    return Snapshot(memory=VmmReport(), counters=Counters(steps=steps))


def test_outputs_reach_their_queue_with_the_snapshot_of_their_step(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, engine: Engine) -> None:
        queue, other = client.submit([request("a"), request("b")]), client.submit([request("c")])
        assert [(await engine.hear()).request_id for _ in range(3)] == ["a", "b", "c"]
        outputs = [Output(request_id=name, finish="stop") for name in ("b", "nobody", "c", "a")]
        await engine.say(StepEvents(outputs=outputs, snapshot=snapshot(7)))
        assert [(await queue.get()).request_id for _ in range(2)] == ["b", "a"]
        assert client.snapshot is not None and client.snapshot.counters.steps == 7
        assert (await other.get()).request_id == "c"

    run(tmp_path, scenario)


def test_an_abort_is_sent_once_and_only_for_what_is_open(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, engine: Engine) -> None:
        queue = client.submit([request("a"), request("b")])
        await engine.say(StepEvents(outputs=[Output(request_id="a", finish="length")]))
        await queue.get()
        client.abort(["a", "b", "b", "never"])
        client.shutdown()
        heard = [await engine.hear() for _ in range(4)]
        assert heard[2:] == [Abort("b"), Shutdown()]

    run(tmp_path, scenario)


def test_fail_all_ends_every_open_request(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, engine: Engine) -> None:
        queue = client.submit([request("a"), request("b")])
        client.fail_all(ErrorInfo("gone", 503, "engine_dead"))
        assert {(await queue.get()).request_id for _ in range(2)} == {"a", "b"}
        assert client.silent_seconds() == 0

    run(tmp_path, scenario)


READY = Ready(
    model_id="m", architecture="A", dtype="float32", max_model_len=8, vocab_size=8, eos_token_ids=(), capacity_tokens=8,
    snapshot=snapshot(0),
)  # fmt: skip


def test_silence_counts_once_the_engine_serves_and_a_heartbeat_ends_it(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, engine: Engine) -> None:
        await asyncio.sleep(0.1)
        assert client.silent_seconds() == 0
        await engine.say(READY)
        await client.changed.wait()
        await asyncio.sleep(0.2)
        assert client.silent_seconds() >= 0.2
        await engine.say(Heartbeat())
        while client.silent_seconds() > 0.1:
            await asyncio.sleep(0.01)

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("command", "counts"), [(Fork(command_id="c", model="b", model_path="/b"), False), (Trim("c"), True)]
)
def test_while_a_checkpoint_may_be_read_silence_is_work(tmp_path: Path, command: Command, counts: bool) -> None:
    async def scenario(client: EngineClient, engine: Engine) -> None:
        await engine.say(READY)
        await client.changed.wait()
        waiting = asyncio.ensure_future(client.command(command, 0.3))
        await asyncio.sleep(0.2)
        assert (client.silent_seconds() > 0) == counts
        with pytest.raises(RequestError, match="has not answered for"):
            await waiting
        assert client.silent_seconds() >= 0.3, "it is as silent as ever, and nobody waits any longer"

    run(tmp_path, scenario)


def test_every_snapshot_is_told_of(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, engine: Engine) -> None:
        seen: list[int] = []
        client.on_snapshot = lambda snapshot: seen.append(snapshot.counters.steps)
        for steps in (1, 2):
            await engine.say(StepEvents(outputs=[], snapshot=snapshot(steps)))
        await engine.say(StepEvents(outputs=[]))
        while len(seen) < 2:
            await asyncio.sleep(0.01)
        assert seen == [1, 2]

    run(tmp_path, scenario)


@pytest.mark.parametrize("frame", [b"", b"\xc1", msgspec.msgpack.encode({"type": "no such"}), b"\x80" * 1000])
def test_a_message_that_cannot_be_read_is_the_end(tmp_path: Path, frame: bytes) -> None:
    async def scenario(client: EngineClient, engine: Engine) -> None:
        receiving = asyncio.ensure_future(client.receive())
        await engine.outbox.send(frame)
        with pytest.raises(EngineDead, match="cannot be read"):
            await receiving

    async def main() -> None:
        client, engine = EngineClient(tmp_path), Engine(tmp_path)
        try:
            await scenario(client, engine)
        finally:
            engine.context.destroy(linger=0)
            client.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE))


def test_the_last_words_are_kept(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, engine: Engine) -> None:
        await engine.say(Fatal("rank 1 was lost", 75))
        await client.changed.wait()
        assert client.failure == Fatal("rank 1 was lost", 75)

    run(tmp_path, scenario)


def test_without_an_engine_a_request_is_refused(tmp_path: Path) -> None:
    client = EngineClient(tmp_path)
    with pytest.raises(RequestError) as caught:
        client.submit([request("a")])
    assert (caught.value.status, caught.value.code) == (503, "engine_dead")
    client.close()


def test_the_sockets_are_ours_alone(tmp_path: Path) -> None:
    client = EngineClient(tmp_path)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    client.close()
