"""Memory that changes hands between the engines of a device: this one's part, once before and once after each step.

Joins Host and Neighbours; owns the questions that a step is about to answer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from xllm_cli.core import Snapshot
from xllm_cli.neighbours.peers import Neighbours, Question

if TYPE_CHECKING:  # it brings torch
    from xllm_cli.engine.host import Host


STEPS_UNTIL_ANSWER = 3  # of an engine at rest: blocks that stay may have to be moved together before pages leave


class Exchange:
    """give() before a step, settle() after it."""

    def __init__(self, host: Host, neighbours: Neighbours) -> None:
        self._host = host
        self._neighbours = neighbours
        self._questions: list[Question] = []
        self._physical = self._promised = self._steps = 0  # since the first of the questions
        host.report_neighbours(neighbours.counters)

    def fileno(self) -> int:
        """Readable when a neighbour asks or answers: then a step is due."""
        return self._neighbours.fileno()

    def give(self) -> None:
        """Let what neighbours ask for leave with the next step: idle cached blocks and spares, never what a request
        uses. If they gave, look at the device at once."""
        questions, given = self._neighbours.receive()
        if self._ask_ahead():
            more, late = self._neighbours.await_answers()
            questions += more
            given += late
        if given:
            self._host.look()
        if questions and not self._questions:
            self._physical, self._promised, self._steps = self._host.snapshot().memory.physical, 0, 0
        if questions:
            self._promised += self._host.trim(sum(question.bytes for question in questions))
            self._questions += questions

    def _ask_ahead(self) -> int:
        """Prefixes would go here for want of the device's memory: ask for as much of those who remember what is older,
        before the step that would forget them. Returns the bytes asked for."""
        missing = self._host.ahead_bytes
        if not missing:
            return 0
        oldest = self._host.oldest_idle_at
        return self._neighbours.ask(missing, older_than=time.monotonic() if oldest is None else oldest)

    def settle(self, snapshot: Snapshot) -> None:
        """Answer with what really left, show the state, and ask for what is short."""
        if self._questions:
            self._answer(snapshot)
        short = self._host.short_bytes
        self._neighbours.publish(
            snapshot, is_giving=self._host.gives_back, short=short, oldest_at=self._host.oldest_idle_at
        )
        if short:
            self._neighbours.ask(short)

    def _answer(self, snapshot: Snapshot) -> None:
        """Say what left, once all that was promised has, or will not soon."""
        self._steps += 1
        freed = self._physical - snapshot.memory.physical
        if freed < self._promised and self._steps < STEPS_UNTIL_ANSWER and not snapshot.num_running:
            return
        for question in self._questions:
            share = max(0, min(question.bytes, freed))
            freed -= share
            self._neighbours.answer(question, share)
        self._questions = []

    def close(self) -> None:
        """Leave."""
        self._neighbours.close()
