"""The loop of an engine process: messages in, a step, messages out.

Knows the order of things and nothing of what a step does. The engine is stepped even with nothing to run: memory is
looked at, what is due goes back, neighbours are answered.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from xllm_cli.core import Abort, Heartbeat, Request, SetLimit, Shutdown, Sleep, StepEvents, ToEngine, Trim, Wake
from xllm_cli.engine.commands import Commands
from xllm_cli.engine.exchange import Exchange
from xllm_cli.engine.parent import Parent
from xllm_cli.errors import RequestError

if TYPE_CHECKING:  # it brings torch
    from xllm_cli.engine.engine import Engine

IDLE_POLL_SECONDS = 1.0  # with nothing due the loop still looks up once a second
HEARTBEAT_SECONDS = 1.0  # and says so, unless it has said something else
STALL_SECONDS = 10.0  # how long a server may read nothing until its streams are ended
NOT_READ = RequestError(
    f"the server did not take this answer for {STALL_SECONDS:g} s", status=500, code="answer_not_read"
)


class Loop:
    """One engine, one server, and perhaps neighbours."""

    def __init__(self, engine: Engine, parent: Parent, exchange: Exchange | None = None) -> None:
        """`exchange` None: no neighbour is asked or answered."""
        self._engine = engine
        self._parent = parent
        self._exchange = exchange
        self._commands = Commands(engine)
        self._last: StepEvents | None = None
        self._spoke_at = time.monotonic()
        if exchange is not None:
            parent.watch(exchange.fileno())

    def run(self) -> None:
        """Step until the parent says Shutdown or is gone."""
        while self._read():
            events = self._step()
            if self._parent.stalled_seconds >= STALL_SECONDS and self._engine.has_work:
                events = StepEvents(events.outputs + self._engine.abort_all(NOT_READ), self._engine.snapshot())
            self._tell(events)

    def _read(self) -> bool:
        """Take every message that is there, after at most the time until something is due; False: it is the end."""
        due = self._engine.seconds_until_due()
        messages = self._parent.receive(IDLE_POLL_SECONDS if due is None else min(due, IDLE_POLL_SECONDS))
        return all([self._take(message) for message in messages])

    def _take(self, message: ToEngine | None) -> bool:
        match message:
            case None | Shutdown():
                return False
            case Request():
                refused = self._engine.submit(message)
                if refused is not None:
                    self._parent.send(StepEvents([refused]))
            case Abort(request_id):
                self._engine.abort(request_id)
            case SetLimit() | Trim() | Sleep() | Wake():
                self._commands.take(message)
        return True

    def _step(self) -> StepEvents:
        if self._exchange is None:
            return self._engine.step()
        self._exchange.give()
        events = self._engine.step()
        assert events.snapshot is not None
        self._exchange.settle(events.snapshot)
        return events

    def _tell(self, events: StepEvents) -> None:
        """The step's outputs, or at least news of the state; if there are none, now and then a sign of life."""
        stalled = bool(self._parent.stalled_seconds)
        is_news = not stalled and (self._last is None or events.snapshot != self._last.snapshot)
        if events.outputs or is_news:
            self._parent.send(events)
            self._last, self._spoke_at = events, time.monotonic()
        elif not stalled and time.monotonic() - self._spoke_at >= HEARTBEAT_SECONDS:
            self._parent.send(Heartbeat())
            self._spoke_at = time.monotonic()
        assert events.snapshot is not None
        for answer in self._commands.answers(events.snapshot):
            self._parent.send(answer)
