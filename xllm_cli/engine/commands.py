"""Commands that change a running engine: taken between steps, answered after the step that carried them out.

Owns what has been asked and not yet answered. Knows no socket.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xllm_cli.core import (
    Command,
    Done,
    Fork,
    Pause,
    Ready,
    Remove,
    Resume,
    SetLimit,
    Sleep,
    Snapshot,
    Trim,
    UpdateWeights,
    Wake,
)
from xllm_cli.engine.sequence import error_info
from xllm_cli.engine.slumber import Bed
from xllm_cli.errors import RequestError

if TYPE_CHECKING:  # it brings torch
    from xllm_cli.engine.engine import Engine
    from xllm_cli.engine.host import Host
    from xllm_cli.engine.leaving import Departure
    from xllm_cli.engine.slices import Sliced

ABSENT = "absent"  # the state of a model that is to be forked


@dataclass(slots=True)
class _Open:
    """A command not answered yet; `waits` says whether it still waits for requests to end."""

    command: Command
    started: float
    physical: int
    before: str
    waits: Callable[[], bool] = lambda: False
    error: RequestError | None = None
    ready: Ready | None = None
    message: str = ""

    def join(self, work: Sliced[Ready] | Sliced[None] | Departure) -> None:
        """It ends with this."""

        def waits() -> bool:
            if not work.is_done:
                return True
            try:
                made = work.result()
            except RequestError as error:
                self.error = error
            else:
                self.ready, self.message = (None, made) if isinstance(made, str) else (made, "")
            return False

        self.waits = waits


class Commands:
    """take() before a step, answers() after it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._open: list[_Open] = []

    def take(self, command: Command) -> None:
        """Change a model, or all; KV pages move with the next step, weights at once."""
        physical = self._host.snapshot().memory.physical
        opened = _Open(command, time.monotonic(), physical, self._state(command))
        self._open.append(opened)
        try:
            self._begin(opened)
        except RequestError as error:
            opened.error = error
        else:
            if opened.before != ABSENT:  # else it is to be forked
                self._host.touch(command.model)

    def _state(self, command: Command) -> str:
        """The state of the model that a command names."""
        try:
            return self._host.engine(command.model).model_state
        except RequestError:
            return ABSENT

    def _begin(self, opened: _Open) -> None:
        host, command = self._host, opened.command
        match command:
            case SetLimit():
                self._set_limit(command)
            case Trim():
                _ = host.engine(command.model).trim(command.bytes) if command.model else host.trim(command.bytes)
            case Sleep(level=level, park=park, mode=mode):
                engine = host.engine(command.model)
                engine.sleep(Bed(level, park), mode)
                opened.waits = lambda: self._falls_asleep(opened, engine)
            case Wake():
                opened.join(host.begin_wake(command.model))
            case Fork(model_path=path, level=level):
                opened.join(host.begin_fork(command.model, path, level))
            case Remove(model=name, mode=mode):
                opened.join(host.begin_remove(name, mode))
            case UpdateWeights(model_path=path):
                opened.join(host.begin_update(command.model, path))
            case Pause():
                self._pause(opened, command)
            case Resume():
                self._resume(command)

    def _set_limit(self, command: SetLimit) -> None:
        if command.model:
            self._host.engine(command.model).set_own_limit(command.bytes)
        else:
            self._host.set_limit(command.bytes)

    def _pause(self, opened: _Open, command: Pause) -> None:
        engines = self._host.engines(command.model)
        for engine in engines:
            engine.pause(command.mode)
        opened.waits = lambda: any(engine.is_running and engine.is_paused for engine in engines)

    def _resume(self, command: Resume) -> None:
        for engine in self._host.engines(command.model):
            engine.resume()

    def answers(self, snapshot: Snapshot) -> list[Done]:
        """What became of the commands taken since the last call; of one that waits for requests, once they ended."""
        due: list[_Open] = []
        waiting: list[_Open] = []
        for opened in self._open:
            (waiting if opened.error is None and opened.waits() else due).append(opened)
        if any(isinstance(opened.command, Sleep | Fork | Remove | UpdateWeights) for opened in due):
            self._host.look()
            snapshot = self._host.snapshot()  # that was just now
        self._open = waiting
        return [self._answer(opened, snapshot) for opened in due]

    def _falls_asleep(self, opened: _Open, engine: Engine) -> bool:
        """Go through with a sleep if nothing runs any more; whether it still waits."""
        try:
            engine.fall_asleep()
        except RequestError as error:
            opened.error = error
        return engine.is_falling_asleep

    def _answer(self, opened: _Open, snapshot: Snapshot) -> Done:
        change, error = opened.physical - snapshot.memory.physical, opened.error
        return Done(
            command_id=opened.command.command_id,
            seconds=time.monotonic() - opened.started,
            snapshot=snapshot,
            freed=max(0, change),
            taken=max(0, -change),
            before=opened.before,
            after=self._state(opened.command),
            error=None if error is None else error_info(error),
            ready=opened.ready,
            message=opened.message,
        )
