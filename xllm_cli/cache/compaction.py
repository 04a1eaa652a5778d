"""Empties pages by moving cached blocks together: which blocks move where, and what a move changes in the books.

    pages   [ a . . b ] [ H . c . ] [ d . . . ]         . free   H held, its page stays   a … d cached
    after   [ a . . b ] [ H d c . ]                     d moved: one page less for one block copied

The copy itself is part of a plan's delta, done by every rank after the delta's maps; the source stays findable until it
is acknowledged, and what a move empties leaves with the next delta. Knows neither limits nor why bytes are wanted.
"""

from __future__ import annotations

from xllm_cli.cache.blocks import BlockPool
from xllm_cli.cache.prefix import PrefixIndex
from xllm_cli.cache.residency import Residency

MOST_COPY_BYTES = 64 << 20
"""In one step: some five milliseconds of a processor's memory bandwidth. Where a page of every tensor is more, that."""
WASTE = 0.01
"""Share of the wanted pages that may lie idle for long."""
QUIET_SECONDS = 1.0


class Compactor:
    """The moves of the open plan, if any."""

    def __init__(self, residency: Residency, pool: BlockPool, index: PrefixIndex, *, bytes_per_block: int) -> None:
        self.moves: tuple[tuple[int, int], ...] = ()
        self._residency, self._pool, self._index = residency, pool, index
        self._limit = max(1, max(MOST_COPY_BYTES, residency.pages_across * residency.page_bytes) // bytes_per_block)
        self._promised = 0
        self._futile: tuple[int, int, int] | None = None
        self._quiet: tuple[tuple[int, int, int], float] = ((0, 0, 0), 0.0)

    @property
    def _counts(self) -> tuple[int, int, int]:
        return self._pool.num_held, self._pool.num_cached, self._pool.num_ready

    def waste_pages(self) -> int:
        """Wanted pages beyond what the live blocks would need if they were packed; 0 once moving was found futile."""
        residency, pool = self._residency, self._pool
        if not residency.reclaims or not pool.num_cached or self._futile == self._counts:
            return 0
        packed = residency.packed_pages(pool.first_block + pool.num_held + pool.num_cached)
        return max(0, residency.wanted_pages - packed)

    @property
    def promised(self) -> int:
        """Pages that moves are still to empty for somebody who waits."""
        return min(self._promised, self.waste_pages())

    def promise(self, pages: int) -> None:
        """Empty so many pages with the next plans, as far as moving can, and let them leave at once."""
        self._promised = max(0, min(pages, self.waste_pages()))

    def due(self, now: float) -> float | None:
        """When begin() should be called though nothing else happens: `now` while pages are promised; when the blocks
        have been at rest for a second if more than WASTE of the wanted pages lie idle; else never."""
        waste = self.waste_pages()
        self._promised = min(self._promised, waste)
        if not waste:
            return None
        if self._promised:
            return now
        if self._quiet[0] != self._counts:
            self._quiet = (self._counts, now)
        return self._quiet[1] + QUIET_SECONDS if waste > int(WASTE * self._residency.wanted_pages) else None

    def begin(self, pages: int) -> None:
        """Choose the plan's moves and hold their targets. They may open `pages` pages if they empty more."""
        moves = self._pool.moves(self._limit, pages)
        if not moves:
            self._futile = self._counts
            return
        before = self._residency.coming_pages
        for _, target in moves:
            self._pool.take(target, target + 1)
        self._pool.settle_pages()
        if self._promised:  # as many more have to leave as these open
            self._promised += self._residency.coming_pages - before
        self.moves = tuple(moves)

    def finish(self) -> None:
        """The copies are done: the prefixes are found at their new places."""
        for source, target in self.moves:
            self._index.move(source, target)
            self._pool.move(source, target)
        self._end()
        given = min(self._promised, self._residency.spare_pages)
        self._residency.give_up_pages(given)
        self._promised -= given
        self._pool.settle_pages()

    def undo(self) -> None:
        """The plan did not run: nothing has moved."""
        self._pool.drop([target for _, target in self.moves], {})
        self._end()

    def _end(self) -> None:
        self.moves = ()
        self._pool.settle_pages()
