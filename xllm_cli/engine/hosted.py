"""One model of a host: its engine, what it shares with the others of the pool, and when it was used.

Owns no decision: those are host.py's and room.py's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from xllm_cli.cache.manager import CacheManager
from xllm_cli.core import Ready
from xllm_cli.engine.engine import Engine
from xllm_cli.engine.start import Built
from xllm_cli.worker.sharing import Loaded, WeightsShare


class HostedModel:
    """A named model. Times are in seconds of the host's clock."""

    def __init__(self, name: str, path: str, built: Built, now: float) -> None:
        self.name = name
        self.path = path
        self.engine: Engine = built.engine
        self.ready: Ready = built.ready
        self.cache: CacheManager = built.cache
        self.form = built.form
        self.loaded: Loaded | None = built.loaded
        self.last_used = now
        self.awake_since = now
        self.refused_until = 0.0  # the device kept its pages: every try to put it to sleep costs its prefixes
        self._was_awake = True
        self.is_leaving = False  # nobody may ask it anything more
        self.stamp_files()

    def stamp_files(self) -> None:
        """Remember the files that the weights came from as they are."""
        self._files = _files(self.path)

    def comes_from(self, path: str) -> bool:
        """Whether its weights are what the files at `path` hold now."""
        return self.is_named_by(path) and _files(path) == self._files

    def is_named_by(self, path: str) -> bool:
        """Whether its weights came from there, whatever is there now."""
        return os.path.realpath(path) == os.path.realpath(self.path)

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in the pool's pages, mapped or set aside, whoever shares them."""
        return 0 if self.loaded is None else self.loaded.weights.mapped_bytes + self.loaded.weights.parked_bytes

    @property
    def kv_in_pool(self) -> int:
        """Bytes of KV in the pool's pages; a physical cache has memory of its own."""
        return self.cache.kv_bytes if self.cache.page_bytes > 1 else 0

    def has_seen(self, now: float) -> None:
        """After a step: when was it used, since when is it awake?"""
        if self.engine.has_work:
            self.last_used = now
        is_awake = self.engine.model_state == "awake"
        if is_awake and not self._was_awake:
            self.awake_since = now
        self._was_awake = is_awake

    def look(self, others: Iterable[HostedModel], joining: int = 0) -> None:
        """See what the others hold by now, and what is free. `joining` bytes are about to be a newcomer's weights."""
        tell(self.cache, others, None if self.loaded is None else self.loaded.weights, joining)
        self.engine.look()

    @property
    def weights_id(self) -> int:
        """The same for all names that share weights."""
        assert self.loaded is not None
        return id(self.loaded.weights.weights)


def tell(cache: CacheManager, others: Iterable[HostedModel], own: WeightsShare | None, joining: int = 0) -> None:
    """Tell a cache what the others hold. Weights that are its `own`, too, are nobody else's."""
    kv, weights = 0, {}
    for other in others:
        kv += other.kv_in_pool
        if other.loaded is not None and (own is None or other.weights_id != id(own.weights)):
            weights[other.weights_id] = other.loaded.weights.claimed_bytes
    cache.set_elsewhere(kv=kv if cache.page_bytes > 1 else 0, weights=sum(weights.values()) + joining)


def _files(path: str) -> list[tuple[str, int, int]]:
    """Name, size and time of change of every file of a checkpoint; none if they cannot be looked at."""
    try:
        found = sorted(each for each in Path(path).iterdir() if each.is_file())
        return [(each.name, (stat := each.stat()).st_size, stat.st_mtime_ns) for each in found]
    except OSError:
        return []
