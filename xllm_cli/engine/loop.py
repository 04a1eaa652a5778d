"""The loop of an engine process: messages in, a step, messages out.

Knows the order of things and nothing of what a step does. The engine is stepped even with nothing to run: memory is
looked at, what is due goes back, neighbours are answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xllm_cli.core import Abort, Request, Shutdown, StepEvents, ToEngine
from xllm_cli.engine.commands import Commands
from xllm_cli.engine.exchange import Exchange
from xllm_cli.engine.parent import Parent
from xllm_cli.errors import RequestError

if TYPE_CHECKING:  # it brings torch
    from xllm_cli.engine.host import Host

IDLE_POLL_SECONDS = 1.0  # with nothing due the loop still looks up once a second
STALL_SECONDS = 10.0  # how long a server may read nothing until its streams are ended
NOT_READ = RequestError(
    f"the server did not take this answer for {STALL_SECONDS:g} s", status=500, code="answer_not_read"
)


class Loop:
    """One host of models, one server, and perhaps neighbours."""

    def __init__(self, host: Host, parent: Parent, exchange: Exchange | None = None) -> None:
        """`exchange` None: no neighbour is asked or answered."""
        self._host = host
        self._parent = parent
        self._exchange = exchange
        self._commands = Commands(host)
        self._last: StepEvents | None = None
        if exchange is not None:
            parent.watch(exchange.fileno())

    def run(self) -> None:
        """Step until the parent says Shutdown or is gone."""
        while self._read():
            events = self._step()
            if self._parent.stalled_seconds >= STALL_SECONDS and self._host.has_work:
                events = StepEvents(events.outputs + self._host.abort_all(NOT_READ), self._host.snapshot())
            self._tell(events)

    def _read(self) -> bool:
        """Take every message that is there, after at most the time until something is due; False: it is the end."""
        due = self._host.seconds_until_due()
        messages = self._parent.receive(IDLE_POLL_SECONDS if due is None else min(due, IDLE_POLL_SECONDS))
        return all([self._take(message) for message in messages])

    def _take(self, message: ToEngine | None) -> bool:
        match message:
            case None | Shutdown():
                return False
            case Request():
                refused = self._host.submit(message)
                if refused is not None:
                    self._parent.send(StepEvents([refused]))
            case Abort(request_id):
                self._host.abort(request_id)
            case _:
                self._commands.take(message)
        return True

    def _step(self) -> StepEvents:
        if self._exchange is None:
            return self._host.step()
        self._exchange.give()
        events = self._host.step()
        assert events.snapshot is not None
        self._exchange.settle(events.snapshot)
        return events

    def _tell(self, events: StepEvents) -> None:
        """The step's outputs, or at least news of the state; if there are none, now and then a sign of life."""
        stalled = bool(self._parent.stalled_seconds)
        is_news = not stalled and (self._last is None or events.snapshot != self._last.snapshot)
        if events.outputs or is_news:
            self._parent.send(events)
            self._last = events
        else:
            self._parent.beat()
        assert events.snapshot is not None
        for answer in self._commands.answers(events.snapshot):
            self._parent.send(answer)
