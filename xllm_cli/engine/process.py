"""The engine as a process: messages in, steps, messages out.

    python -m xllm_cli.engine.process --runtime_dir DIR --death_fd N

DIR holds config.json and the two sockets the server bound. One thread owns the engine, one poller serves inbox and
death pipe. Sends never block: a server that takes nothing for ten seconds has its streams ended. A second thread only
watches the death pipe, for when the first is deep in a load or in a long step.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq
from setproctitle import setproctitle

from xllm_cli import logs
from xllm_cli.core import Abort, Fatal, FromEngine, Heartbeat, Loading, Request, Shutdown, StepEvents, ToEngine
from xllm_cli.errors import RequestError, XllmError
from xllm_cli.flags import Config

if TYPE_CHECKING:
    from xllm_cli.engine.engine import Engine

log = logging.getLogger("xllm.engine")

IDLE_POLL_SECONDS = 1.0  # with nothing due the loop still looks up once a second
HEARTBEAT_SECONDS = 1.0  # and says so, unless it has said something else
SEND_QUEUE = 1000  # messages under way before the server counts as not reading
STALL_SECONDS = 10.0  # and how long until its streams are ended
ORPHAN_SECONDS = 2.0  # what the loop has to end by itself once the server is gone
NOT_READ = RequestError(
    f"the server did not take this answer for {STALL_SECONDS:g} s", status=500, code="answer_not_read"
)
_PR_SET_PDEATHSIG = 1


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
        self._unsent.append(self._encoder.encode(message))
        self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._outbox.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                self._stalled_since = self._stalled_since or time.monotonic()
                return
            self._unsent.popleft()
            self._stalled_since = None

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


def serve(engine: Engine, parent: Parent) -> None:
    """Step until the parent says Shutdown or is gone."""
    last: StepEvents | None = None
    spoke = time.monotonic()
    while True:
        due = engine.seconds_until_due()
        for message in parent.receive(IDLE_POLL_SECONDS if due is None else min(due, IDLE_POLL_SECONDS)):
            match message:
                case None | Shutdown():
                    return
                case Request():
                    refused = engine.submit(message)
                    if refused is not None:
                        parent.send(StepEvents([refused]))
                case Abort(request_id):
                    engine.abort(request_id)
        events = engine.step()
        if parent.stalled_seconds >= STALL_SECONDS and engine.has_work:
            events = StepEvents(events.outputs + engine.abort_all(NOT_READ), engine.snapshot())
        is_news = not parent.stalled_seconds and (last is None or events.snapshot != last.snapshot)
        if events.outputs or is_news:
            parent.send(events)
            last, spoke = events, time.monotonic()
        elif not parent.stalled_seconds and time.monotonic() - spoke >= HEARTBEAT_SECONDS:
            parent.send(Heartbeat())
            spoke = time.monotonic()


def run(runtime_dir: Path, death_fd: int) -> int:
    """Load, say Ready, serve. The exit code of the process."""
    started = time.monotonic()
    config = Config.model_validate_json((runtime_dir / "config.json").read_text())
    logs.set_up(config.service)
    parent = Parent(runtime_dir, death_fd)

    def progress(phase: str) -> None:
        parent.send(Loading(phase, time.monotonic() - started))

    try:
        progress("importing torch")
        from xllm_cli.engine.host import build_engine  # brings torch: seconds, and the server should hear of them

        engine, ready = build_engine(config, progress)
        parent.send(ready)
        serve(engine, parent)
        engine.close()
        return 0
    except XllmError as error:
        parent.send(Fatal(str(error), error.exit_code))
        return error.exit_code
    except Exception as error:
        log.exception("the engine failed")
        parent.send(Fatal(f"{type(error).__name__}: {error}", 1))
        return 1
    finally:
        parent.close()


def _die_with_parent() -> None:
    """SIGKILL when the parent dies, also during a long load; the death pipe covers the race before this call."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _wait_politely() -> None:
    """Short spins at the barriers of the arithmetic threads, before torch loads OpenMP.

    By default they spin for milliseconds, and beside one other busy process a step of 17 ms then takes 76 ms, 600 at
    times; with short spins 37. Alone it costs about 2 ms. Whoever sets one of these variables decides.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def _load_no_extension() -> None:
    """Keep `import torch` from importing device packages by itself: one whose vendor's libraries are missing makes it
    fail, whatever the device. A device imports its own. Whoever sets the variable decides.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def _end_when_orphaned(death_fd: int) -> None:
    """End the process soon after the server closed the pipe or died, whatever the loop is doing then."""

    def watch() -> None:
        poller = select.poll()
        poller.register(death_fd, select.POLLIN)
        poller.poll()
        time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m xllm_cli.engine.process`."""
    parser = argparse.ArgumentParser(prog="xllm engine")
    parser.add_argument("--runtime_dir", type=Path, required=True)
    parser.add_argument("--death_fd", type=int, required=True)
    arguments = parser.parse_args(argv)
    _die_with_parent()
    _end_when_orphaned(arguments.death_fd)
    _wait_politely()
    _load_no_extension()
    os.set_inheritable(arguments.death_fd, False)
    # the server decides when to end; a terminal's Ctrl-C and `pkill xllm` reach this process too
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setproctitle("xllm engine [rank 0]")
    return run(arguments.runtime_dir, arguments.death_fd)


if __name__ == "__main__":
    sys.exit(main())
