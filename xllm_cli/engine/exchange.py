"""Memory that changes hands between the engines of a device: this one's part, once before and once after each step.

Joins Host and Neighbours; owns the questions that a step is about to answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xllm_cli.core import Snapshot
from xllm_cli.neighbours.peers import Neighbours, Question

if TYPE_CHECKING:  # it brings torch
    from xllm_cli.engine.host import Host


class Exchange:
    """give() before a step, settle() after it."""

    def __init__(self, host: Host, neighbours: Neighbours) -> None:
        self._host = host
        self._neighbours = neighbours
        self._questions: list[Question] = []
        self._physical = 0
        self._evicted = 0
        host.report_neighbours(neighbours.counters)

    def fileno(self) -> int:
        """Readable when a neighbour asks or answers: then a step is due."""
        return self._neighbours.fileno()

    def give(self) -> None:
        """Let what neighbours ask for leave with the next step: idle cached blocks and spares, never what a request
        uses. If they gave, look at the device at once."""
        self._questions, given = self._neighbours.receive()
        if given:
            self._host.look()
        if self._questions:
            self._physical = self._host.snapshot().memory.physical
            self._host.trim(sum(question.bytes for question in self._questions))

    def settle(self, snapshot: Snapshot) -> None:
        """Answer with what really left, show the state, and ask for what is short."""
        freed = self._physical - snapshot.memory.physical
        for question in self._questions:
            share = max(0, min(question.bytes, freed))
            freed -= share
            self._neighbours.answer(question, share)
        self._questions = []
        short = self._host.short_bytes
        self._neighbours.publish(snapshot, is_giving=self._host.gives_back, short=short)
        if short:
            self._neighbours.ask(short)
        else:
            self._ask_instead_of_evicting(snapshot)

    def _ask_instead_of_evicting(self, snapshot: Snapshot) -> None:
        """Prefixes had to go here for want of the device's memory: what a resting neighbour remembers is older. As much
        of it as went here would keep the next ones."""
        evicted = snapshot.counters.evicted_blocks
        went, self._evicted = evicted - self._evicted, evicted
        if went > 0 and snapshot.num_running and self._host.lacks_free_memory:
            block_bytes = sum(int(tensor["bytes_per_block"]) for tensor in snapshot.memory.tensors)
            self._neighbours.ask(went * block_bytes, only_resting=True)

    def close(self) -> None:
        """Leave."""
        self._neighbours.close()
