"""Random cache operations over real pages of a driver that fails: no byte is lost, no page leaks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence

import pytest
from cache_ops import CacheOps, Clock, make_cache, spec_of
from covering import steps_until
from driver_kinds import open_kind, peek, poke

from xllm_cli.cache.manager import CacheManager
from xllm_cli.core import Observation, PageDelta, PageRef
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.driver import Driver, FaultyDriver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.worker.kv_store import VirtualKvStore

PAGE_BYTES = 4096
DEVICE_PAGES = 30
OPERATIONS = 2_500


class Rank:
    """One rank's pages: arenas over a pool over a driver; `odds` is how often a call of a delta fails."""

    def __init__(self, cache: CacheManager, driver: Driver, rng: random.Random, *, fixed: bool) -> None:
        self.page_bytes = driver.info().page_bytes
        self.pool = PagePool(driver, page_bytes=self.page_bytes, fixed_pages=DEVICE_PAGES if fixed else None)
        tensors = cache.spec.tensors
        self.arenas = [Arena(driver, self.pool, cache.num_blocks * tensor.bytes_per_block) for tensor in tensors]
        widths = [tensor.bytes_per_block for tensor in tensors]
        self.store = VirtualKvStore(self.arenas, self.pool, self.page_bytes, fence=lambda: None, block_bytes=widths)
        self.odds = 0.0
        self.stuck = self.copied = 0
        self._cache, self._driver, self._rng = cache, driver, rng

    def apply(self, delta: PageDelta) -> tuple[bool, Sequence[PageRef]]:
        """As the worker does: unmap, map, and destroy what is surplus."""
        if isinstance(self._driver, FaultyDriver) and self._rng.random() < self.odds:
            verb = self._rng.choice(("create", "map", "unmap", "destroy"))
            self._driver.reset_counts()
            self._driver.fail(verb, self._rng.randrange(1, 3), self._rng.random() < 0.5)
        outcome = self.store.apply(delta, self._cache.keep_free())
        self.store.trim()
        self.pool.check()
        self.stuck += len(outcome.stuck)
        self.copied += len(delta.copies) if outcome.mapped else 0
        return outcome.mapped, outcome.stuck

    def observe(self) -> Observation:
        owned, free = self.store.owned_bytes, self.store.free_handle_bytes
        total = DEVICE_PAGES * self.page_bytes
        return Observation(total=total, free=total - owned, owned=owned, free_handles=free)

    def close(self) -> None:
        """Close until the planned failures, at most two per verb, are used up; then nothing may be left."""
        for _ in range(5):
            if self.store.close() and not self._driver.usage()["handles"]:
                return
        raise AssertionError(f"pages leaked: {self._driver.usage()}")


class PagedOps(CacheOps):
    """The oracle reads and writes the blocks' own bytes, in every tensor."""

    def over(self, rank: Rank) -> PagedOps:
        self._rank = rank
        return self

    def store(self, block: int, content: tuple[object, ...]) -> None:
        for address, nbytes in self._places(block):
            poke(address, pattern(content, nbytes))

    def holds(self, block: int, content: tuple[object, ...]) -> bool:
        return all(peek(address, nbytes) == pattern(content, nbytes) for address, nbytes in self._places(block))

    def _copy(self, source: int, target: int) -> None:
        """The store has done it."""

    def _places(self, block: int) -> Iterator[tuple[int, int]]:
        for arena, tensor in zip(self._rank.arenas, self.cache.spec.tensors, strict=True):
            yield arena.address + block * tensor.bytes_per_block, tensor.bytes_per_block


def pattern(content: tuple[object, ...], nbytes: int) -> bytes:
    """Bytes that only this content has."""
    digest = hashlib.sha256(repr(content).encode()).digest()
    return (digest * (nbytes // len(digest) + 1))[:nbytes]


@pytest.mark.parametrize("fixed", [False, True], ids=["elastic", "fixed"])
@pytest.mark.parametrize("widths", [(1500,), (1400, 1400, 500)], ids=["interleaved", "per_layer"])
def test_random_operations_over_failing_pages(widths: tuple[int, ...], fixed: bool) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng, clock, driver = random.Random(seed), Clock(), open_kind("faulty", pages=DEVICE_PAGES, poison=0xFF)
    limits = {"elastic": not fixed, "pool_bytes": DEVICE_PAGES * PAGE_BYTES, "reserve": 4 * PAGE_BYTES}
    size = {"pages": DEVICE_PAGES, "page_bytes": PAGE_BYTES, "spare_pages": 6}
    cache = make_cache(spec_of(*widths), limits=limits, options={"clock": clock}, **size)
    rank = Rank(cache, driver, rng, fixed=fixed)
    ops = PagedOps(cache, rank.apply, rank.observe, clock=clock, rng=rng).over(rank)
    rank.odds = 0.1
    counters = cache.counters

    def has_seen_all() -> bool:
        seen = (counters.map_failures, counters.prefix_hits, counters.evicted_blocks, rank.stuck, rank.copied)
        return min(seen) > 0

    for _ in steps_until(has_seen_all, least=OPERATIONS, most=20 * OPERATIONS):
        ops.step()
        assert sum(arena.mapped_pages for arena in rank.arenas) * PAGE_BYTES == cache.bands()["mapped"]
    ops.drain()
    rank.close()
