"""SIGINT and SIGTERM: the first asks a serving process for a clean stop, the second ends it at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Installed by the constructor (main thread), so that a signal while loading is not lost.

    Until `drains` is set there is nothing to wait for, and the first signal already ends the process at once, with 0.
    `last_words` runs before an immediate end; it must not block.
    """

    def __init__(self) -> None:
        self.last_words: Callable[[], None] = lambda: None
        self.drains = False
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}

    async def wait(self) -> None:
        """Return once a stop was asked for, also if that was before this call."""
        self._loop = asyncio.get_running_loop()
        if self._stopping:
            return
        await self._event.wait()

    def restore(self) -> None:
        """Put back the handlers there were."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._stopping or not self.drains:
            self.last_words()
            os._exit(128 + number if self._stopping else 0)
        self._stopping = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._event.set)
