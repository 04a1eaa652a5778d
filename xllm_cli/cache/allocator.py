"""Where blocks come from when there are not enough of them, and how bytes are given back.

Owns the order in which things give way: free blocks, pages within the headroom, spares, idle cached blocks. Joins
BlockPool, PrefixIndex and Residency under one Account; knows neither sequences nor tokens.

    slack = headroom - missing + leaving, in pages: what this plan may still map. Pages leaving with its delta pay for
    pages it maps. While slack < 0 there is no spare.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from xllm_cli.cache.account import Account, GrowthGate
from xllm_cli.cache.blocks import BlockPool, Cold
from xllm_cli.cache.compaction import Compactor
from xllm_cli.cache.pages import runs_of
from xllm_cli.cache.prefix import PrefixIndex
from xllm_cli.cache.report import CacheCounters
from xllm_cli.cache.residency import Residency, Spare

NO_COLD = Cold([], 0)


class Allocator:
    """Takes, gives back and reclaims blocks."""

    def __init__(
        self,
        residency: Residency,
        pool: BlockPool,
        account: Account,
        *,
        bytes_per_block: int,
        clock: Callable[[], float],
        stamps: Iterator[int],
    ) -> None:
        self.residency = residency
        self.pool = pool
        self.index = PrefixIndex(self.pool.page_use, stamps)
        self.compactor = Compactor(residency, pool, self.index, bytes_per_block=bytes_per_block)
        self.gate = GrowthGate()
        self.counters = CacheCounters()
        self._hopeless = (0, 0, 0, 0)
        self._clock = clock
        self._account = account

    @property
    def slack(self) -> int:
        residency = self.residency
        room = self._account.growth // residency.page_bytes
        return room - residency.missing_pages + residency.leaving_pages

    @property
    def growth_is_closed(self) -> bool:
        """No further page may be wanted now: a map just failed, or failed last and this plan wants pages already. One
        take() of pages in a plan is all then: where everybody's together are not to be had, one's still may be."""
        return self.gate.is_closed(self._clock()) or (self.gate.is_wary and self.residency.missing_pages > 0)

    # --- taking -----------------------------------------------------------------------------------------------------

    def fits(self, own: Sequence[int], count: int) -> bool:
        """Whether take() would succeed. Changes nothing."""
        short = count - self.pool.num_ready - self.index.num_idle
        if (
            short <= 0
            or self._cold(short).num_blocks >= short
            or self._cold(short, self._useless_spares()).num_blocks >= short
        ):
            return True
        return bool(self._packed(own, count))

    def take(self, own: Sequence[int], count: int) -> list[int] | None:
        """Hold `count` more blocks for a table that has `own`; None, with nothing changed, when they cannot be had.

        Ready blocks on the page of the table's last block come first, then those on the fullest pages.
        """
        pool, near = self.pool, own[-1] if own else -1
        short = count - pool.num_ready
        if short <= 0:
            return pool.take_ready(count, near)
        pages = self._pages_to_open()
        opened = pool.take_cold(short, pages) if pages >= 0 else []
        if not opened:
            return self._take_idle(own, count)
        taken = pool.take_ready(count - short, near) + opened if count > short else opened
        pool.settle_pages()
        return taken

    def _take_idle(self, own: Sequence[int], count: int) -> list[int] | None:
        """Neither ready nor cold blocks are enough: give up spares that complete no block, then forget idle blocks."""
        short = count - self.pool.num_ready
        useless = self._useless_spares()
        cold = self._cold(short, useless)
        short -= cold.num_blocks
        if short > self.index.num_idle:
            return self._take_packed(own, count)
        self.residency.give_up(useless)
        taken = self.pool.take_ready(min(count, self.pool.num_ready), own[-1] if own else -1)
        self.pool.take_runs(cold.runs)
        for run in cold.runs:
            taken.extend(range(*run))
        if short > 0:
            reused = self.index.evict(short)
            self.counters.evicted_blocks += len(reused)
            for block in reused:
                self.pool.retain(block)
            taken += reused
        return taken

    def _pages_to_open(self, gone: Collection[Spare] = ()) -> int:
        """How many absent pages may be wanted now; negative: none, and so no cold block. `gone` are given up."""
        if not self.residency.reclaims:
            return 0
        pages = self.slack + sum(self.residency.tensors_of(spare) for spare in gone)
        return pages if pages > 0 and not self.growth_is_closed else -1

    def _cold(self, count: int, gone: Collection[Spare] = ()) -> Cold:
        pages = self._pages_to_open(gone)
        return self.pool.find_cold(count, pages, gone) if pages >= 0 else NO_COLD

    def _useless_spares(self) -> set[Spare]:
        """Spares that no ready block touches: when all ready blocks are taken, these only cost bytes."""
        return {spare for spare, run in self.residency.spares() if not self.pool.ready_in(run)}

    def _packed(self, own: Sequence[int], count: int) -> list[int]:
        """The lowest `count` ids besides `own`, if nobody else holds a block and their pages alone fit; else nothing.

        Scattered blocks of narrow tensors can strand so many pages that a request which fits when packed would never
        run; whoever is alone may therefore clear the cache and pack.
        """
        pool, residency = self.pool, self.residency
        if pool.num_held != len(own) or self.growth_is_closed or not residency.reclaims:
            return []
        held = set(own)
        last = min(pool.num_blocks, pool.first_block + len(own) + count)
        ids = [block for block in range(pool.first_block, last) if block not in held][:count]
        if len(ids) < count:
            return []
        wanted = residency.pages_of([*runs_of(sorted([*held, *ids])), *pool.padding_runs])
        stuck = residency.unwanted_bytes // residency.page_bytes - residency.spare_pages - residency.leaving_pages
        room = self._account.growth // residency.page_bytes
        return ids if wanted + stuck - residency.mapped_pages <= room else []

    def _take_packed(self, own: Sequence[int], count: int) -> list[int] | None:
        ids = self._packed(own, count)
        if not ids:
            return None
        self._forget(self.index.evict(self.index.num_idle))
        self.residency.give_up_pages(self.residency.spare_pages)
        self.pool.settle_pages()
        self.pool.take_runs(runs_of(ids))
        return ids

    # --- giving back ------------------------------------------------------------------------------------------------

    def give_back(self, blocks: list[int]) -> None:
        """Drop a reference on each; what nobody holds then stays cached if its KV is published, else is free."""
        if not blocks:
            return
        index, residency = self.index, self.residency
        if index.has_provisional:
            self._forget_unwritten(blocks)
        residency.books.now = self._clock()
        for block in self.pool.drop(blocks, index.by_block):
            index.make_idle(index.by_block[block])
        self.pay()

    def _forget_unwritten(self, blocks: list[int]) -> None:
        """Entries of blocks that lose their last holder before their KV is written."""
        for block in blocks:
            entry = self.index.entry_of(block)
            if entry is not None and entry.provisional and self.pool.references(block) == 1:
                self.pool.forget(self.index.forget(entry))

    def withdraw(self) -> None:
        """Take back every provisional publication; the blocks stay with their holders."""
        for entry in self.index.provisional():
            if entry.alive:
                self.pool.forget(self.index.forget(entry))
        self.pay()

    def forget_all(self) -> int:
        """Empty the index; returns the blocks that became free."""
        blocks = self.index.forget_all()
        self.pool.forget(blocks)
        self.pay()
        return len(blocks)

    def pay(self) -> None:
        """Give up spares while slack is negative."""
        if self.residency.spare_pages and self.slack < 0:
            self.residency.give_up_pages(-self.slack)
            self.pool.settle_pages()

    def reclaim(self, nbytes: int) -> int:
        """Make up to `nbytes` (rounded up to pages) leave: spares, then what the least recently used idle blocks keep.

        Returns the bytes that leave with the next delta, and those that leave with the ones after it, once the idle
        blocks that stay have been moved together; with pages missing all leave at once. They leave besides what was
        reclaimed before. Less than asked when there is no more.
        """
        residency = self.residency
        if nbytes <= 0 or not residency.reclaims:
            return 0
        moving, leaving = self._moving_pages, residency.leaving_pages
        start, wanted = leaving + moving, -(-nbytes // residency.page_bytes)
        target = start + wanted
        self._give_up_to(leaving + wanted)
        if self._going_pages < target:
            self._forget_least_used(target - residency.leaving_pages)
            self._give_up_to(target)
            if not residency.missing_pages:
                self.compactor.promise(target - residency.leaving_pages)
            if self._going_pages < target and self._moving_pages <= moving:
                self._forget_whole_pages(target)
        self.pay()
        return max(0, self._going_pages - start) * residency.page_bytes

    @property
    def _going_pages(self) -> int:
        """Pages that leave with this plan and the next ones."""
        return self.residency.leaving_pages + self._moving_pages

    @property
    def _moving_pages(self) -> int:
        """Those that leave once blocks have been moved: too late to pay for pages that this plan misses."""
        return 0 if self.residency.missing_pages else self.compactor.promised

    def relieve(self) -> None:
        """While slack is negative, idle blocks give way. Once nothing does any good, wait until something changes."""
        slack = self.slack
        if slack >= 0:
            return
        short = -slack - self._moving_pages
        if short > 0 and not self.reclaim(short * self.residency.page_bytes):
            self._hopeless = self._state

    @property
    def can_relieve(self) -> bool:
        """Whether relieve() would do something that it has not just tried in vain."""
        if not self.residency.reclaims or not self.index.num_idle:
            return False
        return self.slack < 0 and self._hopeless != self._state

    @property
    def _state(self) -> tuple[int, int, int, int]:
        """What decides whether anything can give way."""
        return self.slack, self.residency.missing_pages, self.index.num_idle, self.pool.num_held

    def _give_up_to(self, target: int) -> None:
        """Spares leave until `target` pages do."""
        self.residency.give_up_pages(target - self.residency.leaving_pages)
        self.pool.settle_pages()

    def _forget_least_used(self, pages: int) -> None:
        """Forget so many idle blocks that the others, once moved together, need `pages` pages less. Pages that held
        blocks keep stay anyway: what fits beside those is kept."""
        residency, pool = self.residency, self.pool
        stays = (residency.wanted_pages - pages) * residency.page_bytes
        _, beside = pool.pinned()
        elsewhere = residency.packed_blocks(stays) - pool.first_block - pool.num_held - beside
        surplus = self.index.num_idle - beside - max(0, elsewhere)
        if surplus > 0:
            self._forget(self.index.evict(surplus))

    def _forget_whole_pages(self, target: int) -> None:
        """Forget the blocks of pages that only idle blocks keep, longest idle first, until `target` pages leave."""
        for group in self.pool.idle_groups():
            if self.pool.is_idle(group) and not self.pool.is_page_held(group):
                self._forget_group(group)
                self._give_up_to(target)
                if self.residency.leaving_pages >= target:
                    break

    def _forget_group(self, group: int) -> None:
        for block in self.pool.cached_in(group):
            entry = self.index.entry_of(block)
            if entry is not None:
                self._forget(self.index.forget(entry))

    def _forget(self, blocks: list[int]) -> None:
        self.counters.evicted_blocks += len(blocks)
        self.pool.forget(blocks)

    def check(self) -> None:
        """No spare while pages must go; cached blocks are exactly the idle entries."""
        assert self.slack >= 0 or not self.residency.spare_pages, f"spares are kept at a slack of {self.slack}"
        assert self.pool.num_cached == self.index.num_idle, "cached blocks are not the idle entries"
