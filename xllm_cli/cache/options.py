"""What a CacheManager may be told beyond its spec and limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """`padding` keeps block 0 for padding rows. `lookahead` is 1 with MTP (see prefix.KeyMaker).

    `state_bytes` are resident and outside the pages. `clock` gives seconds, the `now` of every call.
    """

    padding: bool = False
    lookahead: int = 0
    state_bytes: int = 0
    clock: Callable[[], float] = time.monotonic
