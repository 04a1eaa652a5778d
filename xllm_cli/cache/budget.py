"""How many bytes may be mapped now: a pure function of what the ranks observed and of the configured caps.

Owns the arithmetic of DESIGN.md §7 and nothing else. It keeps no state, calls no driver, and knows neither blocks nor
pages. All quantities are bytes in Python integers, so nothing wraps: a headroom may be negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from xllm_cli.core import LimitedBy as LimitedBy
from xllm_cli.core import Observation

HOST_FLOOR_BYTES = 64 << 20
_BYTES = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Limits:
    """The configured caps, in bytes.

    `arena_bytes` caps KV and weights of the pool together. `max_cache_size` 0 and `limit` None mean no such cap; both
    cap KV and its state over all models of the pool, never weights; `own_limit` caps this model's alone. `ratio` is the
    effective max_memory_utilization, 0 = none. `reserve` is vmm_memory_reserve_bytes. `pool_bytes` is what a fixed pool
    (`elastic` False) holds. `host` applies the floor of host memory, at least 64 MiB and 1 % of the total.
    """

    arena_bytes: int
    max_cache_size: int = 0
    ratio: float = 0.0
    limit: int | None = None
    own_limit: int | None = None
    reserve: int = 0
    elastic: bool = True
    pool_bytes: int = 0
    host: bool = True


class Usage(NamedTuple):
    """What is taken already, in bytes.

    `kv_mapped` are acknowledged KV pages, spares included; `weights_mapped` weight pages of the pool, `weights_asleep`
    what the weights of a sleeping model need of it, and `weights_on_device` all weights, in the pool or not. `created`
    is what was mapped since the last observation. `kv_elsewhere` and `weights_elsewhere` are pages of the pool that
    hold KV (with its state) and weights of other models, those that are shared not counted.
    """

    kv_mapped: int = 0
    weights_mapped: int = 0
    weights_on_device: int = 0
    state: int = 0
    padding: int = 0
    created: int = 0
    weights_asleep: int = 0
    kv_elsewhere: int = 0
    weights_elsewhere: int = 0

    @property
    def kv_own(self) -> int:
        """KV of this model."""
        return self.kv_mapped + self.state

    @property
    def kv_in_pool(self) -> int:
        """KV of all models."""
        return self.kv_own + self.kv_elsewhere

    @property
    def weights_in_pool(self) -> int:
        """Weights of all models."""
        return self.weights_mapped + self.weights_elsewhere

    @property
    def weights_outside(self) -> int:
        """Weights that live in ordinary memory."""
        return max(0, self.weights_on_device - self.weights_mapped - self.weights_asleep)


class Headroom(NamedTuple):
    """`bytes` may be mapped now, capped by `limited_by`.

    `deficit` is how far free memory lies below what must stay free (elastic pools only): bytes to give back.
    `caps` is the least of the arena, max_cache_size and the limit alone; negative means rows must give way.
    `terms` is every cap with its name, one of each rank.
    """

    bytes: int
    limited_by: LimitedBy
    deficit: int = 0
    caps: int = 0
    terms: tuple[tuple[int, LimitedBy], ...] = ()


def floor_bytes(total: int, limits: Limits) -> int:
    """Bytes of a device of `total` bytes that growth must leave free."""
    floor = total - int(total * limits.ratio) if limits.ratio > 0 else 0
    return max(floor, HOST_FLOOR_BYTES, total // 100) if limits.host else floor


def keep_free(observations: Sequence[Observation], limits: Limits) -> int:
    """Floor + execution room + reserve, the most over ranks: what an elastic create must leave free. Fixed: 0."""
    if not limits.elastic:
        return 0
    return max((_must_stay_free(seen, limits) for seen in observations), default=limits.reserve)


def headroom(observations: Sequence[Observation], limits: Limits, usage: Usage) -> Headroom:
    """The bytes that may be mapped now, the least over all ranks and caps. Without an observation nothing may grow."""
    kv_used = usage.kv_in_pool
    caps: list[tuple[int, LimitedBy]] = [(limits.arena_bytes - usage.weights_in_pool - kv_used, "arena")]
    if limits.max_cache_size > 0:
        caps.append((limits.max_cache_size - kv_used, "max_cache_size"))
    if limits.limit is not None:
        caps.append((limits.limit - kv_used, "limit"))
    if limits.own_limit is not None:
        caps.append((limits.own_limit - usage.kv_own, "limit"))
    least_cap = min(caps, key=_BYTES)[0]
    deficit = 0
    for seen in observations:
        from_handles = min(usage.created, seen.free_handles)
        created = usage.created - from_handles
        free_handles = seen.free_handles - from_handles
        if not limits.elastic:
            caps.append((free_handles - created, "pool"))
            continue
        room = _free(seen, usage) - created - _must_stay_free(seen, limits)
        deficit = max(deficit, -room)
        if limits.ratio > 0:  # first, so that it is named where both are as tight
            caps.append((int(seen.total * limits.ratio) - seen.owned - created, "max_memory_utilization"))
        caps.append((free_handles + max(0, room), "free_memory"))
    if not observations:
        caps.append((0, "free_memory" if limits.elastic else "pool"))
    least, name = min(caps, key=_BYTES)
    return Headroom(least, name, deficit, least_cap, tuple(caps))


def possible(observations: Sequence[Observation], limits: Limits, usage: Usage) -> tuple[int, LimitedBy]:
    """The most KV bytes one request could ever have, alone on the device, and what caps them. May be negative.

    Memory that exists from the start, a fixed pool or a physical cache, is short of weights only if they lie in it.
    """
    weights = usage.weights_on_device if limits.elastic else usage.weights_mapped + usage.weights_asleep
    caps: list[tuple[int, LimitedBy]] = [(limits.arena_bytes - weights, "arena")]
    if limits.max_cache_size > 0:
        caps.append((limits.max_cache_size, "max_cache_size"))
    if not limits.elastic:
        caps.append((limits.pool_bytes - weights, "pool"))
    for seen in observations if limits.elastic else ():
        if limits.ratio > 0:
            caps.append((int(seen.total * limits.ratio) - weights, "max_memory_utilization"))
        else:
            caps.append((seen.total - floor_bytes(seen.total, limits) - weights, "free_memory"))
    least, name = min(caps, key=_BYTES)
    return least - usage.state - usage.padding, name


def explain(limited_by: LimitedBy, observations: Sequence[Observation], limits: Limits, usage: Usage) -> str:
    """The sum behind the headroom of this limit, in bytes, for whoever must change something."""
    own = f"KV {usage.kv_mapped} - state {usage.state}"
    kv = f"{own} - KV of other models {usage.kv_elsewhere}" if usage.kv_elsewhere else own
    match limited_by:
        case "arena":
            return f"arena {limits.arena_bytes} - weights {usage.weights_in_pool} - {kv}"
        case "max_cache_size":
            return f"max_cache_size {limits.max_cache_size} - {kv}"
        case "limit" if _is_own_limit(limits, usage):
            return f"limit of this model {limits.own_limit} - {own}"
        case "limit":
            return f"limit {limits.limit} - {kv}"
    if not observations:
        return "nothing was observed yet"
    if limited_by == "pool":
        return f"free pages of the fixed pool {min(seen.free_handles for seen in observations)}"
    if limited_by == "max_memory_utilization":
        seen = min(observations, key=lambda seen: int(seen.total * limits.ratio) - seen.owned)
        return f"max_memory_utilization {limits.ratio:g} of {seen.total} - pages owned {seen.owned}"
    seen = min(observations, key=lambda seen: _free(seen, usage) - _must_stay_free(seen, limits))
    free = f"free {seen.free}"
    if _free(seen, usage) < seen.free:
        free = f"total {seen.total} - pages owned {seen.owned} - weights {usage.weights_outside}"
    return (
        f"{free} - floor {floor_bytes(seen.total, limits)} - execution room {seen.execution_room} - reserve "
        f"{limits.reserve}, not below 0, + free handles {seen.free_handles} - mapped since {usage.created}"
    )


def _is_own_limit(limits: Limits, usage: Usage) -> bool:
    """Of the two limits the model's own is the tighter."""
    if limits.own_limit is None or limits.limit is None:
        return limits.own_limit is not None
    return limits.own_limit - usage.kv_own <= limits.limit - usage.kv_in_pool


def _free(seen: Observation, usage: Usage) -> int:
    """What is free, but no more than the total less what is known to be there: a total may be a mere promise
    (--host_memory_bytes), and weights in the page cache count as free."""
    return min(seen.free, seen.total - seen.owned - usage.weights_outside)


def _must_stay_free(seen: Observation, limits: Limits) -> int:
    return floor_bytes(seen.total, limits) + seen.execution_room + limits.reserve
