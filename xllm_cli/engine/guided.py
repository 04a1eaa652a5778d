"""Sequences whose answers follow a grammar: those that wait for it to compile, and those it may end.

Owns who they are; what a grammar allows is grammar.py's. Knows no plan and no memory.
"""

from __future__ import annotations

from collections.abc import Callable

from xllm_cli.core import Output
from xllm_cli.engine.grammar import Grammars, wait_for
from xllm_cli.engine.sequence import Sequence, refusal

GRAMMAR_SECONDS = 0.005  # the most a step waits for grammars; those that think for longer miss it


class Guided:
    """add() what has a grammar, follow() before every step, forget() what has ended."""

    def __init__(self, grammars: Grammars, schedule: Callable[[Sequence], None]) -> None:
        """`schedule` takes a sequence whose grammar has compiled."""
        self._grammars = grammars
        self._schedule = schedule
        self._sequences: dict[str, Sequence] = {}
        self._compiling: set[str] = set()  # of these, those not scheduled yet

    def __bool__(self) -> bool:
        return bool(self._sequences)

    @property
    def is_compiling(self) -> bool:
        """Some are not scheduled yet: look again soon."""
        return bool(self._compiling)

    def add(self, sequence: Sequence) -> None:
        """Compile the grammar of a newcomer, which is scheduled once that is done."""
        grammar, request_id = sequence.request.sampling.grammar, sequence.request.request_id
        assert grammar is not None
        sequence.guide = self._grammars.start(grammar)
        self._sequences[request_id] = sequence
        self._compiling.add(request_id)

    def forget(self, request_id: str) -> None:
        """It has ended; of one without a grammar nothing is known."""
        if self._sequences.pop(request_id, None) is not None:
            self._compiling.discard(request_id)

    def follow(self) -> list[Output]:
        """Schedule what has compiled; the last outputs of what its grammar ends. What still thinks misses this step."""
        guides = {request_id: sequence.guide for request_id, sequence in self._sequences.items() if sequence.guide}
        wait_for((guide for request_id, guide in guides.items() if request_id not in self._compiling), GRAMMAR_SECONDS)
        outputs: list[Output] = []
        for request_id, guide in guides.items():
            if not guide.settle():
                continue
            sequence = self._sequences[request_id]
            if guide.error is not None:
                outputs.append(refusal(request_id, guide.error))
            elif guide.is_complete:
                outputs.append(sequence.output([], "stop"))
            elif request_id in self._compiling:
                self._compiling.remove(request_id)
                self._schedule(sequence)
        return outputs

    def read_words_from(self, folder: str) -> None:
        """Compile with the tokenizer of this folder from now on, if it has one."""
        self._grammars.move(folder)

    def close(self, *, at_once: bool) -> None:
        """End the threads that compile; `at_once`: those that take long are not waited for."""
        self._grammars.close(*([0.0] if at_once else []))
