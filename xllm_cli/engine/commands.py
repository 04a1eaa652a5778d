"""Commands that change a running engine: taken between steps, answered after the step that carried them out.

Owns what has been asked and not yet answered. Knows no socket.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from xllm_cli.core import Command, Done, SetLimit, Snapshot

if TYPE_CHECKING:  # it brings torch
    from xllm_cli.engine.engine import Engine


class Commands:
    """take() before a step, answers() after it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: list[tuple[str, float]] = []
        self._physical = 0

    def take(self, command: Command) -> None:
        """Change the engine; pages move with the next step."""
        if not self._open:
            self._physical = self._engine.snapshot().memory.physical
        self._open.append((command.command_id, time.monotonic()))
        if isinstance(command, SetLimit):
            self._engine.set_limit(command.bytes)
        else:
            self._engine.trim(command.bytes)

    def answers(self, snapshot: Snapshot) -> list[Done]:
        """What became of the commands taken since the last call. Of several, the first is said to have freed all."""
        answers: list[Done] = []
        for command_id, started in self._open:
            freed = max(0, self._physical - snapshot.memory.physical) if not answers else 0
            seconds = time.monotonic() - started
            answers.append(Done(command_id=command_id, freed=freed, seconds=seconds, snapshot=snapshot))
        self._open.clear()
        return answers
