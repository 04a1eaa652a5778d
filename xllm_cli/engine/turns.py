"""Whose step comes next where several models share a device: time, not steps, is what each gets the same of.

Start-time fair queueing: every model has a clock that its steps move on, and whoever is furthest behind goes next. Who
comes back after a rest starts where the others are: time not used is not saved up. Owns these clocks and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)


class Turns(Generic[Who]):
    """next() → its step → ran(), again and again."""

    def __init__(self) -> None:
        self._clocks: dict[Who, float] = {}
        self._present = 0.0  # where the clocks of those who run are, at least
        self._ready: frozenset[Who] = frozenset()

    def next(self, ready: Collection[Who]) -> Who:
        """Of these, who have something to run, the one that has had the least."""
        for who in ready:
            if who not in self._ready:
                self._clocks[who] = max(self._clocks.get(who, 0.0), self._present)
        self._ready = frozenset(ready)
        chosen = min(ready, key=self._clocks.__getitem__)
        self._present = self._clocks[chosen]
        return chosen

    def ran(self, who: Who, seconds: float) -> None:
        """Its step took so long."""
        self._clocks[who] = self._clocks.get(who, self._present) + seconds

    def forget(self, who: Who) -> None:
        """It never runs again."""
        self._clocks.pop(who, None)
        self._ready -= {who}
