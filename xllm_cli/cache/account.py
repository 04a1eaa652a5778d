"""The bytes of one cache against its limits: the last observations, what is mapped, and when growth is closed.

Owns the inputs of budget.py over time; the arithmetic is there. Knows neither blocks nor pages.
"""

from __future__ import annotations

from dataclasses import replace

from xllm_cli.cache import budget
from xllm_cli.cache.budget import Headroom, LimitedBy, Limits, Usage
from xllm_cli.core import Observation

FIRST_PAUSE_SECONDS = 0.010
LONGEST_PAUSE_SECONDS = 1.0
BRIEF_PAUSE_SECONDS = 0.5  # up to here all stand still and keep what they have; then somebody gives way


class Account:
    """Observations, limits and usage; `headroom` is worked out again only when one of them changed."""

    def __init__(self, limits: Limits, usage: Usage) -> None:
        self._limits = limits
        self._usage = usage
        self._observations: tuple[Observation, ...] = ()
        self._headroom: Headroom | None = None
        self._growth = 0

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def observations(self) -> tuple[Observation, ...]:
        return self._observations

    @property
    def usage(self) -> Usage:
        return self._usage

    def observe(self, observations: tuple[Observation, ...]) -> None:
        """What every rank saw, after all that was acknowledged so far. The sum is worked out here, once a step, and not
        by whoever takes or gives back a block first."""
        self._observations = observations
        self._use(created=0)
        self.headroom()

    def moved(self, *, kv_mapped: int, created: int) -> None:
        """KV pages are mapped in all, of which `created` bytes more than before (or fewer: that is not counted on)."""
        self._use(kv_mapped=kv_mapped, created=max(0, self._usage.created + created))

    def set_limit(self, limit: int | None) -> None:
        self._limits = replace(self._limits, limit=limit)
        self._headroom = None

    def set_own_limit(self, limit: int | None) -> None:
        self._limits = replace(self._limits, own_limit=limit)
        self._headroom = None

    def set_weights(self, *, mapped: int, on_device: int, asleep: int = 0) -> None:
        """Bytes of weights in the pool's mapped pages, on the device in all, and that a sleeping model will map."""
        self._use(weights_mapped=mapped, weights_on_device=on_device, weights_asleep=asleep)

    def set_elsewhere(self, *, kv: int, weights: int) -> None:
        """Bytes of the pool's pages that other models have."""
        if (kv, weights) != (self._usage.kv_elsewhere, self._usage.weights_elsewhere):
            self._use(kv_elsewhere=kv, weights_elsewhere=weights)

    def _use(self, **changes: int) -> None:
        self._usage = self._usage._replace(**changes)
        self._headroom = None

    def headroom(self) -> Headroom:
        if self._headroom is None:
            room = self._headroom = budget.headroom(self._observations, self._limits, self._usage)
            self._growth = min(room.bytes, -room.deficit) if room.deficit else room.bytes
        return self._headroom

    @property
    def growth(self) -> int:
        """Bytes that KV may grow by; negative: it must shrink by as many. Below the floor of free memory this is the
        deficit, whatever handles are free: they go back to the device."""
        if self._headroom is None:
            self.headroom()
        return self._growth

    def possible(self) -> int:
        """The most KV bytes one request could ever have, besides padding."""
        return max(0, budget.possible(self._observations, self._limits, self._usage)[0])

    def possible_limited_by(self) -> LimitedBy:
        """What keeps possible() from being more."""
        return budget.possible(self._observations, self._limits, self._usage)[1]

    def room_for_weights(self, *, in_arena: bool) -> int:
        """The most bytes of weights that may be mapped besides what is, free memory aside; `in_arena`: the arena caps
        them together with KV."""
        limits, usage = self._limits, self._usage
        caps = [limits.arena_bytes - usage.weights_in_pool - usage.kv_in_pool] if in_arena else []
        if limits.elastic and limits.ratio > 0:
            caps += [int(seen.total * limits.ratio) - seen.owned + seen.free_handles for seen in self._observations]
        return min(caps, default=limits.arena_bytes)

    def explain(self) -> str:
        """The sum behind the headroom."""
        return budget.explain(self.headroom().limited_by, self._observations, self._limits, self._usage)

    @property
    def is_at_own_limit(self) -> bool:
        """The headroom ends at the limit of this model alone."""
        own = self._limits.own_limit
        return own is not None and self.headroom().bytes == own - self._usage.kv_own

    def floor(self) -> int:
        """Bytes that growth leaves free whatever runs: the most over ranks."""
        return max((budget.floor_bytes(seen.total, self._limits) for seen in self._observations), default=0)

    def keep_free(self) -> int:
        return budget.keep_free(self._observations, self._limits)


class GrowthGate:
    """Closed after a failed map, for 10 ms doubling to 1 s while maps keep failing; opens by itself.

    `closed_until` is in seconds of the caller's clock, None when open. `is_wary` until a map succeeds again.
    """

    def __init__(self) -> None:
        self.closed_until: float | None = None
        self.is_wary = False
        self._pause = FIRST_PAUSE_SECONDS

    def is_closed(self, now: float) -> bool:
        if self.closed_until is not None and now >= self.closed_until:
            self.closed_until = None
        return self.closed_until is not None

    def opens_soon(self, now: float) -> bool:
        """Closed for a brief while only."""
        return self.is_closed(now) and self.closed_until is not None and self.closed_until - now <= BRIEF_PAUSE_SECONDS

    def close(self, until: float) -> None:
        """Close at least until then."""
        self.closed_until = max(until, self.closed_until or until)

    def failed(self, now: float) -> None:
        """A map failed: close for the current pause, and double the next one."""
        self.close(now + self._pause)
        self.is_wary = True
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    def succeeded(self) -> None:
        """A map succeeded: the next pause is the first again."""
        self.is_wary = False
        self._pause = FIRST_PAUSE_SECONDS
