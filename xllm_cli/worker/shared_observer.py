"""One observer for all models of a process: it is one memory that their steps need, one after the other.

Owns nothing. Knows no model.
"""

from __future__ import annotations

from xllm_cli.worker.memory import MemoryObserver


class SharedObserver:
    """The observer of another model of the same process: what one model's steps need, the others' growth leaves them,
    too. Whoever opened it closes it."""

    def __init__(self, observer: MemoryObserver) -> None:
        self.begin_step = observer.begin_step
        self.observe = observer.observe
        self.relieve = observer.relieve
        self.exhausted = observer.exhausted

    def close(self) -> None:
        """See MemoryObserver: nothing is its own."""
