"""The server at the other end of two sockets and a death pipe, as the engine sees it.

Owns the sockets and what could not be sent yet. Knows no message's meaning.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path

import msgspec
import zmq

from xllm_cli.core import FromEngine, Heartbeat, ToEngine

log = logging.getLogger("xllm.engine")

HEARTBEAT_SECONDS = 1.0
SEND_QUEUE = 1000  # messages under way before the server counts as not reading


class Parent:
    """The server at the other end of the two sockets and of the death pipe."""

    def __init__(self, runtime_dir: Path, death_fd: int) -> None:
        self._context = zmq.Context()
        self._inbox = self._connect(zmq.PULL, runtime_dir / "to_engine")
        self._outbox = self._connect(zmq.PUSH, runtime_dir / "from_engine")
        self._death_fd = death_fd
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(death_fd, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._unsent: deque[bytes] = deque()
        self._spoke_at = time.monotonic()
        self._stalled_since: float | None = None

    def _connect(self, kind: int, path: Path) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.rcvhwm = 0
        socket.sndhwm = SEND_QUEUE
        socket.linger = 1000
        socket.connect(f"ipc://{path}")
        return socket

    def send(self, message: FromEngine) -> None:
        """Send or queue a message; never waits."""
        self._spoke_at = time.monotonic()
        self._unsent.append(self._encoder.encode(message))
        self._flush()

    def beat(self) -> None:
        """A sign of life, if none was given for a second and the server reads."""
        if not self._unsent and time.monotonic() - self._spoke_at >= HEARTBEAT_SECONDS:
            self.send(Heartbeat())

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._outbox.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                self._stalled_since = self._stalled_since or time.monotonic()
                return
            self._unsent.popleft()
            self._stalled_since = None

    def watch(self, descriptor: int) -> None:
        """Let receive() return when `descriptor` is readable, too."""
        self._poller.register(descriptor, zmq.POLLIN)

    @property
    def stalled_seconds(self) -> float:
        """For how long the server has taken nothing although there is something for it."""
        return time.monotonic() - self._stalled_since if self._stalled_since is not None else 0.0

    def receive(self, timeout: float) -> list[ToEngine | None]:
        """Messages that are there, after at most `timeout` seconds; None in the list means the parent is gone."""
        self._poller.register(self._outbox, zmq.POLLOUT if self._unsent else 0)
        ready = dict(self._poller.poll(round(timeout * 1000)))
        self._flush()
        messages: list[ToEngine | None] = []
        if self._death_fd in ready:
            return [None]
        while self._inbox in ready:
            try:
                messages.append(self._decoder.decode(self._inbox.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
            except msgspec.DecodeError as error:
                log.warning("a message from the server cannot be read and is dropped: %s", error)
        return messages

    def close(self) -> None:
        """Send what is queued, for a second at most, and close."""
        self._context.destroy(linger=1000)
