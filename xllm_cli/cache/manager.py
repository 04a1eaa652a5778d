"""The cache as the scheduler sees it: block tables grow, match, publish and end; a plan closes with a page delta.

Joins BlockPool, PrefixIndex, Residency and the budget. It knows neither torch nor a driver nor how a step runs: only an
acknowledgement changes what is mapped, so rolling a plan back touches blocks and nothing else.

One plan   match, grow, publish(provisional) … → plan_delta → ranks → acknowledge or refuse → observe → publish, release
In a plan  missing - leaving ≤ headroom: pages that leave with a delta pay for the pages it maps
Bytes      mapped = kv_live (with padding) + kv_cached + kv_idle + kv_spare

Longer than other files: it is all that the scheduler may ask of the cache, and most of it is said, not done, here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xllm_cli.cache.account import Account
from xllm_cli.cache.allocator import Allocator
from xllm_cli.cache.blocks import BlockPool, BlockTable
from xllm_cli.cache.budget import Headroom, LimitedBy, Limits, Usage
from xllm_cli.cache.matching import PrefixMatcher
from xllm_cli.cache.options import CacheOptions
from xllm_cli.cache.physical import AlwaysResident
from xllm_cli.cache.prefix import KeyMaker
from xllm_cli.cache.report import bands
from xllm_cli.cache.residency import QUICK_RETRIES, Residency
from xllm_cli.core import CacheSpec, MediaSpan, Observation, PageDelta, PageRef


class CacheManager:
    """KV memory of one model.

    `page_bytes` None: the physical cache. `prefix_seed` None: no prefix cache. `num_blocks` None: as many ids as the
    arena has room for. `spare_pages` bounds the spares, over all tensors: more save map calls when load swings, and
    hold memory a second longer.
    """

    def __init__(  # noqa: PLR0913 - made once, from as many sources
        self,
        spec: CacheSpec,
        *,
        limits: Limits,
        page_bytes: int | None,
        prefix_seed: int | None,
        num_blocks: int | None = None,
        spare_pages: int = 64,
        options: CacheOptions | None = None,
    ) -> None:
        options = options or CacheOptions()
        self.spec = spec
        capacity = limits.arena_bytes - options.state_bytes
        if page_bytes is None:
            residency: Residency = AlwaysResident(spec, num_blocks=num_blocks or capacity // spec.bytes_per_block)
        else:
            residency = Residency(spec, page_bytes=page_bytes, spare_pages=spare_pages)
        num_blocks = num_blocks or residency.packed_blocks(capacity)
        self._pool = BlockPool(residency, num_blocks=num_blocks, padding=options.padding)
        padding = residency.pages_of(self._pool.padding_runs) * residency.page_bytes
        usage = Usage(kv_mapped=residency.mapped_bytes, state=options.state_bytes, padding=padding)
        self._account = Account(limits, usage)
        self._allocator = Allocator(
            residency, self._pool, self._account,
            bytes_per_block=spec.bytes_per_block, clock=options.clock, stamps=options.stamps,
        )  # fmt: skip
        self._residency = residency
        self.counters = self._allocator.counters
        self._index = self._allocator.index
        keys = None
        if prefix_seed is not None:
            keys = KeyMaker(block_size=spec.block_size, seed=prefix_seed, lookahead=options.lookahead)
        self._matcher = PrefixMatcher(self._index, self._pool, keys)
        self._clock = options.clock
        self._holds: dict[int, list[int]] = {}

    # --- one sequence -----------------------------------------------------------------------------------------------

    def open(self, *, salt: str = "", media: Sequence[MediaSpan] = ()) -> BlockTable:
        """A table without blocks. `media` are the prompt's media items, by position."""
        return BlockTable(salt=salt, media=tuple(media), epoch=self._index.epoch)

    def match(self, table: BlockTable, tokens: Sequence[int]) -> int:
        """Retain the cached blocks that continue `table`; returns the tokens its published blocks cover.

        A multiple of block_size, and less than `len(tokens)`: the last token is always left to compute. Continues
        after the blocks held already; while one of them is not published there is nothing to add.
        """
        self._matcher.match(table, tokens)
        return table.num_published * self.spec.block_size

    def fits(self, num_blocks: int, table: BlockTable | None = None) -> bool:
        """Whether grow() could give `table` (None: a new one) so many more blocks now. Changes nothing."""
        return not self._is_beyond_limit(num_blocks) and self._allocator.fits(table.blocks if table else (), num_blocks)

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Make `table` cover positions `[0, num_tokens)`.

        Free blocks first, then pages within the headroom, then spares given up, then the least recently used idle
        blocks, as many as are short. False: out of memory, the table is unchanged.
        """
        short = self.blocks_for(num_tokens) - len(table.blocks)
        if short > 0:
            taken = None if self._is_beyond_limit(short) else self._allocator.take(table.blocks, short)
            if taken is None:
                return False
            table.blocks += taken
        if table.queried_tokens:
            self.counters.prefix_queries += table.queried_tokens
            self.counters.prefix_hits += table.cached_tokens
            table.queried_tokens = 0
        return True

    def shrink(self, table: BlockTable, num_blocks: int) -> None:
        """Give back the blocks beyond the first `num_blocks`: a rollback."""
        self._allocator.give_back(table.blocks[num_blocks:])
        del table.blocks[num_blocks:]
        del table.chain[num_blocks:]

    def publish(self, table: BlockTable, tokens: Sequence[int], num_written: int, *, provisional: bool = False) -> None:
        """Make every full block findable whose KV is written, that is which lies within the first `num_written` tokens.

        `provisional`: the running plan writes it. Rows of the same plan may match it; publishing again without
        `provisional` confirms, withdraw() takes it back. A block whose prefix is present already stays private.
        """
        self._matcher.publish(table, tokens, num_written, provisional=provisional)

    def withdraw(self) -> None:
        """Take back every provisional publication: the plan did not run. Their blocks stay with their holders."""
        self._allocator.withdraw()

    def release(self, table: BlockTable) -> None:
        """Drop all of a table's references; its published blocks stay cached. Doing it twice changes nothing."""
        self._allocator.give_back(table.blocks)
        table.blocks = []
        table.chain = []
        table.queried_tokens = 0

    def hold(self, blocks: Iterable[int]) -> int:
        """Keep blocks of a live table beyond its release, eviction and forgetting; returns what drop() takes."""
        held = list(blocks)
        for block in held:
            self._pool.retain(block)
        number = max(self._holds, default=0) + 1
        self._holds[number] = held
        return number

    def drop(self, hold: int) -> None:
        """End a hold. Its blocks stay cached or become free as if their last table had been released."""
        self._allocator.give_back(self._holds.pop(hold))

    # --- one plan ---------------------------------------------------------------------------------------------------

    def plan_delta(self, now: float) -> PageDelta:
        """Close a plan: the page changes it needs. `now` is in seconds of the clock. O(pages that change).

        Above the headroom (it may be negative) idle blocks are forgotten so that their pages leave, with this delta or,
        once the others have been moved together, with the next ones.
        """
        self._allocator.relieve()
        self._residency.expire(now)
        self._pool.settle_pages()
        self._index.tick(now)
        compactor = self._allocator.compactor
        due = compactor.due(now)
        if due is not None and due <= now:
            compactor.begin(0 if self.growth_is_closed else self._allocator.slack)
        return self._residency.delta(now, compactor.moves)

    def acknowledge(self, delta: PageDelta, stuck: Sequence[PageRef] = ()) -> None:
        """Every rank did the delta, save the unmaps in `stuck`. Call before observe() of the same step."""
        self._apply(delta.map, delta.unmap, stuck)
        if delta.copies:
            self._allocator.compactor.finish()
            self._allocator.pay()
        if delta.map:
            self._allocator.gate.succeeded()

    def refuse(self, delta: PageDelta, stuck: Sequence[PageRef] = ()) -> None:
        """The vote was lost: the maps were undone, save those in `stuck`; the unmaps stand, save those in `stuck`.

        Closes growth for 10 ms, doubling to 1 s until a map succeeds.
        """
        if delta.copies:
            self._allocator.compactor.undo()
        undone = set(stuck)
        self._apply([ref for ref in delta.map if ref in undone], delta.unmap, stuck)
        self.counters.map_failures += 1
        self._allocator.gate.failed(self._clock())

    def _apply(self, mapped: Sequence[PageRef], unmap: Sequence[PageRef], stuck: Sequence[PageRef]) -> None:
        if not mapped and not unmap:
            return
        failed = set(stuck)
        unmapped = [ref for ref in unmap if ref not in failed]
        self._residency.apply(mapped=mapped, unmapped=unmapped, failed=[ref for ref in unmap if ref in failed])
        self._pool.settle_pages()
        self.counters.pages_mapped += len(mapped)
        self.counters.pages_unmapped += len(unmapped)
        page_bytes = self._residency.page_bytes
        created = (len(mapped) - len(unmapped)) * page_bytes
        self._account.moved(kv_mapped=self._residency.mapped_bytes, created=created)
        self._allocator.pay()

    def observe(self, *observations: Observation) -> None:
        """What each rank saw after the step, and after all that was acknowledged."""
        self._account.observe(observations)
        self._allocator.pay()

    def close_growth(self, until: float) -> None:
        """Map no further page until then, in seconds of the clock. Rows that need no page go on."""
        self._allocator.gate.close(until)

    @property
    def growth_is_closed(self) -> bool:
        """Whether a failed map, or close_growth(), keeps every further page from being asked for. After a failed map a
        plan grows by the pages of one grow() only, until a map succeeds."""
        return self._allocator.growth_is_closed

    @property
    def growth_opens_soon(self) -> bool:
        """Growth is closed, and so briefly that waiting beats computing anything anew."""
        return self._allocator.gate.opens_soon(self._clock())

    def next_deadline(self, now: float) -> float | None:
        """When plan_delta() or grow() will answer otherwise though nothing else happens: a spare expires, a stuck page
        is due, growth opens. `now` if a delta is due already, None if never."""
        due = [self._residency.next_deadline(now), self._allocator.compactor.due(now)]
        if self._allocator.can_relieve:
            return now
        if self._allocator.gate.is_closed(now):
            due.append(self._allocator.gate.closed_until)
        return min((time for time in due if time is not None), default=None)

    # --- budget -----------------------------------------------------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; 1 for the physical cache, which has none."""
        return self._residency.page_bytes

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self.spec.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that cover so many tokens."""
        return -(-num_tokens // self.spec.block_size)

    @property
    def limits(self) -> Limits:
        """The caps as they are now."""
        return self._account.limits

    @property
    def observations(self) -> tuple[Observation, ...]:
        """What each rank saw last; empty before the first observe()."""
        return self._account.observations

    @property
    def num_blocks(self) -> int:
        """Block ids the arena has room for, padding included: `[0, num_blocks)`."""
        return self._pool.num_blocks

    def headroom(self) -> Headroom:
        """Bytes that may be mapped now and what limits them; at most 0 while growth is closed."""
        room = self._account.headroom()
        if self.growth_is_closed:
            return room._replace(bytes=min(0, room.bytes))
        return room

    def possible_bytes(self) -> int:
        """The most KV bytes a request could have if it were alone, whatever is free now."""
        return self._account.possible()

    def possible_limited_by(self) -> LimitedBy:
        """What keeps possible_bytes() from being more."""
        return self._account.possible_limited_by()

    def explain_headroom(self) -> str:
        """The sum behind the headroom, in words and bytes."""
        resting = "no growth for a moment, a map failed; else " if self.growth_is_closed else ""
        return resting + self._account.explain()

    def floor(self) -> int:
        """Bytes that growth leaves free on the device whatever runs."""
        return self._account.floor()

    def possible_tokens(self) -> int:
        """The most tokens, prompt and answer, that such a request could have: whole blocks on whole pages."""
        padding = self._account.usage.padding
        blocks = min(self._residency.packed_blocks(self.possible_bytes() + padding), self.num_blocks)
        return max(0, blocks - self._pool.first_block) * self.spec.block_size

    def keep_free(self) -> int:
        """Bytes an elastic create must leave free on the device: floor + execution room + reserve."""
        return self._account.keep_free()

    def set_limit(self, limit: int | None) -> None:
        """Cap KV bytes from now on (None: no cap). Idle blocks leave with the next delta; see over_limit_bytes()."""
        self._account.set_limit(limit)
        self._allocator.pay()

    def set_own_limit(self, limit: int | None) -> None:
        """As set_limit, of this model's KV alone where several models share the pool."""
        self._account.set_own_limit(limit)
        self._allocator.pay()

    def set_weights(self, *, mapped: int, on_device: int, asleep: int = 0) -> None:
        """Weight bytes that share the arena: in mapped pages of the pool, on the device in all, and those that a model
        which sleeps will need of the pool."""
        self._account.set_weights(mapped=mapped, on_device=on_device, asleep=asleep)
        self._allocator.pay()

    def set_elsewhere(self, *, kv: int, weights: int) -> None:
        """Bytes of the pool's pages that hold KV and weights of other models; shared weights are nobody else's."""
        self._account.set_elsewhere(kv=kv, weights=weights)
        self._allocator.pay()

    def room_for_weights(self) -> int:
        """The most bytes of weights that the caps let this model map now, whatever is free."""
        return self._account.room_for_weights(in_arena=self._residency.reclaims)

    @property
    def kv_bytes(self) -> int:
        """Bytes of its pages and state, as limits count them."""
        return self._account.usage.kv_own

    @property
    def is_at_own_limit(self) -> bool:
        """What growth meets first is the limit of this model alone."""
        return self._account.is_at_own_limit

    def over_limit_bytes(self) -> int:
        """KV bytes above the arena, max_cache_size or limit after forgetting what is idle: only preemption frees them.

        Never more than 0 for want of free memory: rows that need nothing are not preempted for a neighbour.
        """
        if not self._residency.reclaims:
            limit = self._physical_limit
            return 0 if limit is None else max(0, self._bytes_in_use() - limit)
        self._allocator.relieve()
        pages = self._account.headroom().caps // self._residency.page_bytes
        missing = self._residency.missing_pages
        over = missing - self._residency.leaving_pages - pages
        if over > 0 and not missing and self._allocator.compactor.waste_pages():
            return 0  # pages are about to be emptied
        return max(0, over) * self._residency.page_bytes

    def _bytes_in_use(self, more_blocks: int = 0) -> int:
        return (self._pool.num_held + self._pool.first_block + more_blocks) * self.spec.bytes_per_block

    def _is_beyond_limit(self, num_blocks: int) -> bool:
        """So many more blocks would pass the limit of a physical cache: its memory stays, but requests use less of it.
        A virtual cache counts pages instead."""
        limit = self._physical_limit
        return limit is not None and not self._residency.reclaims and self._bytes_in_use(num_blocks) > limit

    @property
    def _physical_limit(self) -> int | None:
        """A physical cache has memory of its own: either limit caps it alone."""
        return min((each for each in (self.limits.limit, self.limits.own_limit) if each is not None), default=None)

    def forget_bytes(self, nbytes: int) -> int:
        """Give up spares and idle blocks, least recently used first; returns the bytes that leave with the next deltas:
        the blocks that stay may have to be moved together before."""
        return self._allocator.reclaim(nbytes)

    @property
    def oldest_idle(self) -> int | None:
        """When the least recently used idle block was used, on a clock that the caches of a pool share (CacheOptions);
        None if no block is idle."""
        return self._index.oldest

    @property
    def oldest_idle_at(self) -> float | None:
        """The same in seconds of the clock, which neighbours share."""
        return self._index.oldest_at

    def forget_all(self) -> int:
        """Empty the prefix index: no later request hits anything computed before. Returns the blocks freed.

        Blocks in use stay with their sequences, and are never published again.
        """
        return self._allocator.forget_all()

    # --- report -----------------------------------------------------------------------------------------------------

    @property
    def is_healthy(self) -> bool:
        """False while a page stays mapped after three unmaps in a row that failed."""
        return self._residency.unmap_failures < QUICK_RETRIES

    def bands(self) -> dict[str, int]:
        """`mapped`, `kv_live`, `kv_cached`, `kv_idle`, `kv_spare` and `state` in bytes; see report.py."""
        found = bands(self._pool, self._residency, self.spec.bytes_per_block)
        return {**found, "state": self._account.usage.state}

    def check(self) -> None:
        """Recount everything from scratch; an AssertionError names what differs. O(all blocks)."""
        self._pool.check()
        self._index.check(lambda block: self._pool.references(block) > 0)
        self._allocator.check()
        assert self._account.usage.kv_mapped == self._residency.mapped_bytes
        for block in (block for held in self._holds.values() for block in held):
            assert self._pool.references(block) > 0, f"block {block} is under a hold and not held"
        assert min(self.bands().values()) >= 0, f"a negative band in {self.bands()}"
