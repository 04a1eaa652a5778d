"""What a CacheManager may be told beyond its spec and limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """`padding` keeps block 0 for padding rows. `lookahead` is 1 with MTP (see prefix.KeyMaker).

    `state_bytes` are resident and outside the pages. `clock` gives seconds, the `now` of every call. `stamps` rise from
    plan to plan and date the use of blocks: caches that share them have one order of eviction.
    """

    padding: bool = False
    lookahead: int = 0
    state_bytes: int = 0
    clock: Callable[[], float] = time.monotonic
    stamps: Iterator[int] = field(default_factory=lambda: count(1))
