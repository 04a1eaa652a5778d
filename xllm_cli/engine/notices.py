"""Log lines about shortage: said when the cause changes, and once in a while for the same, however often it bites.

Owns when to speak; what there is to say is the caller's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

QUIET_SECONDS = 30.0
FLAP_SECONDS = 1.0  # the least between two causes that take turns
log = logging.getLogger("xllm.engine")


@dataclass(slots=True)
class _Topic:
    cause: str
    said_at: float
    unsaid: int = 0


class Notices:
    """One topic, such as "growth", has one cause at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._topics: dict[str, _Topic] = {}

    def say(self, topic: str, cause: str, message: str, *values: object, level: int = logging.INFO) -> None:
        """Log `message % values` if the topic's cause is new or was last said half a minute ago."""
        now, known = self._clock(), self._topics.get(topic)
        if known is not None and now - known.said_at < (QUIET_SECONDS if known.cause == cause else FLAP_SECONDS):
            known.unsaid += 1
            return
        if known is not None and known.unsaid:
            message, values = message + " (%d more since the last line)", (*values, known.unsaid)
        self._topics[topic] = _Topic(cause, now)
        log.log(level, message, *values)
