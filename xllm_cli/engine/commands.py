"""Commands that change a running engine: taken between steps, answered after the step that carried them out.

Owns what has been asked and not yet answered. Knows no socket.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xllm_cli.core import Command, Done, SetLimit, Sleep, Snapshot, Trim, Wake
from xllm_cli.engine.sequence import error_info
from xllm_cli.engine.slumber import Bed
from xllm_cli.errors import RequestError

if TYPE_CHECKING:  # it brings torch
    from xllm_cli.engine.engine import Engine


@dataclass(slots=True)
class _Open:
    """A command not answered yet; `is_waiting` for requests to end."""

    command: Command
    started: float
    physical: int
    before: str
    is_waiting: bool = False
    error: RequestError | None = None


class Commands:
    """take() before a step, answers() after it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: list[_Open] = []

    def take(self, command: Command) -> None:
        """Change the engine; KV pages move with the next step, weights at once."""
        engine = self._engine
        opened = _Open(command, time.monotonic(), engine.snapshot().memory.physical, engine.model_state)
        self._open.append(opened)
        try:
            self._begin(command)
        except RequestError as error:
            opened.error = error
        opened.is_waiting = isinstance(command, Sleep) and opened.error is None and engine.is_falling_asleep

    def _begin(self, command: Command) -> None:
        match command:
            case SetLimit(bytes=nbytes):
                self._engine.set_limit(nbytes)
            case Trim(bytes=nbytes):
                self._engine.trim(nbytes)
            case Sleep(level=level, park=park, mode=mode):
                self._engine.sleep(Bed(level, park), mode)
            case Wake():
                self._engine.wake()

    def answers(self, snapshot: Snapshot) -> list[Done]:
        """What became of the commands taken since the last call; of one that waits for requests, once they ended."""
        for opened in self._open:
            if opened.is_waiting:
                snapshot = self._go_on(opened, snapshot)
        answers = [self._answer(opened, snapshot) for opened in self._open if not opened.is_waiting]
        self._open = [opened for opened in self._open if opened.is_waiting]
        return answers

    def _go_on(self, opened: _Open, snapshot: Snapshot) -> Snapshot:
        try:
            self._engine.fall_asleep()
        except RequestError as error:
            opened.error = error
        opened.is_waiting = self._engine.is_falling_asleep
        return snapshot if opened.is_waiting else self._engine.snapshot()

    def _answer(self, opened: _Open, snapshot: Snapshot) -> Done:
        change, error = opened.physical - snapshot.memory.physical, opened.error
        return Done(
            command_id=opened.command.command_id,
            seconds=time.monotonic() - opened.started,
            snapshot=snapshot,
            freed=max(0, change),
            taken=max(0, -change),
            before=opened.before,
            after=self._engine.model_state,
            error=None if error is None else error_info(error),
        )
