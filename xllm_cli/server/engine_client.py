"""The API process's end of the two sockets to the engine: requests out, outputs in, the last snapshot kept.

Owns the sockets and which request belongs to whom. Knows nothing of HTTP, text or the engine's process.
All methods run on the event loop's thread; nothing here waits except `receive`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from xllm_cli.core import (
    Abort,
    Command,
    Done,
    ErrorInfo,
    Fatal,
    Fork,
    FromEngine,
    Heartbeat,
    Loading,
    Output,
    Ready,
    Request,
    Shutdown,
    Snapshot,
    StepEvents,
    ToEngine,
    UpdateWeights,
    Wake,
)
from xllm_cli.errors import EngineDead, RequestError

logger = logging.getLogger(__name__)
READING = (Fork, UpdateWeights, Wake)  # these may read a whole checkpoint


class EngineClient:
    """Requests to the engine and their outputs.

    `loading` is the last phase heard, `ready` the engine's description once it serves, `snapshot` its last state,
    `failure` why it is gone. `changed` is set whenever one of them but the snapshot changes; `on_snapshot` is called
    with every new one, `on_map` with the seconds of a step's page changes.
    """

    def __init__(self, folder: Path) -> None:
        """Bind both sockets in `folder` (0700, ours); the engine may connect before or after."""
        self._context = zmq.Context()
        self._requests = self._bind(zmq.PUSH, folder / "to_engine")
        self._events = self._bind(zmq.PULL, folder / "from_engine")
        self._encoder = msgspec.msgpack.Encoder()
        self._queues: dict[str, asyncio.Queue[Output]] = {}
        self._commands: dict[str, asyncio.Future[Done]] = {}
        self._num_reading = 0
        self._heard = time.monotonic()
        self._loading_since = time.monotonic()
        self.loading: Loading | None = None
        self.ready: Ready | None = None
        self.snapshot: Snapshot | None = None
        self.failure: Fatal | None = None
        self.changed = asyncio.Event()
        self.on_snapshot: Callable[[Snapshot], None] = lambda snapshot: None
        self.on_map: Callable[[float], None] = lambda seconds: None

    def _bind(self, kind: int, path: Path) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{path}")
        path.chmod(0o600)
        return socket

    async def receive(self) -> None:
        """Read messages until cancelled or the engine said Fatal. EngineDead on a message that cannot be read."""
        socket = zmq.asyncio.Socket.from_socket(self._events)
        decoder = msgspec.msgpack.Decoder(FromEngine)
        while self.failure is None:
            frame = await socket.recv()
            try:
                message = decoder.decode(frame)
            except msgspec.DecodeError as error:
                raise EngineDead(f"the engine sent a message that cannot be read: {error}") from error
            self._heard = time.monotonic()
            self._dispatch(message)

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Heartbeat():
                return
            case StepEvents(outputs=outputs, snapshot=snapshot, map_seconds=map_seconds):
                # The snapshot first: what is read after an answer includes that answer's step.
                if snapshot is not None:
                    self._see(snapshot)
                if map_seconds is not None:
                    self.on_map(map_seconds)
                for output in outputs:
                    self._route(output)
                return
            case Done():
                self._see(message.snapshot)
                self._settle(message)
                return
            case Loading(phase=phase, seconds=seconds):
                logger.info("loading: %s, %.2f s after the engine's start", phase, seconds)
                self.loading = message
                self._loading_since = time.monotonic() - seconds
            case Ready():
                self.ready, self.snapshot = message, message.snapshot
            case Fatal():
                self.failure = message
        self.changed.set()

    def _see(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.on_snapshot(snapshot)

    def _settle(self, done: Done) -> None:
        waiting = self._commands.pop(done.command_id, None)  # None: nobody waits any longer
        if waiting is not None and not waiting.done():
            waiting.set_result(done)

    def _route(self, output: Output) -> None:
        queue = self._queues.get(output.request_id)
        if queue is None:
            return  # aborted by us; the engine had not read that yet
        queue.put_nowait(output)
        if output.finish is not None or output.error is not None:
            del self._queues[output.request_id]

    def submit(self, requests: Iterable[Request]) -> asyncio.Queue[Output]:
        """Send requests; their outputs arrive in one queue. The last output of each has `finish` or `error`."""
        queue: asyncio.Queue[Output] = asyncio.Queue()
        for request in requests:
            if not self._send(request):
                raise RequestError("the engine is gone", status=503, code="engine_dead")
            self._queues[request.request_id] = queue
        return queue

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; ids that have ended are a no-op."""
        for request_id in request_ids:
            if self._queues.pop(request_id, None) is not None:
                self._send(Abort(request_id))

    async def command(self, command: Command, seconds: float) -> Done:
        """Have the engine carry something out. RequestError 503 if it is gone or does not answer in so many seconds:
        it may still do it then."""
        answered: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._commands[command.command_id] = answered
        is_reading = isinstance(command, READING)
        self._num_reading += is_reading
        try:
            if not self._send(command):
                raise RequestError("the engine is gone", status=503, code="engine_dead")
            async with asyncio.timeout(seconds):
                return await answered
        except TimeoutError as error:
            text = f"the engine has not answered for {seconds:g} s; it is in a long step or stuck, see /livez"
            raise RequestError(text, status=503, code="engine_busy", retry_after=1) from error
        finally:
            self._commands.pop(command.command_id, None)
            self._num_reading -= is_reading

    def fail_all(self, error: ErrorInfo) -> None:
        """End every open request and command with an error; the engine is told to forget the requests."""
        for answered in self._commands.values():
            if not answered.done():
                refused = RequestError(error.message, status=error.status, code=error.code)
                answered.set_exception(refused)
        for request_id, queue in list(self._queues.items()):
            queue.put_nowait(Output(request_id=request_id, finish="error", error=error))
        self.abort(list(self._queues))

    def shutdown(self) -> None:
        """Ask the engine to end."""
        self._send(Shutdown())

    def loading_seconds(self) -> float:
        """Seconds since the engine's start, as far as it has told; before that, since ours."""
        return time.monotonic() - self._loading_since

    def silent_seconds(self) -> float:
        """Seconds since the engine said anything; 0 while it loads, which is the start-up probe's business, and while
        it may read a checkpoint by order: how long that may take is the order's business."""
        return 0.0 if self.ready is None or self._num_reading else time.monotonic() - self._heard

    def close(self) -> None:
        """Close the sockets; messages not yet sent are dropped."""
        self._requests.close()
        self._events.close()
        self._context.term()

    def _send(self, message: ToEngine) -> bool:
        try:
            self._requests.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # without a high-water mark this means: nobody is connected
            return False
        return True
