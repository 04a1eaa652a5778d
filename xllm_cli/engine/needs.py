"""What an engine lacks of memory, and what of its own would go first: what others, in its pool or on its device, ask
before they give.

Reads the books after a step; changes nothing.
"""

from __future__ import annotations

from xllm_cli.cache.manager import CacheManager
from xllm_cli.engine.scheduler import Scheduler
from xllm_cli.engine.slumber import Slumber


class Needs:
    """Bytes unless named otherwise; times are in seconds of the engine's clock."""

    def __init__(self, cache: CacheManager, scheduler: Scheduler, slumber: Slumber) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._slumber = slumber

    @property
    def of_pool(self) -> int:
        """What the last plan, or a wake-up for a request, lacked and another model of the pool may have; 0 if nothing.
        A limit of this model alone is nobody else's business, and after a failed map nothing grows for a moment."""
        if self._slumber.is_waking:
            return 0  # it takes what is there now
        if self._slumber.is_asleep:
            return self._slumber.missing if self._slumber.put_off_by is not None and self._has_requests else 0
        short, room = self._scheduler.short_bytes, self._cache.headroom()
        if not short or self._cache.growth_is_closed or self._cache.is_at_own_limit:
            return 0
        return max(self._cache.page_bytes, short - room.bytes)

    def of_device(self, now: float) -> int:
        """What the last plan, or a wake-up, lacked of the device's free memory; 0 if nothing that others hold."""
        short = self._scheduler.short_bytes
        if not short or self._slumber.is_asleep:
            return self._slumber.missing_bytes(now)
        if not self._lacks_free_memory:
            return 0
        return max(self._cache.page_bytes, short - self._cache.headroom().bytes)

    @property
    def ahead(self) -> int:
        """What the next plan may take beyond the free memory: prefixes would go for it. 0 if others hold nothing."""
        if not self._has_requests or not self._lacks_free_memory:
            return 0
        wanted, page = self._scheduler.blocks_ahead() * self._cache.spec.bytes_per_block, self._cache.page_bytes
        pages = wanted // page + 1 + len(self._cache.spec.tensors) if wanted else 0  # blocks end somewhere in theirs
        return max(0, (pages - self._cache.headroom().bytes // page) * page - self._cache.bands()["kv_spare"])

    @property
    def of_weights(self) -> int:
        """What the last wake-up lacked; 0 if it went well."""
        return self._slumber.missing

    @property
    def is_tight_to_wake(self) -> bool:
        """It is being woken, and nobody should take much of what is free meanwhile."""
        return self._slumber.is_waking and self._slumber.is_tight()

    @property
    def waits_since(self) -> float | None:
        """When the head of the queue came; None if nobody waits."""
        waiting = self._scheduler.waiting
        return waiting[0].queued_at if waiting else None

    @property
    def oldest_idle_at(self) -> float | None:
        """When the prefix that would go first was last used; None if no block is idle."""
        return self._cache.oldest_idle_at

    @property
    def _has_requests(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def _lacks_free_memory(self) -> bool:
        """What limits growth is the device's free memory, and others hold some of it."""
        seen = self._cache.observations[0]
        return self._cache.headroom().limited_by == "free_memory" and seen.total - seen.free > seen.owned
