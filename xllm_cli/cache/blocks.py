"""Who holds a block: free, held or cached, how often, and which block comes next.

The books are native (native/blocks/blocks.h has the contract); this adds what needs a reason: padding, and telling
Residency which pages turned. Knows neither tokens nor the budget. Ids are activated on demand, so that an arena of a
terabyte costs nothing until it is used.

    free + held + cached + padding = activated        each activated block is exactly one of these
    held:   references > 0                            cached: no reference, but findable in the prefix index
    free:   ready (all its pages are present, taking it costs nothing) or cold (some page is absent)
A block not activated yet is cold: its pages are absent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xllm_cli._blocks import BlockList
from xllm_cli.cache.pages import NO_BLOCK, Run, runs_of
from xllm_cli.cache.prefix import BlockKey, Entry
from xllm_cli.cache.residency import Residency, Spare
from xllm_cli.core import MediaSpan

COLD, READY, HELD, CACHED, PADDING = range(5)


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks: block i holds the KV of positions `[i * block_size, (i + 1) * block_size)`.

    `chain[i]` is the index entry of the prefix that ends with block i (its block may be another's equal one); it covers
    the first `num_published` blocks. `keys` are the hashes of full blocks, computed once; they outlive `blocks`.
    `cached_tokens` is what the last match from an empty table found. `epoch` tells blocks older than a forget_all.
    """

    salt: str = ""
    media: tuple[MediaSpan, ...] = ()
    blocks: list[int] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    chain: list[Entry] = field(default_factory=list)
    cached_tokens: int = 0
    epoch: int = 0
    queried_tokens: int = 0

    @property
    def num_published(self) -> int:
        """Full blocks, from the first on, whose prefix is in the index."""
        return len(self.chain)


class Cold(NamedTuple):
    """Cold blocks that could be taken: `num_blocks` of them in `runs`."""

    runs: list[Run]
    num_blocks: int


class BlockPool(BlockList):
    """All blocks of one cache. `num_blocks` ids at most; block 0 is padding if asked for, live for ever.

    Native: num_ready, num_held, num_cached, activated, state, references, take_ready, retain, used, is_idle …
    """

    def __init__(self, residency: Residency, *, num_blocks: int, padding: bool = False) -> None:
        super().__init__(num_blocks, *residency.geometry, residency.books)
        self._residency = residency
        self._padding = padding
        if padding:
            self.take_padding()
            self.settle_pages()

    @property
    def first_block(self) -> int:
        """The lowest id that may be taken."""
        return int(self._padding)

    @property
    def padding_runs(self) -> list[Run]:
        """The padding block, if there is one."""
        return [(0, 1)] if self._padding else []

    # --- taking and giving back -------------------------------------------------------------------------------------

    def find_cold(self, count: int, pages: int, gone: Collection[Spare] = ()) -> Cold:
        """Up to `count` cold blocks, lowest ids first, that cost at most `pages` more pages. Takes nothing.

        `gone` are spares that count as given up.
        """
        return Cold(*self.cold(count, pages, list(gone)))

    def take_runs(self, runs: Iterable[Run]) -> None:
        """Hold these free blocks."""
        for start, stop in runs:
            self.take(start, stop)
        self.settle_pages()

    def drop(self, blocks: list[int], published: Mapping[int, object]) -> list[int]:
        """Drop a reference on each. What nobody holds then stays cached if it is in `published`, and is returned; else
        it is free."""
        idle = self.give_back(blocks, published)
        self.settle_pages()
        return idle

    def forget(self, blocks: Sequence[int]) -> None:
        """Cached blocks that left the index become free."""
        self.free_cached(blocks)
        self.settle_pages()

    # --- ready or cold ----------------------------------------------------------------------------------------------

    def settle_pages(self) -> None:
        """File the pages that turned, then sort the free blocks of those that came or went into ready and cold,
        activating those of new pages."""
        if self._residency.books.has_turned:
            self._residency.file_turned()
        self.settle()

    def ready_in(self, run: Run) -> bool:
        """Whether any block of a run is ready."""
        return self.is_any(*run, READY)

    # --- whole pages ------------------------------------------------------------------------------------------------

    def page_use(self, block: int) -> int:
        """How many blocks use the page that a block begins on."""
        return self.used(self.group(block))

    def blocks_of(self, group: int) -> Run:
        """The blocks that begin in a group."""
        return self.group_start(group), self.group_start(group + 1)

    def is_page_held(self, group: int) -> bool:
        """Whether a held or padding block touches a group's page; it may begin on the page before."""
        start, end = self.blocks_of(group)
        before = max(0, start - 1)
        return self.is_any(before, end, HELD) or self.is_any(before, end, PADDING)

    def cached_in(self, group: int) -> list[int]:
        """The cached blocks of a group."""
        return self.blocks_in(*self.blocks_of(group), CACHED)

    # --- check ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Walk every block: exactly one state each, totals and order equal to a recount."""
        states = self.states()
        counts = [states.count(state) for state in range(5)]
        assert sum(counts) == self.activated <= self.num_blocks, "a block in no state"
        assert counts[1:4] == [self.num_ready, self.num_held, self.num_cached], f"states {counts} differ from totals"
        assert counts[PADDING] == int(self._padding)
        for block, state in enumerate(states):
            references = self.references(block)
            assert (references > 0) == (state in (HELD, PADDING)), f"block {block}: {references} references"
        self._check_groups(states)
        free = [block for block, state in enumerate(states) if state in (COLD, READY)]
        present = {b for run in runs_of(free) for r in self._residency.present_runs(run) for b in range(*r)}
        assert present == {b for b in free if states[b] == READY}, "ready blocks are not those whose pages are present"
        first_cold = states.find(COLD)
        assert self.cold_from <= (first_cold if first_cold >= 0 else NO_BLOCK), "a cold block below the first looked at"
        self._residency.check(runs_of(b for b, state in enumerate(states) if state in (HELD, CACHED, PADDING)))

    def _check_groups(self, states: bytes) -> None:
        totals = self.group_totals()
        recount = [[0, 0, 0] for _ in totals]
        for block, state in enumerate(states):
            group = recount[self.group(block)]
            group[0] += state in (HELD, CACHED)
            group[1] += state == HELD
            group[2] += state == READY
        filed = [[used, held, ready, used if ready else -1] for used, held, ready in recount]
        assert totals == filed, "groups (used, held, ready, list) differ from a recount"
        idle = [group for group, (used, held, _) in enumerate(recount) if used and not held]
        assert sorted(self.idle_groups()) == idle, "idle groups differ"
