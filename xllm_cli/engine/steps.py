"""What is stepped while it has work: an engine, or a host of several. Knows neither."""

from __future__ import annotations

import time
from typing import Protocol

LONGEST_REST_SECONDS = 0.05  # memory may come at any time, and nobody tells who waits for it


class Steps(Protocol):
    """step() … rest() …, by whoever has nothing else to wait for."""

    @property
    def has_work(self) -> bool:
        """A request is running or waiting."""
        ...

    def seconds_until_due(self) -> float | None:
        """How long nothing is due: 0 while rows run, None if nothing is before a message comes."""
        ...

    def rest(self) -> None:
        """Sleep until the next step is due; not at all while rows run or nothing is asked for."""
        if self.has_work:
            time.sleep(min(self.seconds_until_due() or 0.0, LONGEST_REST_SECONDS))
